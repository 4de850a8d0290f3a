"""Programs of a contest, one after another, and what a stop leaves behind."""

import os
import signal
import subprocess
import sys

import pytest
from contests.turns import find_machine

from tests.support import programs
from tests.support.benchmarks import FOLDER, ROOT
from tests.support.toy_contests import contestant, speed_row, write_contest
from zjax.errors import BenchError


def test_devices_are_counted_without_being_held():
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "3"}
    machine = find_machine(environment)
    assert (machine.num_devices, machine.device) == (3, "cpu")
    assert machine.identity == find_machine(environment).identity
    with pytest.raises(BenchError, match=r"jax.devices.* fails: "):
        find_machine(environment | {"JAX_PLATFORMS": "nonsense"})


def test_stopping_a_contest_stops_its_program_and_what_that_started(tmp_path):
    """Fails if an orphan would go on holding the devices."""
    code = (
        "import os, pathlib, subprocess, sys, time;"
        "child = subprocess.Popen(['sleep', '99']);"
        "pathlib.Path('pids').write_text(f'{os.getpid()} {child.pid}');"
        "time.sleep(99)"
    )
    rows = [speed_row("speed", ("ours",), ("ours",))]
    write_contest(tmp_path / "toy.py", [contestant("ours", code=code)], rows)
    words = (str(FOLDER / "contest.py"), "toy.py", "--simulated_devices=2")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    how = {"cwd": tmp_path, "env": environment, "stdout": subprocess.PIPE}
    pids = tmp_path / "pids"
    with programs.started([sys.executable, *words], **how) as program:
        programs.wait_until(
            lambda: pids.exists() and len(pids.read_text().split()) == 2, program
        )
        program.send_signal(signal.SIGTERM)
        programs.finish(program)
    assert program.returncode == 128 + signal.SIGTERM
    for pid in map(int, pids.read_text().split()):
        assert not programs.is_alive(pid)
