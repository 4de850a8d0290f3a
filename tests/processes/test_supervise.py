"""What a parent makes of the ends of its children, and where they write them down."""

import collections
import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time

import jax
import pytest

from zjax import processes
from zjax.errors import CheckpointError, DataError, Problem, ProcessError
from zjax.processes import barrier as gloo
from zjax.processes import member_files
from zjax.processes.barrier import PeerError, find_unresponsive
from zjax.processes.member_files import End, Member
from zjax.processes.supervise import _Child, _Signals
from zjax.settings import schema
from zjax.sharding.mesh import make_mesh

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


PROBLEM = Problem("checkpoint.step", 4, "could not be written", "look")


def lost_peer():
    error = CheckpointError(PROBLEM)
    error.__cause__ = jax.errors.JaxRuntimeError("UNAVAILABLE: Task 1 heartbeat")
    return error


def failed_peer():
    error = CheckpointError(PROBLEM)
    error.__cause__ = PeerError(1, "OSError: No space left on device", 28)
    return error


@pytest.mark.parametrize(
    ("error", "rank"),
    [
        pytest.param(DataError(PROBLEM), 1, id="its-own-fault"),
        pytest.param(jax.errors.JaxRuntimeError("UNAVAILABLE"), 2, id="lost-peer"),
        pytest.param(lost_peer(), 2, id="lost-peer-in-a-save"),
        pytest.param(failed_peer(), 2, id="save-of-a-peer"),
    ],
)
def test_a_survivor_is_not_the_cause(tmp_path, monkeypatch, error, rank):
    """Fails if the one that noticed is blamed, and not the one that was killed."""
    monkeypatch.setenv(member_files.MEMBERS_VARIABLE, str(tmp_path))
    member = Member(3, "a", os.getpid(), str(tmp_path / "run"))
    member_files.write_member(member, tmp_path)
    before = time.time()
    processes.record_failure(error)
    (end,) = member_files.read_ends(tmp_path, before)
    assert (end.process_id, end.rank) == (3, rank)


def test_a_process_that_was_turned_away_says_nothing_in_the_run_of_others(tmp_path):
    """Fails if the loser of two runs in one directory ends the winner's obituary."""
    shared, watched = member_files.shared_directory(str(tmp_path)), tmp_path / "watched"
    winner = Member(0, "a", 1, str(tmp_path))
    loser = Member(0, "a", 2, str(tmp_path))
    member_files.write_member(winner, shared)
    for member, told in ((loser, []), (winner, [0])):
        member_files.write_end(End(0, 1, "why"), member, watched)
        assert [end.process_id for end in member_files.read_ends(shared, 0.0)] == told
        assert [end.process_id for end in member_files.read_ends(watched, 0.0)] == [0]


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[1]",
        "7",
        '{"process_id": 0, "x": 1}',
        '{"process_id": "0", "host": "a", "pid": 1, "directory": "d"}',
        '{"process_id": 0, "rank": 0, "reason": "why", "at_seconds": "noon"}',
    ],
)
def test_records_of_others_are_left_out_by_name(tmp_path, caplog, text):
    member_files.write_member(Member(0, "a", 1, str(tmp_path)), tmp_path)
    (tmp_path / "1.member.json").write_text(text)
    (tmp_path / "1.end.json").write_text(text)
    assert list(member_files.read_members(tmp_path)) == [0]
    assert member_files.read_ends(tmp_path, 0.0) == []
    for name in ("1.member.json", "1.end.json"):
        assert f"{tmp_path / name} is not a record of this version" in caplog.text


FATAL = (
    "F1128 17:04:58.480939   19407 client.h:80] Terminating process because the JAX "
    "distributed service detected fatal errors. This most likely indicates that "
    "another task died; see the other task logs for more details. Disable Python "
    "buffering, i.e. `python -u`, to be sure to see all the previous output. "
    "absl::Status: "
)
FIRST = f"{FATAL}DEADLINE_EXCEEDED: Deadline Exceeded\n\n"
HEARTBEAT = "RPC: /xla.coordination.CoordinationService/Heartbeat\n"
TRACE = (
    "=== Source Location Trace: ===\n"
    "external/xla+/xla/pjrt/distributed/coordination/coordination_service_error_util.cc:64\n"
)
OTHER = (
    f"{FATAL}UNAVAILABLE: The following tasks are unhealthy (stopped sending "
    "heartbeats):\n1\nThe tasks have crashed. Check the task logs for an earlier "
    "error, or scheduler events (e.g. preemption, eviction) to debug further.\n\n"
    "RPC: /xla.coordination.CoordinationService/PollForError\n"
)


@pytest.mark.parametrize(
    ("text", "process_id"),
    [
        pytest.param(FIRST + HEARTBEAT, 0, id="jax-0.10-process-0"),
        pytest.param(FIRST + HEARTBEAT + TRACE, 0, id="jax-0.11-process-0"),
        pytest.param(OTHER, 1, id="jax-0.10-process-1"),
        pytest.param(OTHER + TRACE, 1, id="jax-0.11-process-1"),
        pytest.param(f"{FATAL}INTERNAL: out of order\n", None, id="another-error"),
    ],
)
def test_the_process_that_no_longer_answers_is_found(text, process_id):
    """Fails if the process that waited is blamed."""
    assert find_unresponsive(text) == process_id


LATE = (
    "Gloo context initialization failed: DEADLINE_EXCEEDED: GetKeyValue() timed out "
    "with key: cpu:gloo/0,1/1 and duration: 29.99s"
)
SCATTER = "Gloo ReduceScatter failed: [buffer.cc:72] Read timeout [127.0.0.1]:1422"


def test_every_group_along_axes_is_connected_after_a_barrier(monkeypatch):
    """Fails if the first collective of a group waits for a process that compiles."""
    mesh = make_mesh(schema.Mesh(data=2, tensor=2, pipeline=2))
    done, run = [], gloo._sum_over

    @contextlib.contextmanager
    def barrier(name):
        done.append(name.rpartition("-")[0])
        yield

    def sum_over(mesh, axes):
        done.append(axes)
        return run(mesh, axes)

    monkeypatch.setattr(gloo, "barrier", barrier)
    monkeypatch.setattr(gloo, "_sum_over", sum_over)
    gloo.connect(mesh)
    assert done == []  # alone
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    gloo.connect(mesh)
    first, *groups = done
    assert first == "zjax-connect"
    names = ("data", "tensor", "pipeline")
    several = [{*pair} for pair in itertools.combinations(names, 2)] + [{*names}]
    assert sorted(map(sorted, groups)) == sorted(
        map(sorted, [{name} for name in names] + several)
    )
    assert float(run(mesh, ("data", "tensor"))) == 4


@pytest.mark.parametrize("said", [LATE, SCATTER])
def test_a_limit_of_gloo_is_named_with_what_to_do(said):
    with pytest.raises(ProcessError) as error, gloo.explain_timeouts():
        raise jax.errors.JaxRuntimeError(f"UNKNOWN: {said} [type.google: '']")
    assert str(error.value) == (
        "processes.num_processes=1 waited 30 s for each other, Gloo's fixed limit on "
        f"CPUs (UNKNOWN: {said}); run one process for "
        "the CPUs of a machine, or on one that is less busy, and run again to resume"
    )


def test_other_errors_of_devices_stay_as_they_are():
    said = "UNKNOWN: Gloo ReduceScatter failed: Connection closed by peer"
    with pytest.raises(jax.errors.JaxRuntimeError, match=said), gloo.explain_timeouts():
        raise jax.errors.JaxRuntimeError(said)
