"""What a parent makes of the ends of its children."""

import collections
import signal
import subprocess
import sys

import pytest

from zjax import processes
from zjax.processes.supervise import _Child, _Signals

PROGRAM = "import os, sys; sys.exit(({0}, {1})[int(os.environ['ZJAX_PROCESS_ID'])])"


@pytest.mark.parametrize(
    ("ends", "code", "is_told"),
    [
        pytest.param((0, 0), 0, False, id="done"),
        pytest.param((143, 143), 143, False, id="stopped"),
        pytest.param((143, 130), 143, False, id="stopped-by-two-signals"),
        pytest.param((129, 129), 129, False, id="stopped-by-a-hangup"),
        pytest.param((143, 3), 3, True, id="failed-as-it-stopped"),
    ],
)
def test_a_run_that_was_stopped_did_not_die(capfd, ends, code, is_told):
    """Fails if a stop that another host was told of counts as a death here."""
    command = [sys.executable, "-c", PROGRAM.format(*ends)]
    assert processes.supervise(command, 2) == code
    assert ("process=1 ended (exit code 3)" in capfd.readouterr().err) == is_told


INTERRUPT = """
import os, signal, time
def interrupt(*_):
    os.kill(os.getppid(), signal.SIGINT)
signal.signal(signal.SIGINT, interrupt)
interrupt()
while True:
    time.sleep(1)
"""


def test_the_second_ctrl_c_ends_all_at_once_in_one_line(capfd):
    """Fails if children that do not stop, or wait for each other, are waited for."""
    command = [sys.executable, "-c", INTERRUPT]
    assert processes.supervise(command, 1) == 130
    assert capfd.readouterr().err == (
        "killed by the second Ctrl-C, without a checkpoint of this step; run the same "
        "command again to resume from the last one\n"
    )


def test_signals_reach_a_child_that_is_being_started_once():
    """Fails if a Ctrl-C between the start of a child and the note of it is lost."""
    sent = []
    children = []
    signals = _Signals(children)

    class Process(subprocess.Popen):
        def __init__(self, name):
            self.name = name

        def __del__(self):
            """Ends nothing: no process was started."""

        def send_signal(self, number):
            sent.append((self.name, number))

    def child(name):
        return _Child(0, Process(name), collections.deque(), [])

    signals.add(child("first"))
    signals.forward(signal.SIGINT, None)  # while the second child is started
    signals.add(child("second"))
    signals.forward(signal.SIGINT, None)
    assert sent == [
        ("first", signal.SIGINT),
        ("second", signal.SIGINT),
        ("first", signal.SIGKILL),
        ("second", signal.SIGKILL),
    ]


MEMBER = """
import json, os, pathlib, signal, sys
record = {"process_id": 1, "host": "b", "pid": os.getpid(), "directory": sys.argv[1]}
path = pathlib.Path(os.environ["ZJAX_MEMBERS_DIRECTORY"], "1.member.json")
path.write_text(json.dumps(record))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_child_that_was_killed_is_named_by_its_own_number(capfd, tmp_path):
    """Fails if process 0 is blamed where only the config says who a process is."""
    command = [sys.executable, "-c", MEMBER, str(tmp_path)]
    assert processes.supervise(command) == 137
    assert capfd.readouterr().err.startswith("process=1 on host b (pid ")
