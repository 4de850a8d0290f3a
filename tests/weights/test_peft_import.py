"""Adapters that PEFT wrote start a run, which computes what PEFT computed."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from tests.support import huggingface as golden
from tests.support.refusals import config_error
from zjax.checkpoint.export import export_peft, export_safetensors
from zjax.checkpoint.store import Store
from zjax.config.check import check_config
from zjax.config.load import load_config
from zjax.errors import CheckpointError, ConfigError
from zjax.huggingface import adapter_settings
from zjax.run.saving import save
from zjax.weights.peft_tensors import check_saved, find_saved

FOLDER = golden.FOLDER.parent / "peft"
TENSORS = "adapter_model.safetensors"
DOWN = "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"


def start(directory, family="llama", **changes):
    config = golden.make_config(family)
    settings = adapter_settings(directory) | changes
    lora = {f"lora.{name}": value for name, value in settings.items()}
    return golden.start(load_config(config, lora))


def copy(name, directory, **changes):
    shutil.copytree(FOLDER / name, directory)
    path = directory / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return directory


def test_settings_are_those_of_the_files():
    """Fails if a target, the form or the factor of rank-stabilised adapters is lost."""
    found = adapter_settings(FOLDER / "rslora")
    targets = ("attention/query$", "attention/value$", "mlp/down$")
    assert found == {
        "rank": 4,
        "alpha": 6.0,
        "form": "lora",
        "dropout": 0.0,
        "targets": targets,
        "init_from": str(FOLDER / "rslora"),
    }
    assert len(adapter_settings(FOLDER / "dora")["targets"]) == 7
    patterns = ("attention_norm/scale$", "embedding/tokens$", "head/kernel$")
    assert adapter_settings(FOLDER / "saved")["also_train"] == patterns


def logits_of(run, tokens):
    model, tokens = run.bind(run.state), jnp.asarray(tokens, jnp.int32)
    return np.asarray(nnx.jit(lambda model, x: model(x))(model, tokens))


@pytest.mark.parametrize("name", ["rslora", "dora", "saved"])
def test_logits_are_those_of_peft_and_tensors_go_out_as_they_came(name, tmp_path):
    """Fails if a matrix, its order of dims or the factor differs from PEFT's."""
    run = start(FOLDER / name)
    with np.load(FOLDER / name / "expected.npz") as file:
        tokens, expected = file["tokens"], file["logits"]
    np.testing.assert_allclose(logits_of(run, tokens), expected, rtol=2e-5, atol=2e-5)
    base = golden.start(golden.make_config("llama"))
    assert np.abs(logits_of(base, tokens) - expected).max() > 0.1
    save(tmp_path / "run", run.state, run)
    export_peft(Store(str(tmp_path / "run")), str(tmp_path / "out"))
    came, went = (
        safetensors.numpy.load_file(folder / TENSORS)
        for folder in (FOLDER / name, tmp_path / "out")
    )
    assert came.keys() == went.keys()
    for tensor, x in came.items():
        np.testing.assert_array_equal(went[tensor], x, err_msg=tensor)
    again = adapter_settings(tmp_path / "out")
    assert again | {"init_from": ""} == adapter_settings(FOLDER / name) | {
        "init_from": ""
    }


def test_dropout_comes_in_and_goes_out(tmp_path):
    """Fails if fine-tuning goes on without the dropout that it began with."""
    folder = copy("rslora", tmp_path / "a", lora_dropout=0.25)
    assert adapter_settings(folder)["dropout"] == 0.25
    run = start(folder)
    assert run.config.lora.dropout == 0.25
    save(tmp_path / "run", run.state, run)
    export_peft(Store(str(tmp_path / "run")), str(tmp_path / "out"))
    assert adapter_settings(tmp_path / "out")["dropout"] == 0.25
    dora = copy("dora", tmp_path / "b", lora_dropout=0.25)
    assert adapter_settings(dora)["dropout"] == 0.0
    start(folder, dropout=0.0)


@pytest.mark.parametrize(
    ("modules", "problem"),
    [
        (
            ["lm_head", "classifier"],
            "modules_to_save='classifier' of {} is a module without tensors; use an "
            "adapter without it",
        ),
        (
            ["norm"],
            "modules_to_save='norm' of {} has "
            "model.layers.1.post_attention_layernorm.weight, which is one of "
            "mlp_norm/scale, attention_norm/scale, attention_output_norm/scale by "
            "family of the arrays of zjax; write the settings of lora by hand",
        ),
        (
            ["rotary"],
            "modules_to_save='rotary' of {} has model.rotary.weight, which is none of "
            "the arrays of zjax; use an adapter without it",
        ),
        (
            ["lm_head", 3],
            "modules_to_save=['lm_head', 3] of {} is no list of modules; correct it "
            "there",
        ),
    ],
    ids=["no-tensor", "several-arrays", "no-array", "no-names"],
)
def test_saved_modules_that_zjax_has_not_are_refused(modules, problem, tmp_path):
    """Fails if what PEFT trained is left out, or another array is trained."""
    folder = copy("saved", tmp_path / "a", modules_to_save=modules)
    tensors = safetensors.numpy.load_file(folder / TENSORS)
    for name in ("layers.1.post_attention_layernorm", "rotary"):
        tensors[f"base_model.model.model.{name}.weight"] = np.ones(16)
    safetensors.numpy.save_file(tensors, folder / TENSORS)
    with config_error(problem.format(folder / "adapter_config.json")):
        adapter_settings(folder)


def test_saved_modules_replace_layers_that_a_base_stacks(tmp_path):
    """Fails if norms of a base that is a run stay beside those of the adapter."""
    base = golden.start(golden.make_config("llama"))
    save(tmp_path / "base", base.state, base)
    lora = {f"lora.{n}": x for n, x in adapter_settings(FOLDER / "saved").items()}
    lora["checkpoint.init_from"] = str(tmp_path / "base")
    run = golden.start(load_config(golden.make_config("llama"), lora))
    expected = start(FOLDER / "saved").state.master
    jax.tree.map(np.testing.assert_array_equal, run.state.master, expected)


def test_saved_modules_that_a_run_freezes_are_refused():
    """Fails if an export would leave out what came in."""
    with config_error(
        "lora.also_train=('head/kernel$',) freezes embedding/tokens, "
        "blocks/attention_norm/scale, which modules_to_save of "
        f"{FOLDER / 'saved' / 'adapter_config.json'} trains; name them, too"
    ):
        start(FOLDER / "saved", also_train=("head/kernel$",))


def test_saved_modules_that_are_not_apart_are_refused(tmp_path):
    """Fails if the head of a tied model is trained, or `c_attn` in part."""
    config = load_config({"lora": {"rank": 2, "also_train": [".*"]}})
    names = ["wte", "attn"]
    saved = find_saved(names, config.model, "gpt2")
    with pytest.raises(ConfigError) as caught:
        check_saved(names, saved, config.lora, config.model, tmp_path)
    start, remedy = (
        f"modules_to_save={names} of {tmp_path}",
        "use an adapter without it",
    )
    assert str(caught.value).splitlines() == [
        f"{start} trains an embedding that is the head, too, which PEFT has apart; "
        f"{remedy}",
        f"{start} trains transformer.h.0.attn.c_attn.weight, which is no array of its "
        f"own; {remedy}",
    ]


def test_adapter_of_an_encoder_comes_back(tmp_path):
    """Fails if a layer of the head or of a block is lost between the two."""
    tokens = np.random.default_rng(0).integers(0, 60, (8, 9)).astype(np.int32)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    quick = (
        "optimizer.schedule.num_warmup_steps=0",
        "optimizer.peak_learning_rate=0.05",
    )
    run = golden.start(golden.make_config("bert", "lora.rank=2", *quick))
    state = run.state
    for _ in range(2):
        state, _ = run.step(state, batch)
    save(tmp_path / "run", state, run)
    export_peft(Store(str(tmp_path / "run")), str(tmp_path / "out"))
    settings = adapter_settings(tmp_path / "out")
    assert settings["targets"] == (
        *("attention/key$", "attention/out$", "attention/query$", "attention/value$"),
        *("head/transform$", "mlp/down$", "mlp/up$"),
    )
    lora = {f"lora.{name}": value for name, value in settings.items()}
    again = golden.start(load_config(golden.make_config("bert"), lora))
    jax.tree.map(np.testing.assert_array_equal, again.state.master, state.master)
    found, wanted = again.evaluate(again.state, batch), run.evaluate(state, batch)
    np.testing.assert_allclose(found["loss"], wanted["loss"], rtol=1e-6)


JOINED = {"joined": ("phi3", "mlp/gate$ mlp/up$"), "joined_dora": ("gpt2", "")}


@pytest.mark.parametrize("name", JOINED)
def test_an_adapter_of_joined_matrices_is_one_for_each(name, tmp_path, caplog):
    """Fails if a part has another's rows, or is left out."""
    family, others = JOINED[name]
    targets = adapter_settings(FOLDER / name)["targets"]
    inputs = (f"attention/{x}$" for x in ("key", "query", "value"))
    assert targets == (*inputs, *others.split())
    folder = copy(name, tmp_path / "a", new_key=1)
    run = start(folder, family)
    path = folder / "adapter_config.json"
    assert caplog.messages.count(f"{path}: not read: new_key=1") == 1
    with np.load(folder / "expected.npz") as file:
        found = logits_of(run, file["tokens"])
        np.testing.assert_allclose(found, file["logits"], rtol=2e-5, atol=2e-5)


def test_a_module_that_is_adapted_in_part_is_refused():
    with config_error(
        "lora.targets=('attention/query$',) adapts blocks/attention/query, a part of "
        "transformer.h.0.attn.c_attn in gpt2; adapt the other parts, too"
    ):
        start(FOLDER / "joined_dora", "gpt2", targets=("attention/query$",))


def test_keys_that_zjax_does_not_compute_are_refused(tmp_path):
    """Fails if one of several problems hides the others."""
    changes = {"rank_pattern": {"q_proj": 8}, "bias": "all", "r": 0}
    changes["lora_dropout"] = 1.0
    folder = copy("rslora", tmp_path / "a", **changes)
    path = folder / "adapter_config.json"
    with pytest.raises(ConfigError) as caught:
        adapter_settings(folder)
    remedy = "use an adapter without it"
    assert str(caught.value).splitlines() == [
        f"bias='all' of {path} is not supported; {remedy}",
        f"rank_pattern={{'q_proj': 8}} of {path} is not supported; {remedy}",
        f"r=0 of {path} is no positive number; correct it there",
        f"lora_dropout=1.0 of {path} is no probability below 1; correct it there",
    ]


def test_settings_that_differ_from_the_files_are_refused():
    with pytest.raises(ConfigError) as caught:
        start(FOLDER / "rslora", rank=2, alpha=3.0)
    path = FOLDER / "rslora" / "adapter_config.json"
    assert str(caught.value).splitlines() == [
        f"lora.rank=2 is not the 4 of {path}; use 4",
        f"lora.alpha=3.0 is not the 6.0 of {path}; use 6.0",
    ]


def test_tensors_that_differ_from_the_model_are_named(tmp_path):
    """Fails if a layer starts from new values, or a tensor is left out, in silence."""
    folder = copy("rslora", tmp_path / "a")
    tensors = safetensors.numpy.load_file(folder / TENSORS)
    removed = {name: x for name, x in tensors.items() if name != DOWN}
    safetensors.numpy.save_file(removed, folder / TENSORS)
    with pytest.raises(CheckpointError) as caught:
        start(folder)
    missing = f"{DOWN}='float32[16,4]' is missing from {folder}; "
    assert str(caught.value).startswith(missing)
    with pytest.raises(CheckpointError) as caught:
        start(FOLDER / "rslora", targets=("attention/query$",))
    assert "v_proj.lora_A.weight" in str(caught.value)
    cut = (folder / TENSORS).read_bytes()[:200]
    (folder / TENSORS).write_bytes(cut)
    with pytest.raises(CheckpointError, match="is not a readable safetensors file"):
        adapter_settings(folder)


def test_modules_without_a_layer_are_refused(tmp_path):
    """The head, and a router, which is no layer of the kind that is adapted."""
    folder = copy("rslora", tmp_path / "a")
    modules = ("lm_head", "model.layers.0.mlp.gate", "model.layers.0.mlp.router")
    names = [f"base_model.model.{name}.lora_A.weight" for name in modules]
    tensors = {name: np.zeros((4, 16)) for name in names}
    safetensors.numpy.save_file(tensors, folder / TENSORS)
    remedy = "give a directory that PEFT saved, or that --format=peft wrote"
    with pytest.raises(ConfigError) as caught:
        adapter_settings(folder)
    assert str(caught.value).splitlines() == [
        f"{TENSORS}={name!r} in {folder} adapts no layer that zjax adapts; {remedy}"
        for name in names
    ]
    safetensors.numpy.save_file({"other": np.zeros(3)}, folder / TENSORS)
    with config_error(
        f"{TENSORS}='{folder / TENSORS}' has no tensor that ends in lora_A.weight; "
        f"{remedy}"
    ):
        adapter_settings(folder)


def test_a_model_of_no_family_takes_no_adapters_of_peft(tmp_path):
    """A checkpoint of zjax has no config.json that says what PEFT calls its layers."""
    run = golden.start(golden.make_config("llama"))
    save(tmp_path / "run", run.state, run)
    base = tmp_path / "base.safetensors"
    export_safetensors(Store(str(tmp_path / "run")), str(base))
    config = golden.make_config("llama")
    settings = adapter_settings(FOLDER / "rslora")
    lora = {f"lora.{name}": value for name, value in settings.items()}
    changes = {"checkpoint.init_from": str(base), "model.attention": "sparse"}
    with config_error(
        "model.attention='sparse' is 'dense' in llama; leave lora.init_from empty"
    ):
        golden.start(load_config(config, lora | changes))


def test_adapters_without_a_base_are_refused():
    """Fails if a directory is named and not read."""
    config = load_config({"lora": {"rank": 4, "init_from": "adapter"}})
    with config_error(
        "lora.init_from='adapter' adapts the weights of checkpoint.init_from, which is "
        "empty; set that, too"
    ):
        check_config(config, num_devices=1)
