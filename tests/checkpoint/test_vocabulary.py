"""Tables grow by rows that are the mean of the others, when that is asked for."""

import json

import numpy as np
import pytest
import safetensors.numpy

from tests.checkpoint.test_adapters import BATCH, start
from tests.support import huggingface as golden
from zjax.checkpoint import growth
from zjax.checkpoint.layers import Source
from zjax.checkpoint.layout import Entry
from zjax.checkpoint.store import Store
from zjax.config.check import check_config
from zjax.config.load import load_config
from zjax.errors import ConfigError
from zjax.huggingface.export import export_huggingface
from zjax.run.saving import save
from zjax.settings import schema

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
    with caplog.at_level("WARNING", logger="absl"):
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


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ("model.vocab_size=64",),
            "model.vocab_size=64 is not the 61 of {}/config.json; use 61, or set "
            "checkpoint.resize_vocabulary",
        ),
        (
            (GROWN[1],),
            "checkpoint.resize_vocabulary=True has no new rows: checkpoint.init_from="
            "'{}' has 61 tokens, model.vocab_size is 61; set it to False",
        ),
        (
            (GROWN[1], "model.vocab_size=60"),
            "checkpoint.resize_vocabulary=True has no new rows: checkpoint.init_from="
            "'{}' has 61 tokens, model.vocab_size is 60; set it to False",
        ),
    ],
)
def test_other_sizes_are_refused(overrides, expected):
    """Fails if rows are dropped, or added without being asked for."""
    with pytest.raises(ConfigError) as caught:
        start(*overrides)
    assert str(caught.value) == expected.format(golden.FOLDER / "llama")


def test_nothing_to_resize_is_refused():
    """Fails if the setting is dropped where no checkpoint is read."""
    with pytest.raises(ConfigError) as caught:
        check_config(load_config({}, GROWN[1]), num_devices=1)
    assert str(caught.value) == (
        "checkpoint.resize_vocabulary=True has no effect with checkpoint.init_from=''; "
        "set it to False"
    )


def test_no_table_to_grow_is_refused():
    """Fails if a model of a user is started as if nothing had been asked."""
    entries = {"up.kernel": Entry((4, 3), "float32")}
    source = Source(entries, lambda name, index: np.ones((4, 3))[index])
    checkpoint = schema.Checkpoint(init_from="old", resize_vocabulary=True)
    with pytest.raises(ConfigError) as error:
        growth.resized(source, entries, checkpoint, 8, lambda name: False)
    assert str(error.value) == (
        "checkpoint.resize_vocabulary=True finds no table of tokens in "
        "checkpoint.init_from='old' that the model has; set it to False"
    )
