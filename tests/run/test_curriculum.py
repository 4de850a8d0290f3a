"""A curriculum in a run: what it trains on, tells, resumes and refuses."""

import json

import jax
import numpy as np
import pytest

from tests.support import small_run
from zjax.config import load_config
from zjax.data import source
from zjax.data.analyze import analyze
from zjax.errors import ConfigError, DataError

DATA = ("data.source=standard_library", "model.vocab_size=257")
METRIC = {"index": "voc.index", "pacing": {"num_steps": 6, "kind": "root"}}
CURRICULUM = {"curriculum": {"metrics": (METRIC,)}}
RESHAPE = (
    "sequence_warmup=reshape",
    "sequence_warmup.pacing.start=4",
    "sequence_warmup.pacing.multiple=4",
    "sequence_warmup.pacing.num_steps=4",
)
FIELD = "curriculum.metrics[0]"


class FewRows:
    """The first rows of the training data."""

    def __init__(self, rows):
        self._rows = rows

    def __len__(self):
        return 500

    def read(self, indices, /):
        return self._rows.read(indices)

    def digest(self):
        return self._rows.digest()


@pytest.fixture
def index(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    opened = source.open_rows
    monkeypatch.setattr(source, "open_rows", lambda *given: FewRows(opened(*given)))
    config = load_config(small_run.SETTINGS, *DATA)
    rows = source.open_rows(config, "train")
    digest = source.digest_samples(config.data, rows)
    return analyze(rows, ".", ["voc"], vocab_size=257, digest=digest)["voc"]


def records(directory):
    lines = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "loss" in line]


def assert_equal(one, other):
    arrays = small_run.arrays(one), small_run.arrays(other)
    jax.tree.map(np.testing.assert_array_equal, *arrays)


def test_a_run_draws_easy_rows_and_tells_the_difficulty(tmp_path, index):
    """With batches of many short rows besides; its steps are those of its loader."""
    trainer = small_run.make_trainer(tmp_path / "a", *DATA, CURRICULUM, *RESHAPE)
    rows = source.open_rows(trainer.config, "train")
    batch = next(trainer.loader)
    assert batch["tokens"].shape == (48, 4)  # 16 * 17 / 5 = 54.4, in 16 shares
    easiest = rows.read(index.samples[: 500 // 100 * 41])["tokens"].tolist()
    starts = {tuple(row[:4]) for row in easiest} | {tuple(row[5:9]) for row in easiest}
    starts |= {tuple(row[10:14]) for row in easiest}
    starts |= {tuple(row[12:16]) for row in easiest}
    assert {tuple(row) for row in np.asarray(batch["tokens"]).tolist()} <= starts
    trainer.loader.rewind()
    trainer.fit()
    trainer.close()
    found = records(tmp_path / "a")
    assert [line["difficulty_voc"] for line in found] == [41, 58, 71, 81, 91] + [
        100
    ] * 3
    assert [line["weight"] for line in found][3:] == [16 * 16.0] * 5


@pytest.mark.parametrize("stop", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_run_that_continues_is_the_run_without_a_stop(tmp_path, index, stop):
    whole = small_run.fit(tmp_path / "a", *DATA, CURRICULUM)
    saved = small_run.make_trainer(tmp_path / "b", *DATA, CURRICULUM)
    with saved.loader as batches:
        for _ in range(stop):
            saved.state, _ = saved.run.step(saved.state, next(batches))
        saved.save()
    saved.close()
    assert_equal(whole, small_run.fit(tmp_path / "b", *DATA, CURRICULUM))
    other = {"curriculum": {"metrics": (METRIC | {"pacing": {"num_steps": 7}},)}}
    with pytest.raises(DataError) as error:
        small_run.make_trainer(tmp_path / "b", *DATA, other)
    assert f"{FIELD}.pacing.num_steps=7 was 6 in the saved run" in str(error.value)


def test_given_batches_have_no_curriculum(tmp_path, index):
    with pytest.raises(ConfigError) as error:
        small_run.make_trainer(tmp_path, *DATA, CURRICULUM, batches=[])
    assert str(error.value) == (
        "curriculum.metrics=('voc.index',) do not order given batches; leave it at ()"
    )
