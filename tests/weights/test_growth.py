"""Runs that start larger than their checkpoint: experts, longer tables."""

import concurrent.futures
import dataclasses
import json
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from tests.support import huggingface as golden
from tests.support import language
from tests.support.refusals import config_error
from tests.weights.test_adapters import BATCH, start
from zjax.checkpoint.export import export_huggingface
from zjax.checkpoint.store import Store
from zjax.config.load import load_config
from zjax.errors import CheckpointError, ConfigError
from zjax.models.build import make_model
from zjax.optim.build import make_optimizer
from zjax.run.build import make_run
from zjax.run.saving import save
from zjax.settings import schema
from zjax.sharding import plan as plans
from zjax.weights import adapters, growth
from zjax.weights.source import Entry, Source, name_leaves

GPT = dataclasses.replace(language.GPT, num_layers=3)
LLAMA = dataclasses.replace(language.LLAMA, num_layers=3)
TOKENS = jnp.arange(32).reshape(4, 8) % GPT.vocab_size


def write_dense(shape, directory):
    """Random weights of a dense model in a file; returns its path and its logits."""
    decoder = language.make_language_model(shape)
    weights = name_leaves(language.params_of(decoder))
    path = f"{directory}/model.safetensors"
    tensors = {n.replace("/", "."): np.asarray(x) for n, x in weights.items()}
    safetensors.numpy.save_file(tensors, path)
    return path, logits_of(decoder)


def make_config(shape, path, moe, *overrides, **sections):
    config = schema.Config(
        global_batch_size=8,
        model=dataclasses.replace(
            shape, moe=schema.TokenChoice(**moe) if moe else None
        ),
        data=schema.Data(source="synthetic"),
        precision=schema.Precision(compute_dtype="float32"),
        checkpoint=schema.Checkpoint(init_from=str(path)),
        **sections,
    )
    return load_config(config, *overrides)


def start_mixture(config, num_devices=1):
    model = make_model(config)
    tx = make_optimizer(config, model)
    return make_run(config, model, tx, devices=jax.devices()[:num_devices])


def logits_of(decoder):
    return np.asarray(nnx.jit(lambda decoder, x: decoder(x))(decoder, TOKENS))


SHARDED = schema.Zero(stage=3, min_shard_elements=8)
HOST = schema.Zero(
    offload=schema.PinnedHost(
        parameter_memory="pinned_host", gradient_memory="pinned_host"
    )
)
PYRAMID = {"num_experts": (2, 4), "top_k": 2, "first_dense": 1, "residual": True}
SHARED = {"num_experts": 4, "top_k": 3, "every": 2, "scores": "sigmoid"}
SHARED |= {"num_shared": 1, "shared_gate": True, "bias_rate": 0.1}


@pytest.mark.parametrize(
    ("shape", "moe", "sections", "num_devices"),
    [
        (GPT, {"num_experts": 4, "top_k": 2}, {}, 1),
        (LLAMA, PYRAMID, {"zero": SHARDED, "mesh": schema.Mesh(expert=2)}, 4),
        (LLAMA, SHARED, {"zero": HOST}, 1),
    ],
)
def test_logits_equal_those_of_the_dense_model(
    shape, moe, sections, num_devices, tmp_path, monkeypatch
):
    """Fails if an expert is the copy of another layer, or gates and values swap."""
    monkeypatch.setattr(plans, "MIN_MOVED_BYTES", 64)
    path, expected = write_dense(shape, tmp_path)
    run = start_mixture(make_config(shape, path, moe, **sections), num_devices)
    np.testing.assert_allclose(
        logits_of(run.bind(run.state)), expected, rtol=2e-4, atol=2e-5
    )


def test_a_run_is_a_source_and_the_log_says_what_is_new(tmp_path, caplog):
    dense = make_config(GPT, "", {})
    run = start_mixture(dense)
    save(tmp_path / "checkpoints", run.state, run)
    config = make_config(GPT, tmp_path, {"num_experts": 2, "every": 3})
    found = start_mixture(config).state.master["blocks"]
    old = run.state.master["blocks"]["mlp"]["up"]["kernel"]
    copies = found["layer2"]["mlp"]["experts"]["up"]["kernel"]
    for expert in range(2):
        np.testing.assert_array_equal(copies[:, expert], old[2:])
    np.testing.assert_array_equal(found["layer0"]["mlp"]["up"]["kernel"], old[:1])
    assert np.std(found["layer2"]["mlp"]["router"]["kernel"]) > 0
    assert caplog.messages[-1] == (
        f"checkpoint.init_from='{tmp_path}' is a dense model: the 2 experts of a layer "
        "are copies of its feed-forward; new are blocks.layer2.mlp.router.kernel; all "
        "other arrays are copied; it differs from the dense model at first, by "
        "model.moe.top_k=1, which weighs an expert by its score"
    )


def test_noise_makes_experts_differ_in_the_same_way_on_any_devices(tmp_path):
    path, _ = write_dense(GPT, tmp_path)
    config = make_config(GPT, path, {"num_experts": 4, "top_k": 2})
    config = dataclasses.replace(
        config, checkpoint=schema.Checkpoint(init_from=path, expert_noise=0.1)
    )
    one = start_mixture(config).state.master["blocks"]["mlp"]["experts"]["up"]
    assert not np.any(one["bias"][:, 0] - one["bias"][:, 1])
    difference = one["kernel"][:, 0] - one["kernel"][:, 1]
    deviation = np.std(difference) / np.std(one["kernel"]) / 2**0.5
    np.testing.assert_allclose(deviation, 0.1, rtol=0.1)
    split = dataclasses.replace(config, zero=SHARDED, mesh=schema.Mesh(expert=2))
    other = start_mixture(split, 4).state.master["blocks"]["mlp"]["experts"]["up"]
    np.testing.assert_array_equal(one["kernel"], other["kernel"])


def test_noise_for_the_experts_of_a_mixture_is_refused(tmp_path):
    moe = {"num_experts": 2}
    shape = dataclasses.replace(GPT, moe=schema.TokenChoice(**moe))
    path, _ = write_dense(shape, tmp_path)
    config = make_config(GPT, path, moe, "checkpoint.expert_noise=0.1")
    with config_error(
        "checkpoint.expert_noise=0.1 has no effect on the experts of "
        f"checkpoint.init_from={path!r}; leave it at 0.0"
    ):
        start_mixture(config)


def test_a_source_of_another_shape_is_refused(tmp_path):
    path, _ = write_dense(GPT, tmp_path)
    shape = dataclasses.replace(GPT, num_layers=6, embed_size=32)
    moe = {"num_experts": 4, "expert_size": 48, "every": 2}
    with pytest.raises(ConfigError) as error:
        start_mixture(make_config(shape, path, moe))
    source = f"of checkpoint.init_from={path!r}"
    assert str(error.value) == (
        f"model.num_layers=6 is not the number of layers 3 {source}; use 3\n"
        f"model.embed_size=32 is not the width 16 {source}; use 16\n"
        f"model.moe.expert_size=48 is not the feed-forward width 24 {source}; use 24"
    )


def test_a_source_that_lacks_an_array_is_refused(tmp_path):
    path, _ = write_dense(GPT, tmp_path)
    shape = dataclasses.replace(LLAMA, num_kv_heads=4)
    with pytest.raises(CheckpointError, match=r"blocks\.mlp\.experts\.up\.kernel"):
        start_mixture(make_config(shape, path, {"num_experts": 4}))


@pytest.mark.parametrize(
    ("source", "change", "array"),
    [
        (LLAMA, {"activation": "gelu"}, "mlp.gate.kernel"),
        (LLAMA, {"query_key_norm": False}, "attention.query_norm.scale"),
        (GPT, {"norm": "rms_norm"}, "attention_norm.bias"),
    ],
)
def test_a_source_with_an_array_that_the_mixture_lacks_is_refused(
    source, change, array, tmp_path
):
    """Fails if experts start from the values of `swiglu` without its gates."""
    source = dataclasses.replace(source, query_key_norm=True)
    path, _ = write_dense(source, tmp_path)
    shape = dataclasses.replace(source, **change)
    problem = rf"blocks\.{array}='.*' is in .* but not in this model"
    with pytest.raises(CheckpointError, match=problem):
        start_mixture(make_config(shape, path, {"num_experts": 4, "every": 3}))


NEW = {
    "adapters": (
        adapters.with_adapters,
        ("bfloat16",),
        {"kernel": (3, 2, 5), "lora.a": (3, 2, 4), "lora.b": (3, 4, 5)},
        "kernel",
    ),
    "mixture": (
        growth.upcycled,
        (
            dataclasses.replace(
                GPT, embed_size=2, mlp_size=5, moe=schema.TokenChoice(num_experts=4)
            ),
            schema.Checkpoint(),
            0,
        ),
        {"experts.up.kernel": (3, 4, 2, 5), "router.kernel": (3, 2, 4)},
        "experts.up.kernel",
    ),
}


@pytest.mark.parametrize("kind", NEW)
def test_new_arrays_are_drawn_from_the_first_read_on(kind):
    """Fails if a checkpoint that is refused draws them, or others do not start to."""
    adapt, settings, shapes, old = NEW[kind]
    prefix = "blocks.mlp.up." if kind == "adapters" else "blocks.mlp."
    wanted = {f"{prefix}{n}": Entry(shape, "float32") for n, shape in shapes.items()}
    kernel = {"blocks.mlp.up.kernel": Entry((3, 2, 5), "float32")}
    source = Source(kernel, lambda name, index: np.zeros((3, 2, 5))[index])
    drawn = []

    def draw():
        drawn.append(kind)
        return concurrent.futures.Future()

    found = adapt(source, wanted, *settings, lambda names: draw)
    assert found.entries.keys() == wanted.keys() and not drawn
    found.read(f"{prefix}{old}", tuple(slice(0, n) for n in shapes[old]))
    assert drawn


def test_new_arrays_are_drawn_while_others_are_read():
    """Fails if a run waits for them before it reads."""
    started, go_on = threading.Event(), threading.Event()

    def wait():
        started.set()
        return np.float32(not go_on.wait(300))

    def init(key):
        late = jax.pure_callback(wait, jax.ShapeDtypeStruct((), np.float32))
        drawn = jax.random.normal(key, (2,))
        return {"a": {"b": drawn + late[None]}, "c": jnp.zeros(3)}, ()

    model = dataclasses.replace(make_model(make_config(GPT, "", {})), init=init)
    key = jax.random.key(0)
    with jax.threefry_partitionable(False):
        expected = jax.random.normal(key, (2,))
        draw = growth.initial_values(model.init, key)(["a.b"])
    values = draw()
    assert started.wait(300)
    go_on.set()
    (found,) = values.result().values()
    assert draw() is values
    np.testing.assert_array_equal(found, expected)


GROWN = ("model.vocab_size=64", "checkpoint.resize_vocabulary=True")
TABLES = (("embedding", "tokens"), ("head", "kernel"))


def tables_of(state):
    return [np.asarray(state.master[x][y]) for x, y in TABLES]


@pytest.fixture(scope="module")
def plain():
    return start()


def test_new_rows_are_the_mean(plain, caplog, monkeypatch):
    """Fails if they are random or zeros, or old rows move."""
    monkeypatch.setattr(growth, "_SLAB_ROWS", 7)
    run = start(*GROWN, "lora.rank=2")
    for new, old in zip(tables_of(run.state), tables_of(plain.state), strict=True):
        assert new.shape == (64, 16)
        np.testing.assert_array_equal(new[:61], old)
        mean = np.broadcast_to(old.mean(0, np.float64), (3, 16))
        np.testing.assert_allclose(new[61:], mean, rtol=1e-6)
    assert caplog.messages[-1] == (
        f"checkpoint.init_from='{golden.FOLDER / 'llama'}' has 61 tokens, and "
        "model.vocab_size=64: new rows of embedding/tokens, head/kernel are the mean "
        "of the others; frozen are embedding/tokens, head/kernel: lora.also_train "
        "trains them"
    )


def test_new_rows_are_trained_and_exported(plain, tmp_path):
    """Fails if an export has the old size, or rows beside adapters stay as they are."""
    also = "lora.also_train=('embedding/tokens','head/kernel')"
    run = start(*GROWN, "lora.rank=2", also)
    tokens = {name: x.copy() for name, x in BATCH.items()}
    tokens["tokens"][:, 0] = tokens["targets"][:, -1] = 62
    first = tables_of(run.state)
    state, _ = run.step(run.state, tokens)
    for new, old in zip(tables_of(state), first, strict=True):
        assert (new[62] != old[62]).any()
    save(tmp_path / "run", state, run)
    export_huggingface(Store(str(tmp_path / "run")), str(tmp_path / "out"))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["vocab_size"] == 64
    (file,) = (tmp_path / "out").glob("*.safetensors")
    weights = safetensors.numpy.load_file(file)
    names = ("model.embed_tokens.weight", "lm_head.weight")
    for name, table in zip(names, tables_of(state), strict=True):
        np.testing.assert_array_equal(weights[name], table)
    again = start("model.vocab_size=64", directory=tmp_path / "out")
    np.testing.assert_array_equal(tables_of(again.state)[0], tables_of(state)[0])
    grown = start(
        "model.vocab_size=66", GROWN[1], f"checkpoint.init_from={tmp_path}/run"
    )
    np.testing.assert_array_equal(tables_of(grown.state)[0][:64], tables_of(state)[0])


def test_other_sizes_are_refused():
    """Fails if rows are dropped, or added without being asked for."""
    folder = golden.FOLDER / "llama"
    with config_error(
        f"model.vocab_size=64 is not the 61 of {folder}/config.json; use 61, or set "
        "checkpoint.resize_vocabulary"
    ):
        start("model.vocab_size=64")
    for size in (61, 60):
        with config_error(
            "checkpoint.resize_vocabulary=True has no new rows: checkpoint.init_from="
            f"'{folder}' has 61 tokens, model.vocab_size is {size}; set it to False"
        ):
            start(GROWN[1], f"model.vocab_size={size}")


def test_no_table_to_grow_is_refused():
    """Fails if a model of a user is started as if nothing had been asked."""
    entries = {"up.kernel": Entry((4, 3), "float32")}
    source = Source(entries, lambda name, index: np.ones((4, 3))[index])
    checkpoint = schema.Checkpoint(init_from="old", resize_vocabulary=True)
    with config_error(
        "checkpoint.resize_vocabulary=True finds no table of tokens in "
        "checkpoint.init_from='old' that the model has; set it to False"
    ):
        growth.resized(source, entries, checkpoint, 8, lambda name: False)
