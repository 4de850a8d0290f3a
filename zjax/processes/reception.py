"""Process 0 as it hears which processes of a run are there.

Whoever connects sends one line, a greeting, and hears one line, the verdict. A
connection that does not greet, as of a port scanner, is closed and forgotten.
"""

import contextlib
import dataclasses
import json
import selectors
import socket
import time
from collections.abc import Sequence
from typing import Any

from zjax.errors import Problem
from zjax.processes.address import Address
from zjax.processes.roster import name_processes

GREETING = b"zjax meeting 1 "
"""How each line begins."""
LINE_BYTES = 1 << 16
"""The longest line that is read: what is longer is no greeting."""
ANSWER_SECONDS = 5.0
"""How long a connection may take to open, or to take the verdict."""
_LATE_SECONDS = 5.0
"""How long those who are late are waited for, to be told what is wrong."""
_POLL_SECONDS = 0.05


@dataclasses.dataclass
class _Guest:
    """A connection, and the greeting that it has sent so far."""

    connection: socket.socket
    text: bytes = b""
    greeting: dict = dataclasses.field(default_factory=dict)


class Reception:
    """Those who have come to the meeting of a run.

    Args:
        address: Where they come.
        host: Of process 0.
        num_processes: How many meet.
        refused: Why the run must not start, whoever comes.
        seconds: How long to wait for all.
    """

    def __init__(
        self,
        address: Address,
        host: str,
        num_processes: int,
        refused: tuple[Problem, ...],
        seconds: float,
    ):
        self._address, self._host = address, host
        self._num_processes, self._refused = num_processes, refused
        self._seconds = seconds
        self._selector = selectors.DefaultSelector()
        self._guests: list[_Guest] = []

    def receive(self, servers: Sequence[socket.socket]) -> None:
        """Hears all processes, or waits as long as it may, and tells them the verdict.

        Args:
            servers: Sockets that listen.
        """
        deadline = time.monotonic() + self._seconds
        problems: list[Problem] = []
        with self._selector:
            for server in servers:
                server.setblocking(False)
                self._selector.register(server, selectors.EVENT_READ)
            while len(self._present()) < self._num_processes:
                if time.monotonic() > deadline:
                    problems = problems or [self._missing()]
                    break
                self._hear_all()
                if not problems:
                    problems = self._contradictions()
                    soon = time.monotonic() + _LATE_SECONDS
                    deadline = min(deadline, soon) if problems else deadline
            self._tell([*self._refused] or problems or self._contradictions())

    def _hear_all(self) -> None:
        for key, _ in self._selector.select(_POLL_SECONDS):
            if key.data is None:
                self._accept(key.fileobj)
            else:
                self._hear(key.data)

    def _accept(self, server: Any) -> None:
        with contextlib.suppress(OSError):
            connection, _ = server.accept()
            connection.setblocking(False)
            self._guests.append(_Guest(connection))
            self._selector.register(connection, selectors.EVENT_READ, self._guests[-1])

    def _hear(self, guest: _Guest) -> None:
        try:
            received = guest.connection.recv(LINE_BYTES)
        except OSError:
            received = b""
        guest.text += received
        if not received or not self._understands(guest):
            self._selector.unregister(guest.connection)
            guest.connection.close()
            self._guests.remove(guest)

    def _understands(self, guest: _Guest) -> bool:
        is_greeting = guest.text.startswith(GREETING[: len(guest.text)])
        if not is_greeting or len(guest.text) > LINE_BYTES:
            return False
        if guest.text.endswith(b"\n"):
            guest.greeting = _parse(guest.text[len(GREETING) :])
            return bool(guest.greeting)
        return True

    def _present(self) -> dict[int, _Guest]:
        return {g.greeting["process_id"]: g for g in self._guests if g.greeting}

    def _contradictions(self) -> list[Problem]:
        """Processes that cannot be of one run."""
        seen: dict[int, dict] = {}
        for greeting in (guest.greeting for guest in self._guests if guest.greeting):
            process_id, count = greeting["process_id"], greeting["num_processes"]
            if count != self._num_processes:
                problem = f"on process {process_id} is {self._num_processes} on "
                problem += f"process 0 ({_name(greeting)} and {self._host})"
                remedy = "make all processes the same"
                return [Problem("processes.num_processes", count, problem, remedy)]
            if process_id in seen:
                problem = f"was started twice: {_name(seen[process_id])} and "
                problem += _name(greeting)
                remedy = "give each process a number of its own"
                return [Problem("processes.process_id", process_id, problem, remedy)]
            seen[process_id] = greeting
        return []

    def _missing(self) -> Problem:
        present = self._present()
        missing = [i for i in range(self._num_processes) if i not in present]
        who = f"{name_processes(missing)} of {self._num_processes}"
        return Problem(
            "processes.coordinator",
            str(self._address),
            f"was not reached by {who} within {self._seconds:g} s (process 0 waited on "
            f"host {self._host})",
            "start all processes within this time, and check that they reach this "
            "address",
        )

    def _tell(self, problems: Sequence[Problem]) -> None:
        fields = [dataclasses.astuple(problem) for problem in problems]
        line = GREETING + json.dumps(fields).encode() + b"\n"
        for guest in self._guests:
            with contextlib.suppress(OSError):
                guest.connection.setblocking(True)
                guest.connection.settimeout(ANSWER_SECONDS)
                if guest.greeting:
                    guest.connection.sendall(line)
            guest.connection.close()


def _parse(text: bytes) -> dict:
    """What a greeting says; nothing where it makes no sense."""
    try:
        greeting = json.loads(text)
        found: dict[str, Any] = {n: str(greeting[n]) for n in ("host", "directory")}
        for name in ("process_id", "num_processes", "pid"):
            found[name] = int(greeting[name])
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}
    return found if 0 <= found["process_id"] < found["num_processes"] else {}


def _name(greeting: dict) -> str:
    where = f"host {greeting['host']} (pid {greeting['pid']})"
    return f"{where} for {greeting['directory']}"
