"""Processes meet over plain sockets before JAX connects them.

JAX's coordinator crashes where its port is taken, and waits for minutes for a process
that is missing or was started twice, without naming it. Here process 0 listens on the
same port first, hears who is there, and tells all of them whether the run can start.
"""

import contextlib
import dataclasses
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from zjax.errors import Problem, ProcessError
from zjax.processes.address import Address, parse_address
from zjax.processes.reception import ANSWER_SECONDS, GREETING, LINE_BYTES, Reception
from zjax.processes.roster import Member

MEETING_SECONDS = 60.0
"""How long processes wait for each other."""
_RETRY_SECONDS = 0.2
_PROBE_SECONDS = 2.0
"""How long whoever holds the port may take to show that it belongs to a run."""


def meet(
    coordinator: str,
    own: Member,
    num_processes: int,
    *,
    refused: Sequence[Problem] = (),
    seconds: float = MEETING_SECONDS,
) -> None:
    """Waits until all processes of a run are there.

    Args:
        coordinator: `host:port` of process 0.
        own: This process.
        num_processes: How many meet.
        refused: Of process 0: why the run must not start, which all are told.
        seconds: How long to wait for the others.

    Raises:
        ProcessError: Names `processes.coordinator` and what was tried where it is not
            reached or its port is taken; the processes that are missing or were
            started twice; or what `refused` says.
    """
    address = parse_address(coordinator)
    greeting = dataclasses.asdict(own) | {"num_processes": num_processes}
    line = GREETING + json.dumps(greeting).encode() + b"\n"
    with contextlib.ExitStack() as held:
        if own.process_id or not _claims_port(address, held):
            # A second process 0 is told by the first that it was started twice.
            _join(address, own.process_id, line, seconds)
            return
        _check_free(address, line)
        servers = held.enter_context(_listen(address))
        reception = Reception(address, own.host, num_processes, tuple(refused), seconds)
        # As a guest of itself, process 0 finds out whether its address leads to it.
        thread = threading.Thread(target=reception.receive, args=(servers,))
        thread.start()
        try:
            _join(address, 0, line, seconds)
        finally:
            thread.join()


def _claims_port(address: Address, held: contextlib.ExitStack) -> bool:
    """Whether no other process 0 of this host is at the port.

    Two may listen at one port, and each would hear a part of the others. A name in the
    abstract namespace belongs to one; only Linux has it.
    """
    if sys.platform != "linux":
        return True
    claim = held.enter_context(socket.socket(socket.AF_UNIX))
    try:
        claim.bind(f"\0zjax meeting {address.port}")
    except OSError:
        return False
    return True


def _join(address: Address, process_id: int, line: bytes, seconds: float) -> None:
    """Greets process 0 until it answers, and waits for its verdict."""
    deadline, reasons = time.monotonic() + seconds, dict[str, str]()
    while True:
        for target in _targets(address, reasons):
            where = f"{target[0]} port {target[1]}"
            try:
                with socket.create_connection(target, timeout=ANSWER_SECONDS) as joined:
                    joined.sendall(line)
                    joined.settimeout(seconds + ANSWER_SECONDS)
                    problems = _read_verdict(joined)
            except OSError as error:
                reasons[where] = _said(error)
                continue
            if problems is None:
                reasons[where] = "answers, but not as process 0 of a run that starts"
            elif problems:
                raise ProcessError(*problems)
            else:
                return
        if time.monotonic() > deadline:
            raise _unreached(address, process_id, reasons, seconds)
        time.sleep(_RETRY_SECONDS)


def _targets(address: Address, reasons: dict[str, str]) -> list[tuple[str, int]]:
    """The addresses that the name of the host stands for just now."""
    try:
        found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
    except OSError as error:
        reasons.clear()
        reasons[address.host] = _said(error)
        return []
    reasons.pop(address.host, None)
    return [(str(where[0]), address.port) for *_, where in found]


def _read_verdict(connection: socket.socket) -> list[Problem] | None:
    """What process 0 says; None where this is not process 0."""
    text = b""
    while not text.endswith(b"\n"):
        received = connection.recv(LINE_BYTES)
        text += received
        is_verdict = text.startswith(GREETING[: len(text)])
        if not received or not is_verdict or len(text) > LINE_BYTES:
            return None
    try:
        return [Problem(*fields) for fields in json.loads(text[len(GREETING) :])]
    except (ValueError, TypeError):
        return None


def _unreached(
    address: Address, process_id: int, reasons: dict[str, str], seconds: float
) -> ProcessError:
    tried = "; ".join(f"{where}: {reason}" for where, reason in reasons.items())
    problem = f"was not reached by process {process_id} within {seconds:g} s ({tried})"
    remedy = "name the host and a free port of process 0, and start it with the others"
    return ProcessError(Problem("processes.coordinator", str(address), problem, remedy))


def _check_free(address: Address, line: bytes) -> None:
    """Refuses a port at which somebody listens; the kernel may let two share it."""
    local = address if address.is_loopback else address._replace(host="localhost")
    for target in _targets(local, {}):
        try:
            connection = socket.create_connection(target, timeout=_PROBE_SECONDS)
        except OSError:
            continue
        problems = None
        with connection, contextlib.suppress(OSError):
            connection.sendall(line)
            problems = _read_verdict(connection)
        raise ProcessError(*(problems or [_taken(address, "something answers there")]))


def _taken(address: Address, reason: str) -> Problem:
    return Problem(
        "processes.coordinator",
        str(address),
        f"cannot be listened on by process 0 ({reason})",
        "use another port, or end what uses this one",
    )


@contextlib.contextmanager
def _listen(address: Address) -> Iterator[list[socket.socket]]:
    """Sockets at the port: on the loopback where the address is one of it."""
    with contextlib.ExitStack() as opened:
        servers: list[socket.socket] = []
        error = OSError("no such address")
        for family, where in _places(address):
            try:
                server = opened.enter_context(socket.socket(family, socket.SOCK_STREAM))
                # `zjax launch` holds the port for its processes with the same option.
                server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    only = int(address.is_loopback)
                    server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, only)
                server.bind(where)
                server.listen(socket.SOMAXCONN)
            except OSError as failed:
                error = failed
                continue
            servers.append(server)
        if not servers:
            raise ProcessError(_taken(address, _said(error)))
        yield servers


def _places(address: Address) -> list[tuple[int, Any]]:
    if address.is_loopback:
        found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
        return [(family, where) for family, *_, where in found]
    if socket.has_dualstack_ipv6():
        return [(socket.AF_INET6, ("::", address.port))]
    return [(socket.AF_INET, ("", address.port))]


def _said(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "no answer"
    text = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
    if isinstance(error, socket.gaierror):
        text = error.strerror or text
    return text.lower()
