"""A run that is told to stop does so between two steps, and says so by its status."""

import gc
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest

from tests.support import small_run
from tests.support.cases import some_by_hand
from zjax.cli import main
from zjax.config import describe_config
from zjax.run.ending import stop_signals

ROOT = pathlib.Path(__file__).parents[2]
STATUS = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGHUP: 129}
PROGRAM = """
import os, signal, sys
from zjax.cli import main
from zjax.run import trainer

def stop_at_step_two(step, values):
    if step == 2:
        os.kill(os.getpid(), {number})

Trainer = trainer.Trainer
main.Trainer = lambda config: Trainer(config, callbacks=[stop_at_step_two])
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


@pytest.mark.parametrize(
    "number", some_by_hand((signal.SIGTERM, signal.SIGINT), {signal.SIGINT})
)
def test_a_stopped_program_saves_and_ends_with_the_conventional_status(
    tmp_path, number
):
    """Fails if schedulers take a stopped run for a finished or failed one."""
    config = small_run.make_config(tmp_path / "run", "num_steps=1000")
    settings = tmp_path / "small.gin"
    settings.write_text(describe_config(config))
    done = execute("-c", PROGRAM.format(number=int(number), config=settings))
    assert done.returncode == STATUS[number], done.stderr
    (saved,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert f"stopped at step {saved.name}" in done.stdout
    assert 2 <= int(saved.name) < 1000
    assert max(small_run.losses(tmp_path / "run")) == int(saved.name)


def test_a_finished_program_ends_with_0_though_it_was_told_to_stop(tmp_path):
    """Fails if a scheduler would start a run again that has taken its last step."""
    config = small_run.make_config(tmp_path / "run", "num_steps=2")
    settings = tmp_path / "small.gin"
    settings.write_text(describe_config(config))
    done = execute("-c", PROGRAM.format(number=15, config=settings))
    assert done.returncode == 0, done.stderr
    assert "stopping after this step" in done.stdout


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


def execute(*words):
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
