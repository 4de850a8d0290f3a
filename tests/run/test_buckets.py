"""Length buckets in a run: what it trains on, compiles, tells and resumes."""

import contextlib
import io
import json

import jax
import numpy as np
import pytest

from tests.support import small_run
from zjax.data import make_loader
from zjax.errors import ConfigError, DataError
from zjax.schedule.buckets import rate_factors
from zjax.settings import schema

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


def records(directory):
    lines = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "loss" in line]


def told_run(directory, *settings, **given):
    """A run, its directory, and what it printed."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        trainer = small_run.fit(directory, *settings, **given)
    return trainer, directory, out.getvalue()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return told_run(tmp_path_factory.mktemp("run"), *BUCKETS)


def test_steps_are_those_of_the_batches_of_the_loader(run, tmp_path):
    """Bit for bit, with a learning rate that grows with the rows of each batch."""
    trainer, directory, _ = run
    again = small_run.make_trainer(tmp_path, *BUCKETS)
    found = records(directory)
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
    arrays = small_run.arrays(trainer), small_run.arrays(again)
    jax.tree.map(np.testing.assert_array_equal, *arrays)
    again.close()


def test_lengths_are_compiled_ahead_once_each(run):
    assert "compiled the first step" in run[2]
    assert "compiles again" not in run[2]


def test_a_run_that_continues_is_the_run_without_a_stop(run, tmp_path):
    saved = small_run.make_trainer(tmp_path, *BUCKETS)
    assert "buckets: " in saved.describe() and "left out" in saved.describe()
    with saved.loader as batches:
        for _ in range(3):
            saved.state, _ = saved.run.step(saved.state, next(batches))
        saved.save()
    saved.close()
    continued = small_run.fit(tmp_path, *BUCKETS)
    arrays = small_run.arrays(run[0]), small_run.arrays(continued)
    jax.tree.map(np.testing.assert_array_equal, *arrays)
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
    assert "buckets='cut' does not cut given batches; leave it at None" in str(
        error.value
    )


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
    return told_run(tmp_path_factory.mktemp("ltd"), *LTD, num_devices=1)


def test_rows_longer_than_the_kept_tokens_are_cut(ltd_run):
    """Each bucket by its length, in programs that are compiled ahead; fails if short
    rows are cut, or layers count the tokens of the longest ones."""
    found = records(ltd_run[1])
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
    saved = small_run.make_trainer(tmp_path, *LTD, num_devices=1)
    with saved.loader as batches:
        for _ in range(3):
            saved.state, _ = saved.run.step(saved.state, next(batches))
        saved.save()
    saved.close()
    continued = small_run.fit(tmp_path, *LTD, num_devices=1)
    arrays = small_run.arrays(ltd_run[0]), small_run.arrays(continued)
    jax.tree.map(np.testing.assert_array_equal, *arrays)
    ends = [records(directory)[-1] for directory in (ltd_run[1], tmp_path)]
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
