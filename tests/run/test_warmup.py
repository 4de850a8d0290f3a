"""Lengths and attention windows that grow in a run: what it trains on and resumes."""

import re
import shutil

import jax
import numpy as np
import pytest

from tests.support import models, small_run
from tests.support.refusals import config_error, data_error
from zjax.config import load_config
from zjax.data import make_loader
from zjax.errors import ConfigError

WARMUP = (
    "sequence_warmup=truncate",
    "sequence_warmup.pacing.start=8",
    "sequence_warmup.pacing.multiple=4",
    "sequence_warmup.pacing.num_steps=6",
    "optimizer.schedule=linear",
    "optimizer.schedule.num_warmup_steps=1",
)
LENGTHS = [8, 8, 12, 12, 12, 16, 16, 16]
"""8 + 8 t / 6 in step t, rounded down to multiples of 4."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run without a stop, its directory, and what it printed."""
    return small_run.told(tmp_path_factory.mktemp("whole"), *WARMUP)


def test_each_step_is_that_of_a_batch_cut_by_hand(tmp_path, whole):
    """Bit for bit; fails if nothing is cut, or the other end of the sequence."""
    by_hand = small_run.make_trainer(tmp_path, *WARMUP)
    uncut = load_config(by_hand.config, "sequence_warmup=none")
    run, state = by_hand.run, by_hand.state
    with make_loader(uncut, run.batch_placement, num_batches=8) as batches:
        for length, batch in zip(LENGTHS, batches, strict=True):
            cut = {name: np.asarray(x)[:, :length] for name, x in batch.items()}
            state, _ = run.step(state, cut)
    arrays = small_run.arrays(whole[0]), jax.tree.map(np.asarray, state.master)
    jax.tree.map(np.testing.assert_array_equal, *arrays)


def test_metrics_tell_the_length_and_count_the_tokens(whole):
    found = small_run.records(whole[1])
    assert [line["sequence_length"] for line in found] == LENGTHS
    consumed = 16 * np.cumsum(LENGTHS)
    assert [line["consumed_tokens"] for line in found] == consumed.tolist()
    assert [line["weight"] for line in found] == [16 * n for n in LENGTHS]


def test_the_learning_rate_decays_with_the_tokens(whole):
    """Fails if it decays with the steps: half of the tokens are not half of them."""
    tokens = np.cumsum([0, *LENGTHS])
    share = (tokens[1:8] - tokens[1]) / (tokens[7] - tokens[1])
    expected = [0.0, *(1e-2 * (1 - 0.9 * share))]
    found = [line["learning_rate"] for line in small_run.records(whole[1])]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize(
    "stop",
    [
        pytest.param(1, marks=pytest.mark.slow),
        3,
        pytest.param(5, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_continues_is_the_run_without_a_stop(tmp_path, whole, stop):
    """Bit for bit, inside the warm-up and where the length changes."""
    small_run.stop(tmp_path, *WARMUP, steps=stop)
    small_run.assert_equal(whole[0], small_run.fit(tmp_path, *WARMUP))


def test_another_warm_up_does_not_continue_a_run(tmp_path, whole):
    shutil.copytree(whole[1], tmp_path / "run")
    with data_error(
        "sequence_warmup.pacing.num_steps=7 was 6 in the saved run, so its samples are "
        "not these; restore that setting or that data, or start a new run"
    ):
        small_run.make_trainer(
            tmp_path / "run",
            *WARMUP,
            "sequence_warmup.pacing.num_steps=7",
            "num_steps=9",
        )


def test_given_batches_end_no_pacing_by_tokens(tmp_path):
    ended = "sequence_warmup=window", "sequence_warmup.pacing.num_tokens=900"
    sizes = "sequence_warmup.pacing.start=4", "sequence_warmup.pacing.multiple=4"
    with config_error(
        "sequence_warmup.pacing.num_tokens=900 does not count the tokens of given "
        "batches; leave it at 0"
    ):
        small_run.make_trainer(tmp_path, *ended, *sizes, batches=[])


def test_tokens_are_counted_once_the_batch_is_known(tmp_path):
    """2,048 tokens in the run; fails if they are counted without a batch, or not."""
    sizes = "global_batch_size=0", "microbatch_size=2", "sequence_warmup=window"
    sizes += "sequence_warmup.pacing.start=4", "sequence_warmup.pacing.multiple=4"
    field = "sequence_warmup.pacing.num_tokens"
    small_run.make_trainer(tmp_path / "a", *sizes, f"{field}=2048").close()
    with config_error(
        f"{field}=2049 is not reached in num_steps=8; use less, or raise num_steps"
    ):
        small_run.make_trainer(tmp_path / "b", *sizes, f"{field}=2049")


def test_longer_sequences_are_compiled_ahead(whole):
    """Each once; fails if a step compiles, or does not find what was compiled."""
    assert "compiled the first step" in whole[2]
    assert "compiles again" not in whole[2]


ZERO_ONE = (
    "mesh.replica=2",
    "zero.stage=1",
    "optimizer.rule=zero_one_adam",
    "optimizer.rule.freeze_step=6",
    "optimizer.rule.var_update_scaler=1",
)
"""Steps 2 and 3, and 4 and 5, have one length and run two programs."""


@pytest.mark.slow
def test_all_programs_of_a_length_are_compiled_ahead(tmp_path, capsys):
    """Fails if that of the first step is the only one."""
    small_run.fit(tmp_path, *WARMUP, *ZERO_ONE)
    compiled = re.findall(
        r"compile.* step (\d)|step (\d) comp", capsys.readouterr().out
    )
    exchange = {"6", "7"}  # programs that read no batch
    assert {"".join(each) for each in compiled} == exchange


def test_steps_with_and_without_a_teacher_are_compiled_ahead(tmp_path, capsys, whole):
    """Fails if its own program is not, or the stage ends with a compilation."""
    teacher = f"distill.teacher={whole[1]}", "distill.fraction=0.5"
    small_run.fit(tmp_path, *WARMUP, *teacher)
    out = capsys.readouterr().out
    assert "compiled the first step" in out
    assert "compiles again" not in out


def test_given_batches_and_models_are_not_cut(tmp_path):
    with config_error(
        "sequence_warmup='truncate' does not cut given batches; use 'window' or None"
    ):
        small_run.make_trainer(tmp_path, *WARMUP, batches=[])
    with pytest.raises(ConfigError) as error:
        small_run.make_trainer(tmp_path, *WARMUP, model=models.make_mlp(), batches=[])
    assert (
        "sequence_warmup='truncate' has no effect on the model that was given; "
        "leave it out, or give no model"
    ) in str(error.value)


WINDOW = (
    "sequence_warmup=window",
    "sequence_warmup.pacing.start=4",
    "sequence_warmup.pacing.multiple=4",
    "sequence_warmup.pacing.num_steps=6",
)
WINDOWS = [4, 8, 8, 12, 12, 16, 16, 16]
"""4 + 12 t / 6 in step t, rounded down to multiples of 4."""


@pytest.fixture(scope="module")
def windowed(tmp_path_factory):
    """A run without a stop, its directory, and what it printed."""
    return small_run.told(tmp_path_factory.mktemp("whole"), *WINDOW)


def test_each_step_has_the_window_of_its_number_until_the_plain_model(
    tmp_path, windowed
):
    """Bit for bit; fails for the window of another step, or a mask after the end."""
    by_hand = small_run.make_trainer(tmp_path)
    run, state = by_hand.run, by_hand.state
    with by_hand.loader as batches:
        for window, batch in zip(WINDOWS, batches, strict=False):
            given = {"schedule": {"attention_window": np.float32(window)}}
            state, _ = run.step(state, batch | (given if window < 16 else {}))
    arrays = small_run.arrays(windowed[0]), jax.tree.map(np.asarray, state.master)
    jax.tree.map(np.testing.assert_array_equal, *arrays)


def test_one_program_runs_all_windows_and_the_metrics_tell_them(windowed):
    trainer, directory, out = windowed
    assert "compiled the first step" in out
    assert "compiles again" not in out
    assert trainer.run.step.programs["train"]._cache_size() == 1
    found = small_run.records(directory)
    assert [line["attention_window"] for line in found] == WINDOWS
    assert [line["consumed_tokens"] for line in found] == [*range(256, 2049, 256)]
    assert not any("sequence_length" in line for line in found)


def test_windows_continue_as_they_were(tmp_path, windowed):
    """Inside the warm-up; fails if the windows start again."""
    small_run.stop(tmp_path, *WINDOW)
    small_run.assert_equal(windowed[0], small_run.fit(tmp_path, *WINDOW))


@pytest.mark.parametrize(
    "overrides",
    [
        (
            "model.attention=sparse",
            "model.attention.pattern=dense",
            "model.attention.block=16",
        ),
        ("mesh.sequence=2",),
        ("mesh.tensor=2", "zero.stage=3"),
        ("model.remat=full", "model.layers_per_scan=1"),
        ("mesh.pipeline=2", "num_microbatches=2", "model.num_layers=2"),
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
    last = small_run.records(tmp_path)[-1]
    assert (trainer.step, last["step"], last["consumed_tokens"]) == (5, 5, 1280)
    np.testing.assert_allclose(last["learning_rate"], 1e-3)
