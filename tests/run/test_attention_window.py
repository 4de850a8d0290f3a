"""A growing attention window in a run: what a token sees, and one program."""

import contextlib
import io
import json

import jax
import numpy as np
import pytest

from tests.support import small_run
from zjax.config import load_config
from zjax.data import make_loader

WINDOW = (
    "sequence_warmup=window",
    "sequence_warmup.pacing.start=4",
    "sequence_warmup.pacing.multiple=4",
    "sequence_warmup.pacing.num_steps=6",
)
WINDOWS = [4, 8, 8, 12, 12, 16, 16, 16]
"""4 + 12 t / 6 in step t, rounded down to multiples of 4."""


def assert_equal(some, others):
    jax.tree.map(np.testing.assert_array_equal, some, others)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run without a stop, its directory, and what it printed."""
    directory = tmp_path_factory.mktemp("whole")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        trainer = small_run.fit(directory, *WINDOW)
    return trainer, directory, out.getvalue()


def test_each_step_has_the_window_of_its_number_until_the_plain_model(tmp_path, whole):
    """Bit for bit; fails for the window of another step, or a mask after the end."""
    by_hand = small_run.make_trainer(tmp_path)
    run, state = by_hand.run, by_hand.state
    with by_hand.loader as batches:
        for window, batch in zip(WINDOWS, batches, strict=False):
            given = {"schedule": {"attention_window": np.float32(window)}}
            state, _ = run.step(state, batch | (given if window < 16 else {}))
    assert_equal(small_run.arrays(whole[0]), jax.tree.map(np.asarray, state.master))


def test_one_program_runs_all_windows_and_the_metrics_tell_them(whole):
    trainer, directory, out = whole
    assert "compiled the first step" in out
    assert "compiles again" not in out
    assert trainer.run.step.programs["train"]._cache_size() == 1
    lines = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    found = [line for line in lines if "loss" in line]
    assert [line["attention_window"] for line in found] == WINDOWS
    assert [line["consumed_tokens"] for line in found] == [*range(256, 2049, 256)]
    assert not any("sequence_length" in line for line in found)


def test_a_run_that_continues_is_the_run_without_a_stop(tmp_path, whole):
    """Inside the warm-up; fails if the windows start again."""
    saved = small_run.make_trainer(tmp_path, *WINDOW)
    with saved.loader as batches:
        for _ in range(3):
            saved.state, _ = saved.run.step(saved.state, next(batches))
        saved.save()
    saved.close()
    continued = small_run.fit(tmp_path, *WINDOW)
    assert_equal(small_run.arrays(whole[0]), small_run.arrays(continued))


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(
            (
                "model.attention=sparse",
                "model.attention.pattern=dense",
                "model.attention.block=16",
            ),
            id="kernels",
        ),
        pytest.param(("mesh.sequence=2",), id="ulysses"),
        pytest.param(("mesh.tensor=2", "zero.stage=3"), id="tensor"),
        pytest.param(("model.remat=full", "model.layers_per_scan=1"), id="remat"),
        pytest.param(
            ("mesh.pipeline=2", "num_microbatches=2", "model.num_layers=2"),
            id="pipeline",
        ),
    ],
)
@pytest.mark.slow
def test_windows_are_those_of_one_device(tmp_path, overrides):
    """Fails where the window does not reach each block, microbatch and device."""
    fixed = "model.dropout_rate=0"
    small_run.fit(tmp_path / "a", *WINDOW, fixed, *overrides)
    layers = [x for x in overrides if x.startswith(("model.num_layers", "num_micro"))]
    small_run.fit(tmp_path / "b", *WINDOW, fixed, *layers, num_devices=1)
    found, expected = (small_run.losses(tmp_path / name) for name in "ab")
    np.testing.assert_allclose(
        [*found.values()], [*expected.values()], rtol=1e-5, atol=1e-5
    )


def test_evaluation_sees_everything(tmp_path):
    trainer = small_run.make_trainer(tmp_path, *WINDOW)
    plain = load_config(trainer.config, "sequence_warmup=none")
    with make_loader(plain, trainer.run.batch_placement) as batches:
        batch = next(batches)
    narrow = {"schedule": {"attention_window": np.float32(4)}}
    full, limited = (
        float(trainer.run.evaluate(trainer.state, x)["loss"])
        for x in (batch, batch | narrow)
    )
    other = small_run.make_trainer(tmp_path / "other")
    assert full == float(other.run.evaluate(other.state, batch)["loss"]) != limited


def test_a_run_ends_after_its_tokens_with_the_last_learning_rate(tmp_path):
    """Fails if the rate decays towards `num_steps`, or the end is that of the steps."""
    end = "num_tokens=1100", "optimizer.schedule=linear"
    trainer = small_run.fit(tmp_path, *end, "num_steps=8")
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    last = [line for line in lines if "loss" in line][-1]
    assert (trainer.step, last["step"], last["consumed_tokens"]) == (5, 5, 1280)
    np.testing.assert_allclose(last["learning_rate"], 1e-3)
