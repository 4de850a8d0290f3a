"""What may end a run before its last step, or ask for a checkpoint."""

import os
import signal
import threading

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.support import squares
from zjax.errors import ConfigError, OutputError, Problem
from zjax.observe.delivery import Delivery
from zjax.observe.sinks import JsonLines
from zjax.run.ending import Patience, ask_all
from zjax.settings.schema import EarlyStopping

EACH = ("num_steps=6", "evaluation.every_steps=1", "checkpoint.every_steps=0")
STOPPING = "evaluation.early_stopping"
PATIENCE = f"{STOPPING}.patience"


def fit(directory, *overrides, **given):
    trainer = squares.make_trainer(directory, *EACH, *overrides, **given)
    trainer.fit()
    trainer.close()
    return trainer


def test_a_run_ends_once_its_loss_no_longer_falls(tmp_path, capsys):
    """Fails if the run goes on, loses its best step, or counts anew if it continues."""
    trainer = fit(tmp_path, f"{PATIENCE}=2", "checkpoint.keep_last=1")
    assert (trainer.step, trainer.exit_status, trainer.store.steps()) == (3, 0, (1, 3))
    assert trainer.store.best() == 1
    assert (
        "stopped at step 3: eval_loss was 28.5 at step 1 and not below 28.5 in 2 "
        f"evaluations since\ncheckpoint: {tmp_path}/checkpoints/3\nraise "
        "evaluation.early_stopping.patience to go on\n"
    ) in capsys.readouterr().out
    assert fit(tmp_path, f"{PATIENCE}=2").step == 3
    assert fit(tmp_path, f"{PATIENCE}=3").step == 4
    assert fit(tmp_path).step == 6
    assert "done at step 6\n" in capsys.readouterr().out


def test_a_loss_that_falls_enough_ends_nothing(tmp_path):
    """Fails if evaluations count in total, or any decrease is enough."""
    falls = {"tx": optax.sgd(10.0), "batches": [{"x": np.ones(8, np.float32)}] * 6}
    assert fit(tmp_path / "a", f"{PATIENCE}=1", **falls).step == 6
    by_much = (
        f"{PATIENCE}=1",
        f"{STOPPING}.min_improvement=100",
    )
    assert fit(tmp_path / "b", *by_much, **falls).step == 2


def test_a_loss_that_is_never_finite_ends_the_run_too():
    patience = Patience(EarlyStopping(patience=2))
    for step in (1, 2):
        assert not patience.reason
        patience.count(step, float("nan"))
    assert patience.reason == "eval_loss was not finite in 2 evaluations"


def test_early_stopping_needs_evaluation_data(tmp_path):
    with pytest.raises(ConfigError) as error:
        fit(tmp_path, f"{PATIENCE}=2", evaluation_batches=None)
    assert str(error.value) == (
        "evaluation.early_stopping.patience=2 has no evaluation data; give "
        "evaluation_batches"
    )


def test_functions_see_each_step_and_may_save_and_stop(tmp_path, capsys):
    """Fails if they see another state, or what they ask is not done at that step."""
    seen = []

    def look(step, state, batch, metrics):
        numbers = int(state.step), float(metrics["loss"]), np.asarray(batch["x"])
        seen.append((step, *numbers))
        return "save" if step == 2 else None

    def stop_at_four(step, state, batch, metrics):
        return "stop" if step == 4 else None

    batches = [{"x": np.full(8, n, np.float32)} for n in range(6)]
    given = {"batches": batches, "after_step": [look, stop_at_four]}
    trainer = fit(tmp_path, "evaluation.every_steps=0", **given)
    assert [row[:3] for row in seen] == [(n, n, (n - 1) ** 2) for n in (1, 2, 3, 4)]
    assert [row[3].tolist() for row in seen] == [[n] * 8 for n in range(4)]
    assert (trainer.store.steps(), trainer.exit_status) == ((2, 4), 0)
    said = capsys.readouterr().out
    assert "stopped at step 4: stop_at_four asked for it\n" in said
    assert "run the same command again to resume" in said


class Unreachable:
    """A service that never answers."""

    name = settings = "service"

    def open(self):
        pass

    def send(self, step, values):
        threading.Event().wait()

    def close(self):
        pass

    def sync_command(self):
        return ""


def test_a_service_that_hangs_keeps_no_signal_from_saving(tmp_path, monkeypatch):
    """Fails if a step, the checkpoint or the end waits for the service."""
    monkeypatch.setattr("zjax.observe.delivery.CLOSE_SECONDS", 0.01)
    sink = Delivery([Unreachable()], tmp_path)
    monkeypatch.setattr("zjax.run.monitor.make_sinks", lambda *_, **__: (sink,))

    def stop_at_two(step, state, batch, metrics):
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    trainer = fit(tmp_path, "observe.log_every_steps=1", after_step=[stop_at_two])
    assert (trainer.store.steps(), trainer.exit_status) == ((2,), 143)
    assert len((tmp_path / "service_unsent.jsonl").read_text().splitlines()) > 1


def test_a_file_of_metrics_that_cannot_be_written_costs_no_step(tmp_path, monkeypatch):
    """Fails if the run ends without a checkpoint, goes on, or hides why it ended."""

    class FullDisk(JsonLines):
        def write(self, step, values):
            if step == 2:
                raise OutputError(Problem("directory", "runs/a", "is full", "free it"))

    sink = FullDisk(tmp_path / "metrics.jsonl")
    monkeypatch.setattr("zjax.run.monitor.make_sinks", lambda *_, **__: (sink,))
    trainer = squares.make_trainer(tmp_path, *EACH, "observe.log_every_steps=1")
    with pytest.raises(OutputError, match="directory='runs/a' is full"):
        trainer.fit()
    assert trainer.store.steps() == (trainer.step,)
    assert 2 <= trainer.step < 6


def test_an_unknown_answer_is_refused():
    def agree(step, state, batch, metrics):
        return True

    with pytest.raises(ConfigError) as error:
        ask_all([agree], 1, None, {}, {"loss": jnp.zeros(())})
    assert str(error.value) == (
        "after_step='agree' returned True; return 'save', 'stop' or None"
    )
