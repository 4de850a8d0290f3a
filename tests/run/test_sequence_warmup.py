"""Sequence length warm-up in a run: what it trains on, counts and resumes."""

import contextlib
import io
import json
import re
import shutil

import jax
import numpy as np
import pytest

from tests.support import models, small_run
from zjax.config import load_config
from zjax.data import make_loader
from zjax.errors import ConfigError, DataError
from zjax.run.compiler import CompileAhead

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


def records(directory):
    lines = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "loss" in line]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The directory of a run without a stop, its last arrays, and what it printed."""
    directory = tmp_path_factory.mktemp("whole")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        arrays = small_run.arrays(small_run.fit(directory, *WARMUP))
    return directory, arrays, out.getvalue()


def test_each_step_is_that_of_a_batch_cut_by_hand(tmp_path, whole):
    """Bit for bit; fails if nothing is cut, or the other end of the sequence."""
    by_hand = small_run.make_trainer(tmp_path, *WARMUP)
    uncut = load_config(by_hand.config, "sequence_warmup=none")
    run, state = by_hand.run, by_hand.state
    with make_loader(uncut, run.batch_placement, num_batches=8) as batches:
        for length, batch in zip(LENGTHS, batches, strict=True):
            cut = {name: np.asarray(x)[:, :length] for name, x in batch.items()}
            state, _ = run.step(state, cut)
    expected = jax.tree.map(np.asarray, state.master)
    jax.tree.map(np.testing.assert_array_equal, whole[1], expected)


def test_metrics_tell_the_length_and_count_the_tokens(whole):
    found = records(whole[0])
    assert [line["sequence_length"] for line in found] == LENGTHS
    consumed = 16 * np.cumsum(LENGTHS)
    assert [line["consumed_tokens"] for line in found] == consumed.tolist()
    assert [line["weight"] for line in found] == [16 * n for n in LENGTHS]


def test_the_learning_rate_decays_with_the_tokens(whole):
    """Fails if it decays with the steps: half of the tokens are not half of them."""
    tokens = np.cumsum([0, *LENGTHS])
    share = (tokens[1:8] - tokens[1]) / (tokens[7] - tokens[1])
    expected = [0.0, *(1e-2 * (1 - 0.9 * share))]
    found = [line["learning_rate"] for line in records(whole[0])]
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
    saved = small_run.make_trainer(tmp_path, *WARMUP)
    with saved.loader as batches:
        for _ in range(stop):
            saved.state, _ = saved.run.step(saved.state, next(batches))
        saved.save()
    saved.close()
    continued = small_run.arrays(small_run.fit(tmp_path, *WARMUP))
    jax.tree.map(np.testing.assert_array_equal, whole[1], continued)


def test_another_warm_up_does_not_continue_a_run(tmp_path, whole):
    shutil.copytree(whole[0], tmp_path / "run")
    with pytest.raises(DataError) as error:
        small_run.make_trainer(
            tmp_path / "run",
            *WARMUP,
            "sequence_warmup.pacing.num_steps=7",
            "num_steps=9",
        )
    assert str(error.value) == (
        "sequence_warmup.pacing.num_steps=7 was 6 in the saved run, so its samples are "
        "not these; restore that setting or that data, or start a new run"
    )


def test_given_batches_end_no_pacing_by_tokens(tmp_path):
    ended = "sequence_warmup=window", "sequence_warmup.pacing.num_tokens=900"
    sizes = "sequence_warmup.pacing.start=4", "sequence_warmup.pacing.multiple=4"
    with pytest.raises(ConfigError) as error:
        small_run.make_trainer(tmp_path, *ended, *sizes, batches=[])
    assert str(error.value) == (
        "sequence_warmup.pacing.num_tokens=900 does not count the tokens of given "
        "batches; leave it at 0"
    )


def test_tokens_are_counted_once_the_batch_is_known(tmp_path):
    """2,048 tokens in the run; fails if they are counted without a batch, or not."""
    sizes = "global_batch_size=0", "microbatch_size=2", "sequence_warmup=window"
    sizes += "sequence_warmup.pacing.start=4", "sequence_warmup.pacing.multiple=4"
    field = "sequence_warmup.pacing.num_tokens"
    small_run.make_trainer(tmp_path / "a", *sizes, f"{field}=2048").close()
    with pytest.raises(ConfigError) as error:
        small_run.make_trainer(tmp_path / "b", *sizes, f"{field}=2049")
    assert str(error.value) == (
        f"{field}=2049 is not reached in num_steps=8; use less, or raise num_steps"
    )


def test_longer_sequences_are_compiled_ahead(whole):
    """Each once; fails if a step compiles, or does not find what was compiled."""
    assert "compiled the first step" in whole[2]
    assert "compiles again" not in whole[2]


@pytest.mark.slow
def test_each_length_is_one_program(tmp_path, capsys, monkeypatch):
    """Fails if the test above looks for the wrong words."""
    monkeypatch.setattr(CompileAhead, "after", lambda *_: None)
    small_run.fit(tmp_path, *WARMUP)
    assert capsys.readouterr().out.count("compiles again") == 2


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
    teacher = f"distill.teacher={whole[0]}", "distill.fraction=0.5"
    small_run.fit(tmp_path, *WARMUP, *teacher)
    out = capsys.readouterr().out
    assert "compiled the first step" in out
    assert "compiles again" not in out


def test_given_batches_and_models_are_not_cut(tmp_path):
    with pytest.raises(ConfigError) as error:
        small_run.make_trainer(tmp_path, *WARMUP, batches=[])
    assert str(error.value) == (
        "sequence_warmup='truncate' does not cut given batches; use 'window' or None"
    )
    with pytest.raises(ConfigError) as error:
        small_run.make_trainer(tmp_path, *WARMUP, model=models.make_mlp(), batches=[])
    assert (
        "sequence_warmup='truncate' has no effect on the model that was given; "
        "leave it out, or give no model"
    ) in str(error.value)
