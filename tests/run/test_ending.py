"""What ends a run before its last step, and what a step that is not finite does."""

import dataclasses
import gc
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tests.run.test_trainer import broken_batches, own_trainer
from tests.support import small_run, squares
from tests.support.refusals import config_error, non_finite_error
from zjax.checkpoint.writer import check_finite
from zjax.cli import main
from zjax.config import describe_config
from zjax.errors import NonFiniteError, OutputError, Problem
from zjax.observe.delivery import Delivery
from zjax.observe.sinks import JsonLines
from zjax.run.ending import Patience, ask_all, stop_signals
from zjax.settings import schema
from zjax.settings.schema import EarlyStopping
from zjax.sharding import mesh as meshes
from zjax.sharding.placement import ArrayPlan

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
    by_much = f"{PATIENCE}=1", f"{STOPPING}.min_improvement=100"
    assert fit(tmp_path / "b", *by_much, **falls).step == 2


def test_a_loss_that_is_never_finite_ends_the_run_too():
    patience = Patience(EarlyStopping(patience=2))
    for step in (1, 2):
        assert not patience.reason
        patience.count(step, float("nan"))
    assert patience.reason == "eval_loss was not finite in 2 evaluations"


def test_early_stopping_needs_evaluation_data(tmp_path):
    with config_error(
        "evaluation.early_stopping.patience=2 has no evaluation data; give "
        "evaluation_batches"
    ):
        fit(tmp_path, f"{PATIENCE}=2", evaluation_batches=None)


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

    with config_error(
        "after_step='agree' returned True; return 'save', 'stop' or None"
    ):
        ask_all([agree], 1, None, {}, {"loss": jnp.zeros(())})


def test_a_single_batch_that_is_not_finite_is_named(tmp_path):
    """Fails if the batch of the step behind is looked at, whose numbers come late."""
    batches = [*broken_batches(99)][:6]
    batches[3]["x"] = np.full_like(batches[3]["x"], np.nan)
    overrides = "precision.on_nonfinite=stop", "checkpoint.every_steps=0"
    trainer = own_trainer(tmp_path, batches, *overrides)
    with pytest.raises(NonFiniteError) as error:
        trainer.fit()
    trainer.close()
    assert trainer.step == 5
    assert str(error.value).splitlines()[1:] == [
        "batch='x' of 3 arrays are not finite at step 4; check the data of that step, "
        "unless they are intended",
        "gradients='bias, down, up' of 3 arrays are not finite at step 4; look for "
        "overflow or division by 0 in the model and its loss",
    ]


def test_checkpoint_that_falls_on_a_skipped_step_is_saved_after_the_next(tmp_path):
    """Fails if a run is without checkpoints because the steps that save are skipped."""
    whole, broken = next(broken_batches(2)), next(broken_batches(1))
    batches = [broken if step in (2, 4, 5) else whole for step in range(1, 9)]
    trainer = own_trainer(tmp_path, batches, "num_steps=8", "checkpoint.keep_last=9")
    trainer.fit()
    trainer.close()
    assert trainer.store.steps() == (3, 6, 8)


def test_a_state_that_is_not_finite_replaces_no_checkpoint(tmp_path):
    """Fails if weights are saved whose loss is not known yet, or momentum is lost."""
    trainer = own_trainer(tmp_path, [], "checkpoint.keep_last=1", tx=optax.adam(0.1))
    state = trainer.state
    trainer.save()
    after = dataclasses.replace(state, step=state.step + 1)
    weights = {**state.master, "up": state.master["up"].at[0, 0].set(jnp.inf)}
    (adam, *others), nan = state.opt_state, jnp.nan
    moments = {
        **adam.mu,
        "bias": adam.mu["bias"].at[0].set(nan),
        "up": nan * adam.mu["up"],
    }
    opt_state = (adam._replace(mu=moments), *others)
    for changes, names in (
        ({"master": weights}, "master/up"),
        ({"opt_state": opt_state}, "opt_state/0/mu/bias, opt_state/0/mu/up"),
    ):
        trainer.state = dataclasses.replace(after, **changes)
        with non_finite_error(
            f"state='{names}' is not finite after step 1, and is not saved; go back to "
            "the newest checkpoint, and lower optimizer.peak_learning_rate or look at "
            "the data"
        ):
            trainer.save()
    trainer.close()
    assert trainer.store.steps() == (0,)


def test_infinity_may_be_kept_beside_weights():
    """The best loss so far starts at infinity in optax and in many models."""
    mesh = meshes.make_mesh(schema.Mesh(data=8))
    place = NamedSharding(mesh, PartitionSpec())

    def check(x, memory="device", **changes):
        row = ArrayPlan("w", x.shape, x.dtype, place, place, **changes)
        row = row.stored_in(memory)
        check_finite({name: jax.device_put(x, row.stored)}, {name: row}, 1)

    name = "opt_state/best_value"
    check(jnp.full(3, jnp.inf))
    name = "master/w"
    check(jnp.full(3, jnp.nan), is_frozen=True)
    with pytest.raises(NonFiniteError):
        check(jnp.full(3, jnp.inf))
    with pytest.raises(NonFiniteError):
        check(jnp.full(3, jnp.nan), "pinned_host")
    check(jnp.zeros(3), "pinned_host")


ROOT = pathlib.Path(__file__).parents[2]
STATUS = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGHUP: 129}
PROGRAM = """
import os, signal, sys
from zjax.cli import commands, main
from zjax.run.trainer import Trainer

def stop_at_step_two(step, values):
    if step == 2:
        os.kill(os.getpid(), signal.SIGTERM)

def make(config):
    return Trainer(config, callbacks=[stop_at_step_two])

commands.trainer_of = lambda preference: make
sys.argv[1:] = ["train", "--gin_file={config}", "--simulated_devices=2"]
main.run()
"""


@pytest.fixture
def heard():
    """`nohup`, or a shell without job control, has programs ignore signals."""
    defaults = {
        signal.SIGHUP: signal.SIG_DFL,
        signal.SIGINT: signal.default_int_handler,
    }
    before = {number: signal.signal(number, x) for number, x in defaults.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize(
    ("number", "status"), STATUS.items(), ids=[number.name for number in STATUS]
)
def test_a_signal_stops_with_the_conventional_status(number, status, capfd):
    before = signal.getsignal(number)
    with stop_signals() as stopped:
        assert not stopped(0)
        os.kill(os.getpid(), number)
        assert stopped(1)
    assert stopped.exit_status == status
    assert signal.getsignal(number) is before
    assert "stopping after this step; saving a checkpoint" in capfd.readouterr().out


@pytest.mark.usefixtures("heard")
def test_a_terminal_that_is_gone_takes_no_line_and_ends_no_run():
    """Fails if a line to a closed terminal raises where a checkpoint is to be saved."""
    terminal, output = os.openpty()
    kept = os.dup(1)
    try:
        os.dup2(output, 1)
        os.close(output)
        os.close(terminal)  # what is written from now on fails with EIO
        with stop_signals() as stopped:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stopped(1)
            os.write(1, b"stopped at step 1")
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def test_nohup_holds():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_signals() as stopped:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stopped(1)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_second_interrupt_ends_at_once():
    """Fails if a run that SIGTERM stops is not saved because of one Ctrl-C."""
    with stop_signals() as stopped:
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
            assert stopped(1)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_run_may_be_asked_to_stop_without_a_signal():
    with stop_signals() as stopped:
        stopped.request()
        assert stopped(1)


def test_a_stopped_program_saves_and_ends_with_the_conventional_status(tmp_path):
    """Fails if schedulers take a stopped run for a finished or failed one."""
    config = small_run.make_config(tmp_path / "run", "num_steps=1000")
    settings = tmp_path / "small.gin"
    settings.write_text(describe_config(config))
    program = PROGRAM.format(config=settings)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == STATUS[signal.SIGTERM], done.stderr
    (saved,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert f"stopped at step {saved.name}" in done.stdout
    assert 2 <= int(saved.name) < 1000
    assert max(small_run.losses(tmp_path / "run")) == int(saved.name)


def test_a_finished_run_ends_with_0_though_it_was_told_to_stop(tmp_path, capfd):
    """Fails if a scheduler would start a run again that has taken its last step."""

    def stop_at_the_last(step, state, batch, metrics):
        if step == 6:
            os.kill(os.getpid(), signal.SIGTERM)

    trainer = fit(tmp_path, "evaluation.every_steps=0", after_step=[stop_at_the_last])
    assert (trainer.step, trainer.exit_status) == (6, 0)
    assert "stopping after this step" in capfd.readouterr().out


@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGINT"])
def test_a_signal_outside_of_a_run_ends_with_its_status(name, monkeypatch, capsys):
    """Fails if a command is killed with its files open, or outlives its signal."""
    number = signal.Signals[name]
    before = {each: signal.getsignal(each) for each in STATUS}

    def collect(phase, info):
        if phase == "stop" and signalled.acquire(blocking=False):
            os.kill(os.getpid(), number)  # Python ignores what is raised here

    def work(words):
        gc.collect()
        time.sleep(60)

    signalled = threading.Semaphore()
    monkeypatch.setattr(main, "_run", work)
    gc.callbacks.append(collect)
    try:
        with pytest.raises(SystemExit) as ended:
            main.run()
    finally:
        gc.callbacks.remove(collect)
        for each, handler in before.items():
            signal.signal(each, handler)
    assert ended.value.code == STATUS[number]
    told = "zjax: ended by Ctrl-C\n" if name == "SIGINT" else ""
    assert capsys.readouterr().err == told
