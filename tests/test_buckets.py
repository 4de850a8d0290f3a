"""Length buckets in a run: what it trains on, compiles, tells and resumes."""

import json

import jax
import numpy as np
import pytest

from tests.support import small_run
from zjax.data import make_loader
from zjax.errors import ConfigError, DataError

BUCKETS = (
    "data.source=standard_library",
    "model.vocab_size=257",
    "buckets.form=cut",
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


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    return small_run.fit(directory, *BUCKETS), directory


def test_steps_are_those_of_the_batches_of_the_loader(run, tmp_path):
    """Bit for bit, with a learning rate that grows with the rows of each batch."""
    trainer, directory = run
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


def test_lengths_are_compiled_ahead_once_each(capsys, tmp_path):
    small_run.fit(tmp_path, *BUCKETS)
    assert "compiles again" not in capsys.readouterr().out


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
        small_run.make_trainer(tmp_path, *BUCKETS, "buckets.weights=(1.0, 1.0, 2.0)")
    assert "buckets.weights=[1.0, 1.0, 2.0] was [] in the saved run" in str(error.value)


def test_given_batches_have_no_buckets(tmp_path):
    with pytest.raises(ConfigError) as error:
        small_run.make_trainer(tmp_path, *BUCKETS, batches=[])
    assert "buckets.form='cut' does not cut given batches; leave it at 'none'" in str(
        error.value
    )
