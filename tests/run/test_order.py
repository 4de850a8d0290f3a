"""A curriculum and length buckets in a run: what it trains on, tells and resumes."""

import numpy as np
import pytest

from tests.support import small_run
from tests.support.refusals import config_error
from zjax.config import load_config
from zjax.data import make_loader, source
from zjax.data.analyze import analyze
from zjax.errors import ConfigError, DataError
from zjax.schedule.buckets import rate_factors
from zjax.settings import schema

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
    found = small_run.records(tmp_path / "a")
    assert [line["difficulty_voc"] for line in found] == [41, 58, 71, 81, 91] + [
        100
    ] * 3
    assert [line["weight"] for line in found][3:] == [16 * 16.0] * 5


@pytest.mark.parametrize("stop", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_run_that_continues_is_the_run_without_a_stop(tmp_path, index, stop):
    whole = small_run.fit(tmp_path / "a", *DATA, CURRICULUM)
    small_run.stop(tmp_path / "b", *DATA, CURRICULUM, steps=stop)
    resumed = small_run.fit(tmp_path / "b", *DATA, CURRICULUM)
    small_run.assert_equal(whole, resumed)
    other = {"curriculum": {"metrics": (METRIC | {"pacing": {"num_steps": 7}},)}}
    with pytest.raises(DataError) as error:
        small_run.make_trainer(tmp_path / "b", *DATA, other)
    assert f"{FIELD}.pacing.num_steps=7 was 6 in the saved run" in str(error.value)


def test_given_batches_have_no_curriculum(tmp_path, index):
    with config_error(
        "curriculum.metrics=('voc.index',) do not order given batches; leave it at ()"
    ):
        small_run.make_trainer(tmp_path, *DATA, CURRICULUM, batches=[])


BUCKETS = (
    "data.source=standard_library",
    "model.vocab_size=257",
    "buckets=cut",
    "buckets.shortest=4",
    "buckets.order=mixture",
    "buckets.learning_rate=sqrt",
    "precision.on_nonfinite=stop",
    "optimizer.schedule=constant",
    "seed=3",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return small_run.told(tmp_path_factory.mktemp("run"), *BUCKETS)


def test_steps_are_those_of_the_batches_of_the_loader(run, tmp_path):
    """Bit for bit, with a learning rate that grows with the rows of each batch."""
    trainer, directory, _ = run
    again = small_run.make_trainer(tmp_path, *BUCKETS)
    found = small_run.records(directory)
    with make_loader(again.config, again.run.batch_placement) as batches:
        for step in range(8):
            batch = next(batches)
            rows, length = batch["tokens"].shape
            assert rows * length == 16 * 16
            assert found[step]["sequence_length"] == length
            rate = 1e-2 * min(step / 2, 1) * (rows / 16) ** 0.5
            np.testing.assert_allclose(found[step]["learning_rate"], rate, rtol=1e-5)
            again.state, _ = again.run.step(again.state, batch)
    assert {line["sequence_length"] for line in found} == {4, 8, 16}
    assert [line["consumed_tokens"] for line in found] == [
        256.0 * step for step in range(1, 9)
    ]
    small_run.assert_equal(trainer, again)
    again.close()


def test_lengths_are_compiled_ahead_once_each(run):
    assert "compiled the first step" in run[2]
    assert "compiles again" not in run[2]


def test_buckets_continue_as_they_were(run, tmp_path):
    assert "buckets: " in run[0].describe() and "left out" in run[0].describe()
    small_run.stop(tmp_path, *BUCKETS)
    small_run.assert_equal(run[0], small_run.fit(tmp_path, *BUCKETS))
    with pytest.raises(DataError) as error:
        small_run.make_trainer(
            tmp_path, *BUCKETS, "buckets.order.weights=(1.0, 1.0, 2.0)"
        )
    assert "buckets.order.weights=[1.0, 1.0, 2.0] was [] in the saved run" in str(
        error.value
    )


def test_given_batches_have_no_buckets(tmp_path):
    with pytest.raises(ConfigError) as error:
        small_run.make_trainer(tmp_path, *BUCKETS, batches=[])
    assert "buckets='cut' does not cut given batches; leave it out" in str(error.value)


LTD = (
    *BUCKETS,
    "buckets.shortest=8",
    "model.num_layers=3",
    "random_ltd=layerwise",
    "random_ltd.pacing.start=8",
    "random_ltd.pacing.multiple=8",
    "random_ltd.pacing.num_steps=5",
)


@pytest.fixture(scope="module")
def ltd_run(tmp_path_factory):
    return small_run.told(tmp_path_factory.mktemp("ltd"), *LTD, num_devices=1)


def test_rows_longer_than_the_kept_tokens_are_cut(ltd_run):
    """Each bucket by its length, in programs that are compiled ahead; fails if short
    rows are cut, or layers count the tokens of the longest ones."""
    found = small_run.records(ltd_run[1])
    lengths = [int(line["sequence_length"]) for line in found]
    kept = [*(min(8, length) for length in lengths[:5]), *lengths[5:]]
    assert [line["kept_tokens"] for line in found] == kept
    shares = [n / length for n, length in zip(kept, lengths, strict=True)]
    assert {(8, 1.0), (16, 0.5), (16, 1.0)} <= {*zip(lengths, shares, strict=True)}
    sums = np.cumsum([256 * (2 + share) for share in shares])
    assert [line["consumed_layer_tokens"] for line in found] == sums.tolist()
    assert "compiles again" not in ltd_run[2]


def test_rows_cut_by_length_continue_as_they_were(ltd_run, tmp_path):
    """Bit for bit, with the tokens that layers consumed before the stop."""
    small_run.stop(tmp_path, *LTD, num_devices=1)
    continued = small_run.fit(tmp_path, *LTD, num_devices=1)
    small_run.assert_equal(ltd_run[0], continued)
    ends = [small_run.records(directory)[-1] for directory in (ltd_run[1], tmp_path)]
    assert ends[0]["consumed_layer_tokens"] == ends[1]["consumed_layer_tokens"]


def test_learning_rates_follow_the_rows_of_a_batch():
    """Fails if a linear rate is a root: batches of four times the rows have 4 or 2."""
    for name, expected in (
        ("constant", [1, 1, 1]),
        ("sqrt", [2, 2**0.5, 1]),
        ("linear", [4, 2, 1]),
    ):
        buckets = schema.Pad(learning_rate=name)
        factors = rate_factors(buckets, longest=1024)
        np.testing.assert_allclose(factors, expected, rtol=1e-6)
