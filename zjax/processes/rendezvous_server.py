"""Server of the rendezvous, in process 0.

Each client sends one line, the greeting, and receives one line, the verdict.
Connections that send anything else, such as port scanners, are closed.
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
from zjax.processes.cluster import Address
from zjax.processes.member_files import name_processes

GREETING = b"zjax meeting 1 "
"""Prefix of every line; the number is the version of the protocol."""
LINE_BYTES = 1 << 16
ANSWER_SECONDS = 5.0
"""Seconds that a connection may take to open, or to receive the verdict."""
_LATE_SECONDS = 5.0
"""Seconds to wait for late processes once there is a problem to report."""
_POLL_SECONDS = 0.05


@dataclasses.dataclass
class _Client:
    """A connection, the bytes received so far, and the parsed greeting."""

    connection: socket.socket
    text: bytes = b""
    greeting: dict = dataclasses.field(default_factory=dict)


class RendezvousServer:
    """Collects the greetings of all processes and sends each the verdict."""

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
        self._clients: list[_Client] = []

    def receive(self, servers: Sequence[socket.socket]) -> None:
        """Receives greetings on listening sockets; sends all clients the verdict."""
        deadline = time.monotonic() + self._seconds
        problems: list[Problem] = []
        with self._selector:
            for server in servers:
                server.setblocking(False)
                self._selector.register(server, selectors.EVENT_READ)
            # Unique numbers, so that a process started twice does not stand for a
            # missing process.
            while len(self._present()) < self._num_processes:
                if time.monotonic() > deadline:
                    problems = problems or [self._missing()]
                    break
                self._poll()
                if not problems:
                    problems = self._contradictions()
                    # Late processes shall hear the problem, too, and not wait for a
                    # minute.
                    soon = time.monotonic() + _LATE_SECONDS
                    deadline = min(deadline, soon) if problems else deadline
            self._send_verdict([*self._refused] or problems or self._contradictions())

    def _poll(self) -> None:
        """Accepts connections and reads greetings that have arrived."""
        for key, _ in self._selector.select(_POLL_SECONDS):
            if key.data is None:
                self._accept(key.fileobj)
            else:
                self._read(key.data)

    def _accept(self, server: Any) -> None:
        """Accepts a connection, which may already be gone."""
        with contextlib.suppress(OSError):
            connection, _ = server.accept()
            connection.setblocking(False)
            self._clients.append(_Client(connection))
            self._selector.register(connection, selectors.EVENT_READ, self._clients[-1])

    def _read(self, client: _Client) -> None:
        """Reads from a client; drops the client if the text is no greeting."""
        try:
            received = client.connection.recv(LINE_BYTES)
        except OSError:
            received = b""
        client.text += received
        if not received or not self._is_valid(client):
            self._selector.unregister(client.connection)
            client.connection.close()
            self._clients.remove(client)

    def _is_valid(self, client: _Client) -> bool:
        """Whether the bytes so far may become a greeting; parses a complete line."""
        is_greeting = client.text.startswith(GREETING[: len(client.text)])
        if not is_greeting or len(client.text) > LINE_BYTES:
            return False
        if client.text.endswith(b"\n"):
            client.greeting = _parse_greeting(client.text[len(GREETING) :])
            return bool(client.greeting)
        return True

    def _present(self) -> dict[int, _Client]:
        return {x.greeting["process_id"]: x for x in self._clients if x.greeting}

    def _contradictions(self) -> list[Problem]:
        """Problems of processes that cannot belong to one run."""
        seen: dict[int, dict] = {}
        for greeting in (x.greeting for x in self._clients if x.greeting):
            process_id, count = greeting["process_id"], greeting["num_processes"]
            if count != self._num_processes:
                problem = f"on process {process_id} is {self._num_processes} on "
                problem += f"process 0 ({_name(greeting)} and {self._host})"
                remedy = "make all processes the same"
                return [Problem("processes.num_processes", count, problem, remedy)]
            if process_id in seen:
                problem = f"was started twice: {_name(seen[process_id])} and "
                problem += _name(greeting)
                remedy = "give each process its own number"
                return [Problem("processes.process_id", process_id, problem, remedy)]
            seen[process_id] = greeting
        return []

    def _missing(self) -> Problem:
        """Problem of processes that did not report in time."""
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

    def _send_verdict(self, problems: Sequence[Problem]) -> None:
        """Sends the problems to all processes, and closes all connections."""
        fields = [dataclasses.astuple(problem) for problem in problems]
        line = GREETING + json.dumps(fields).encode() + b"\n"
        for client in self._clients:
            with contextlib.suppress(OSError):
                client.connection.setblocking(True)
                client.connection.settimeout(ANSWER_SECONDS)
                if client.greeting:
                    client.connection.sendall(line)
            client.connection.close()


def _parse_greeting(text: bytes) -> dict:
    """Parses a greeting; empty if malformed."""
    try:
        greeting = json.loads(text)
        found: dict[str, Any] = {n: str(greeting[n]) for n in ("host", "directory")}
        for name in ("process_id", "num_processes", "pid"):
            found[name] = int(greeting[name])
    # Anybody may connect: deep nesting, too, must not end process 0.
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}
    return found if 0 <= found["process_id"] < found["num_processes"] else {}


def _name(greeting: dict) -> str:
    where = f"host {greeting['host']} (pid {greeting['pid']})"
    return f"{where} for {greeting['directory']}"
