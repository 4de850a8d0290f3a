"""Rendezvous of a run's processes over plain sockets, before JAX connects.

JAX's coordinator crashes if the port is taken, and waits for minutes for a process that
is missing or was started twice, without naming the process. Therefore process 0 first
listens on that port, collects all processes, and tells each whether the run starts.
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
from zjax.processes.cluster import Address, parse_address
from zjax.processes.member_files import Member
from zjax.processes.rendezvous_server import (
    ANSWER_SECONDS,
    GREETING,
    LINE_BYTES,
    RendezvousServer,
)

RENDEZVOUS_SECONDS = 60.0
_RETRY_SECONDS = 0.2
_PROBE_SECONDS = 2.0
"""Seconds that a listener on the port may take to prove that a run owns the port."""


def wait_for_peers(
    coordinator: str,
    member: Member,
    num_processes: int,
    *,
    refused: Sequence[Problem] = (),
    seconds: float = RENDEZVOUS_SECONDS,
) -> None:
    """Waits until all processes of a run have reported to process 0.

    `refused` are problems of process 0 for which the run must not start; every process
    raises the problems.
    """
    address = parse_address(coordinator)
    greeting = dataclasses.asdict(member) | {"num_processes": num_processes}
    line = GREETING + json.dumps(greeting).encode() + b"\n"
    with contextlib.ExitStack() as held:
        if member.process_id or not _is_only_coordinator(address, held):
            # A second process 0 joins the first, which reports the double start.
            _join(address, member.process_id, line, seconds)
            return
        _check_free(address, line)
        servers = held.enter_context(_listen(address))
        server = RendezvousServer(
            address, member.host, num_processes, tuple(refused), seconds
        )
        # Process 0 also joins as a client, to check that the address leads here.
        thread = threading.Thread(target=server.receive, args=(servers,))
        thread.start()
        try:
            _join(address, 0, line, seconds)
        finally:
            thread.join()


def _is_only_coordinator(address: Address, held: contextlib.ExitStack) -> bool:
    """Whether this is the only process 0 at the port on this host.

    With SO_REUSEPORT two could listen at one port, and each would hear some processes.
    A name in Linux's abstract socket namespace has one owner, and ends with the
    process.
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
    """Greets process 0 until an answer comes, and raises the reported problems."""
    deadline, reasons = time.monotonic() + seconds, dict[str, str]()
    while True:
        for target in _targets(address, reasons):
            where = f"{target[0]} port {target[1]}"
            try:
                with socket.create_connection(target, timeout=ANSWER_SECONDS) as joined:
                    joined.sendall(line)
                    # Process 0 answers only once all have come, or time is up.
                    joined.settimeout(seconds + ANSWER_SECONDS)
                    problems = _read_verdict(joined)
            except OSError as error:
                reasons[where] = _describe(error)
                continue
            if problems is None:
                reasons[where] = "answers, but not as process 0 of a run that starts"
            elif problems:
                raise ProcessError(*problems)
            else:
                return
        # Checked after a try, so that a late process still tries once.
        if time.monotonic() > deadline:
            raise _not_reached(address, process_id, reasons, seconds)
        time.sleep(_RETRY_SECONDS)


def _targets(address: Address, reasons: dict[str, str]) -> list[tuple[str, int]]:
    """Addresses to which the host name resolves now."""
    try:
        addresses = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
    except OSError as error:
        reasons.clear()
        reasons[address.host] = _describe(error)
        return []
    reasons.pop(address.host, None)
    return [(str(where[0]), address.port) for *_, where in addresses]


def _read_verdict(connection: socket.socket) -> list[Problem] | None:
    """Problems that process 0 reports; None if the listener is not process 0."""
    text = b""
    while not text.endswith(b"\n"):
        received = connection.recv(LINE_BYTES)
        text += received
        # Compared as bytes arrive, so that a foreign server is recognised at once.
        is_verdict = text.startswith(GREETING[: len(text)])
        if not received or not is_verdict or len(text) > LINE_BYTES:
            return None
    try:
        return [Problem(*fields) for fields in json.loads(text[len(GREETING) :])]
    except (ValueError, TypeError):
        return None


def _not_reached(
    address: Address, process_id: int, reasons: dict[str, str], seconds: float
) -> ProcessError:
    """Error of a process that did not reach process 0, with all that was tried."""
    tried = "; ".join(f"{where}: {reason}" for where, reason in reasons.items())
    problem = f"was not reached by process {process_id} within {seconds:g} s ({tried})"
    remedy = "name the host and a free port of process 0, and start it with the others"
    return ProcessError(Problem("processes.coordinator", str(address), problem, remedy))


def _check_free(address: Address, line: bytes) -> None:
    """Raises if a server answers at the port: with SO_REUSEPORT, bind would succeed."""
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
        raise ProcessError(
            *(problems or [_port_taken(address, "something answers there")])
        )


def _port_taken(address: Address, reason: str) -> Problem:
    """Problem of a port on which process 0 cannot listen."""
    return Problem(
        "processes.coordinator",
        str(address),
        f"cannot be listened on by process 0 ({reason})",
        "use another port, or end what uses this one",
    )


@contextlib.contextmanager
def _listen(address: Address) -> Iterator[list[socket.socket]]:
    """Listens at the port, on the loopback interface for a loopback address."""
    with contextlib.ExitStack() as opened:
        servers: list[socket.socket] = []
        error = OSError("no such address")
        for family, where in _bind_addresses(address):
            try:
                server = opened.enter_context(socket.socket(family, socket.SOCK_STREAM))
                # `zjax launch` holds the port for its processes with the same option.
                server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    # Dual-stack for all interfaces; on the loopback, IPv4 has its own
                    # socket.
                    only = int(address.is_loopback)
                    server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, only)
                server.bind(where)
                server.listen(socket.SOMAXCONN)
            except OSError as failed:
                # One address family may be unavailable; one socket suffices.
                error = failed
                continue
            servers.append(server)
        if not servers:
            raise ProcessError(_port_taken(address, _describe(error)))
        yield servers


def _bind_addresses(address: Address) -> list[tuple[int, Any]]:
    """Socket families and addresses on which to listen."""
    if address.is_loopback:
        addresses = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
        return [(family, where) for family, *_, where in addresses]
    if socket.has_dualstack_ipv6():
        return [(socket.AF_INET6, ("::", address.port))]
    return [(socket.AF_INET, ("", address.port))]


def _describe(error: OSError) -> str:
    """Reason of a failed connection, in lower case."""
    if isinstance(error, TimeoutError):
        return "no answer"
    text = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
    if isinstance(error, socket.gaierror):
        text = error.strerror or text
    return text.lower()
