"""Runs that learned rounded matrices go out with the codes that they learned."""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy

import zjax
from tests.support import huggingface as golden
from tests.support.refusals import config_error
from zjax.checkpoint import export, export_gguf, learned
from zjax.checkpoint.store import Store
from zjax.errors import ConfigError
from zjax.run.saving import save


def run_of(*rules, **settings):
    """Rules of a run, and the Llama of 32 to 256 inputs that learned them."""
    model = golden.settings_of("llama") | {"embed_size": 128, "num_heads": 4}
    model |= {"num_kv_heads": 2, "head_size": 8, "mlp_size": 256}
    settings = zjax.load_config({"quantize": {"rules": [*rules]}}).quantize
    return settings, zjax.make_model(zjax.load_config({"model": model}))


def check_grid(run, quantize, layouts, **given):
    learned.check_grid(*run, quantize, layouts, **{"has_adapters": False} | given)


FITTING = [
    (learned.HUGGINGFACE, "w4a16", "int4", 128),
    (learned.HUGGINGFACE, "w8a8", "int8", 0),
    (learned.HUGGINGFACE, "fp8", "float8", 0),
    (learned.GGUF, "q8_0", "int8", 32),
    (learned.GGUF, "mxfp4", "mxfp4", 32),
]


@pytest.mark.parametrize(("layouts", "name", "weights", "size"), FITTING)
def test_a_grid_goes_out_in_its_own_layout_alone(layouts, name, weights, size):
    """Fails if a layout takes the grid of another, or refuses the one that fits."""
    run = run_of(
        {"pattern": "key", "weights": "compute"},
        {"weights": weights, "group_size": size},
    )
    check_grid(run, name, layouts)
    for other in {*layouts, "q4_0"} & {*layouts} - {name, "mxfp4"}:
        with pytest.raises(ConfigError, match=f"; use {name} or leave"):
            check_grid(run, other, layouts)


def test_each_grid_of_a_layer_is_refused_with_the_layer():
    run = run_of({"pattern": "mlp", "weights": "int8", "group_size": 0}, {})
    with config_error(
        "--quantize='q4_0' rounds again blocks/attention/key and 3 more layers, which "
        "learned int4 in one group of all inputs; leave --quantize out\n"
        "--quantize='q4_0' rounds again blocks/mlp/down and 2 more layers, which "
        "learned int8 in one group of all inputs; leave --quantize out"
    ):
        check_grid(run, "q4_0", learned.GGUF)


def test_a_layer_is_held_to_the_groups_that_it_has():
    """Fails if the size in a rule decides, and not the groups of each layer."""
    # Groups of up to 4,096 of 128 inputs are one group of all, as w8a8 has.
    check_grid(run_of({"weights": "int8", "group_size": 4096}), *W8A8)
    # Groups of 128 do not divide 32 inputs of `out`, which w4a16 leaves plain.
    check_grid(run_of({"weights": "int4"}), "w4a16", learned.HUGGINGFACE)
    # The experts alone become mxfp4.
    check_grid(run_of({"weights": "int8"}), "mxfp4", learned.HUGGINGFACE)
    with config_error(
        "--quantize='w8a8' rounds again blocks/mlp/down, which learned int8 in groups "
        "of 128 inputs; leave --quantize out"
    ):
        check_grid(run_of({"weights": "int8"}), *W8A8)


W8A8 = "w8a8", learned.HUGGINGFACE


def test_runs_without_rules_are_rounded_to_any_grid():
    _, model = run_of({})
    check_grid((None, model), "q4_0", learned.GGUF)


def test_merged_adapters_are_rounded_once_more_and_the_log_says_so(caplog):
    check_grid(run_of({}), "w4a16", learned.HUGGINGFACE, has_adapters=True)
    assert caplog.messages == [
        "--quantize=w4a16 rounds matrices with merged adapters, which lie on no grid, "
        "once more"
    ]


INT8 = "quantize.rules=[{'weights':'int8','group_size':0}]"


def saved(directory, *overrides):
    """A checkpoint of a rounded Llama that has not taken a step."""
    run = golden.start(golden.make_config("llama", INT8, *overrides))
    save(directory, run.state, run)
    return Store(str(directory))


def read_all(folder):
    return safetensors.numpy.load_file(folder / "model.safetensors")


def test_exports_have_the_learned_codes(tmp_path, monkeypatch):
    """Fails if matrices are rounded a second time, or other grids pass."""
    store = saved(tmp_path / "run", "precision.compute_dtype=bfloat16")
    export.export_huggingface(store, str(tmp_path / "plain"))
    export.export_huggingface(store, str(tmp_path / "codes"), quantize="w8a8")
    plain, coded = read_all(tmp_path / "plain"), read_all(tmp_path / "codes")
    scales = [name for name in coded if name.endswith("_scale")]
    assert scales
    for name in scales:
        codes = coded[name.removesuffix("_scale")]
        assert codes.dtype == np.int8
        found = np.float32(codes) * np.float32(coded[name])
        np.testing.assert_array_equal(found, plain[name.removesuffix("_scale")])
    again = "rounds again blocks/attention/key and 6 more layers, which learned int8 in"
    again += " one group of all inputs"
    with config_error(f"--quantize='fp8' {again}; use w8a8 or leave --quantize out"):
        export.export_huggingface(store, str(tmp_path / "other"), quantize="fp8")
    path = tmp_path / "model.gguf"
    # Blocks of 32 divide no matrix of this model.
    monkeypatch.setitem(learned.GGUF, "q8_0", learned.Layout("int8", 8))
    with config_error(f"--quantize='q8_0' {again}; leave --quantize out"):
        export_gguf.export_gguf(store, str(path), quantize="q8_0")
    assert not (tmp_path / "other").exists()
    assert not path.exists()
    for kind in ("f16", "bf16", "f32"):
        export_gguf.export_gguf(store, str(path), quantize=kind)


def test_adapters_without_their_rounded_base_are_refused(tmp_path):
    """Fails if PEFT adds adapters to a base that training did not read."""
    store = saved(tmp_path / "run", "lora.rank=2")
    with config_error(
        "quantize.rules=[Rule(pattern='.*', weights='int8', group_size=0, "
        "activations='compute')] round the base of the adapters, which PEFT loads "
        "unrounded; use --format=hf, which merges adapters"
    ):
        export.export_peft(store, str(tmp_path / "adapter"))
    assert not (tmp_path / "adapter").exists()


class Own(nn.Module):
    """A model of a user."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(x)


def test_weights_of_a_users_model_go_out_as_they_are(tmp_path, caplog):
    """Fails if rules for the layers of the user are held to the built-in model."""
    batch = {"x": np.ones((8, 16), np.float32)}
    config = {"quantize": {"rules": [{"pattern": "Dense_0", "group_size": 8}]}}

    def loss(model, batch, key):
        return jnp.mean(model(batch["x"]) ** 2)

    run = zjax.initialize(Own(), optax.sgd(0.1), loss, batch, config)
    save(tmp_path / "run", run.state, run)
    path = tmp_path / "model.safetensors"
    export.export_safetensors(Store(str(tmp_path / "run")), str(path))
    found = safetensors.numpy.load_file(path)["Dense_0.kernel"]
    master = np.asarray(run.state.master["Dense_0"]["kernel"])
    np.testing.assert_array_equal(found, master[:16, :3])
    assert caplog.messages[-1] == (
        "quantize stays without effect on the weights of your own model: they are "
        "read and exported unrounded"
    )
