"""Parent process that starts the processes of a run and reports which one died."""

import collections
import contextlib
import dataclasses
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zjax.errors import Problem, describe_exit
from zjax.processes import member_files
from zjax.processes.barrier import find_unresponsive
from zjax.processes.cluster import find_cluster, find_scheduler
from zjax.processes.member_files import End, Member
from zjax.settings import schema

_POLL_SECONDS = 0.05
_CAUSE_SECONDS = 5
"""Seconds to wait for the cause while only consequences are known."""
_STOP_SECONDS = 10
_MAX_LINES = 200
"""Lines of output per child in which lost heartbeats are searched."""
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STOPPED = tuple(128 + number for number in _FORWARDED)
"""Exit codes of processes that saved and stopped on a signal."""
_INTERRUPTED = (
    "killed by the second Ctrl-C, without a checkpoint of this step; run the same "
    "command again to resume from the last one"
)
_LOOPBACK = "127.0.0.1"
"""Processes of one host connect by the loopback, which no other host can reach."""


@dataclasses.dataclass
class _Child:
    """A child process, the last lines of output, and the threads that copy lines."""

    process_id: int
    process: subprocess.Popen
    text: collections.deque
    copiers: list[threading.Thread]


def needs_parent(settings: schema.Processes) -> bool:
    """Whether this process should run the command under `supervise`.

    True if a scheduler started several processes, and no parent watches yet.
    """
    watched = member_files.MEMBERS_VARIABLE in os.environ
    return not watched and not find_cluster(settings, os.environ).is_alone


def supervise(command: Sequence[str], num_processes: int = 0) -> int:
    """Runs a command as child processes and reports the process that died.

    Call it from the main thread. SIGTERM, SIGINT and SIGHUP are forwarded to the
    children; a second SIGINT kills the children. With `num_processes=0` one child keeps
    the identity that the scheduler gave this process. Returns 0, or 128 plus the number
    of the forwarded signal, or the exit code of the process that died.
    """
    since = time.time()
    with tempfile.TemporaryDirectory(prefix="zjax-") as watched, _hold_port() as port:
        environ = os.environ | {member_files.MEMBERS_VARIABLE: watched}
        if num_processes:
            addresses = {
                "NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", "lo"),
                # Piped output would come in blocks otherwise.
                "PYTHONUNBUFFERED": "1",
                "ZJAX_COORDINATOR": f"{_LOOPBACK}:{port}",
                "ZJAX_NUM_PROCESSES": str(num_processes),
            }
            numbered = [
                (i, environ | addresses | {"ZJAX_PROCESS_ID": str(i)})
                for i in range(num_processes)
            ]
        else:
            numbered = [(None, environ)]
        children: list[_Child] = []
        try:
            with _forward_signals(children) as signals:
                for number, variables in numbered:
                    # Added one by one, so that a signal, or a failed start, reaches
                    # started children.
                    signals.add(_start(command, number, variables))
                return _watch(children, pathlib.Path(watched), since, signals.numbers)
        finally:
            _stop(children)


def describe_end(end: End, member: Member | None) -> str:
    """Describes in one line which process died, and how to continue."""
    who, remedy = "", "there is no checkpoint yet: fix the cause and start again"
    if member is not None:
        who = f"on host {member.host} (pid {member.pid}) "
        step = member_files.last_checkpoint(member.directory)
        if step is not None:
            checkpoint = f"step {step} in {member.directory}/checkpoints"
            fix = "fix the cause and " if end.rank == 1 else ""
            remedy = f"the last checkpoint is {checkpoint}: {fix}run the same command "
            remedy += "again to resume"
    return str(Problem("process", end.process_id, f"{who}ended ({end.reason})", remedy))


@contextlib.contextmanager
def _hold_port() -> Iterator[int]:
    """Keeps a free port bound, which only sockets with SO_REUSEPORT can share."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind((_LOOPBACK, 0))
        yield held.getsockname()[1]


def _start(
    command: Sequence[str], process_id: int | None, environ: Mapping[str, str]
) -> _Child:
    """Starts a child, and threads that copy the output with a label."""
    labelled = process_id is not None
    process = subprocess.Popen(
        command,
        env=dict(environ),
        stdout=subprocess.PIPE if labelled else None,
        # stderr is always read: lost heartbeats are reported there.
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        # A Ctrl-C of the terminal then reaches only the parent, which forwards it once.
        start_new_session=True,
    )
    if process_id is None:
        process_id = find_scheduler(environ).process_id
    child = _Child(process_id, process, collections.deque(maxlen=_MAX_LINES), [])
    label = f"[process {process_id}] " if labelled else ""
    for source, sink in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
        if source is not None:
            arguments = (source, sink, label, child.text)
            copier = threading.Thread(target=_copy, args=arguments, daemon=True)
            copier.start()
            child.copiers.append(copier)
    return child


_printing = threading.Lock()
"""Guards Python's streams, which lose lines that two threads write at once."""


def _copy(source: Any, sink: Any, label: str, lines: collections.deque) -> None:
    """Copies the lines of a stream with a label, and keeps the last lines."""
    with source:
        for line in source:
            lines.append(line)
            with _printing, contextlib.suppress(OSError):  # a terminal that is gone
                sink.write(label + line)
                sink.flush()


class _Signals:
    """Signals that stop a run, forwarded to every child once.

    The second Ctrl-C kills: children that raise would wait for peers.
    """

    def __init__(self, children: list[_Child]):
        self.numbers: list[int] = []
        self._children, self._reached = children, list[int]()

    def forward(self, number: int, frame: types.FrameType | None) -> None:
        """Handles a signal of this process."""
        self.numbers.append(number)
        self._reached.append(len(self._children))
        for child in self._children:
            self._send(child, len(self.numbers))

    def add(self, child: _Child) -> None:
        """Adds a child, and sends the signals that came while it was started."""
        index = len(self._children)
        # Appended first: a signal from now on reaches the child by `forward`.
        self._children.append(child)
        for place, reached in enumerate(self._reached, start=1):
            if reached <= index:
                self._send(child, place)

    def _send(self, child: _Child, place: int) -> None:
        """Sends the signal with a number of the order of arrival, from 1 on."""
        is_second = self.numbers[:place].count(signal.SIGINT) > 1
        number = signal.SIGKILL if is_second else self.numbers[place - 1]
        child.process.send_signal(number)


@contextlib.contextmanager
def _forward_signals(children: list[_Child]) -> Iterator[_Signals]:
    """Forwards signals that stop a run to the children, and restores the handlers."""
    signals = _Signals(children)
    before = {
        number: signal.signal(number, signals.forward)
        for number in _FORWARDED
        # Under nohup SIGHUP is ignored and must stay ignored.
        if signal.getsignal(number) is not signal.SIG_IGN or number != signal.SIGHUP
    }
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _watch(
    children: Sequence[_Child],
    watched: pathlib.Path,
    since: float,
    forwarded: Sequence[int],
) -> int:
    """Waits until all children have ended or one has died; returns the exit code."""
    while True:
        codes = [child.process.poll() for child in children]
        ended = [code for code in codes if code is not None]
        failed = [code for code in ended if _has_failed(code)]
        # After a signal, every child may take the time to save and stop.
        if failed and not forwarded:
            break
        if len(ended) == len(children):
            if forwarded.count(signal.SIGINT) > 1:
                print(_INTERRUPTED, file=sys.stderr, flush=True)
                return 128 + signal.SIGINT
            return max(map(_exit_code, failed or ended))
        time.sleep(_POLL_SECONDS)
    end, members = _find_cause(children, watched, since)
    dead = [child for child in children if _has_failed(child.process.returncode)]
    blamed = [child for child in dead if child.process_id == end.process_id]
    code = _exit_code((blamed or dead)[0].process.returncode)
    _stop(children)
    print(describe_end(end, members.get(end.process_id)), file=sys.stderr, flush=True)
    return code


def _find_cause(
    children: Sequence[_Child], watched: pathlib.Path, since: float
) -> tuple[End, dict[int, Member]]:
    """Finds the end, on this host or another, that caused all ends."""
    deadline = time.monotonic() + _CAUSE_SECONDS
    while True:
        members = member_files.read_members(watched)
        for child in children:
            # With an address in its config, only the process itself knows its number.
            matches = [m for m in members.values() if m.pid == child.process.pid]
            child.process_id = matches[0].process_id if matches else child.process_id
            if _has_failed(child.process.poll()):
                _record_end(child, members.get(child.process_id), watched, since)
        shared = {member_files.shared_directory(m.directory) for m in members.values()}
        # The run's directory has the ends of processes on other hosts.
        paths = [watched, *shared]
        ends = [end for path in paths for end in member_files.read_ends(path, since)]
        cause = min(ends, key=lambda end: (end.rank, end.at_seconds))
        if cause.is_cause or time.monotonic() > deadline:
            break
        time.sleep(_POLL_SECONDS)
    for path in shared:
        members = member_files.read_members(path) | members
    unresponsive = find_unresponsive(
        "".join(line for c in children for line in [*c.text])
    )
    # A hung process records no end: only the survivors' stderr names it.
    if not cause.is_cause and unresponsive is not None:
        cause = End(unresponsive, 0, "stopped sending heartbeats")
    return cause, members


def _record_end(
    child: _Child, member: Member | None, watched: pathlib.Path, since: float
) -> None:
    """Records how a child ended, unless the child has done so."""
    if child.process_id in {
        end.process_id for end in member_files.read_ends(watched, since)
    }:
        return
    code = child.process.returncode
    # The runtime aborts survivors by SIGABRT; another signal is a cause.
    rank = 3 if code == -signal.SIGABRT else 0 if code < 0 else 1
    end = End(child.process_id, rank, describe_exit(code))
    member_files.write_end(end, member, watched)


def _stop(children: Sequence[_Child]) -> None:
    """Terminates the children, kills survivors, and drains all output."""
    for child in children:
        child.process.terminate()
    deadline = time.monotonic() + _STOP_SECONDS
    for child in children:
        try:
            child.process.wait(max(0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()
        for copier in child.copiers:
            # With a timeout, as a grandchild may hold the pipe open.
            copier.join(timeout=1)


def _has_failed(code: int | None) -> bool:
    """Whether a child has ended, neither successfully nor because of a stop signal."""
    return code not in (None, 0, *STOPPED)


def _exit_code(code: int) -> int:
    return 128 - code if code < 0 else code
