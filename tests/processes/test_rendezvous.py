"""Processes hear from process 0 whether a run can start, whoever else calls."""

import contextlib
import re
import socket
import threading
import time
from concurrent import futures

import pytest

from zjax.errors import Problem, ProcessError
from zjax.processes import rendezvous, rendezvous_server
from zjax.processes.member_files import Member
from zjax.processes.rendezvous import wait_for_peers

GARBAGE = (b"", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 100_000, b"zjax meeting 1 [[[\n")


@pytest.fixture
def port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def member(process_id, pid=None):
    return Member(process_id, "here", pid or 100 + process_id, "/run")


LIMIT = 300.0
"""Seconds that a rendezvous may take where all come; a busy machine is slow."""


def gather(coordinator, *members, num_processes=2, seconds=1.0, **settings):
    """What each of these processes is told; nothing where the run can start."""
    with futures.ThreadPoolExecutor(len(members)) as pool:
        calls = [
            pool.submit(
                wait_for_peers,
                coordinator,
                who,
                num_processes,
                seconds=seconds,
                **settings,
            )
            for who in members
        ]
        found = [call.exception() for call in calls]
    assert {type(error) for error in found} <= {type(None), ProcessError}
    return [str(error) if error else "" for error in found]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", socket.gethostname()])
def test_all_meet(port, host):
    members = [member(i) for i in range(3)]
    found = gather(f"{host}:{port}", *members, num_processes=3, seconds=LIMIT)
    assert found == ["", "", ""]


def test_garbage_does_not_end_a_rendezvous(port):
    """Fails if a port scanner, or one that connects and is silent, ends a run."""
    address, silent = ("127.0.0.1", port), []

    def call():
        for text in GARBAGE:
            while True:
                with contextlib.suppress(OSError):
                    silent.append(socket.create_connection(address, timeout=5))
                    silent[-1].sendall(text)
                    break

    with futures.ThreadPoolExecutor(2) as pool:
        first = pool.submit(
            wait_for_peers, f"127.0.0.1:{port}", member(0), 2, seconds=LIMIT
        )
        pool.submit(call).result()
        assert len(silent) == len(GARBAGE)
        wait_for_peers(f"127.0.0.1:{port}", member(1), 2, seconds=LIMIT)
        first.result()
    for connection in silent:
        connection.close()


def test_a_process_that_is_missing_is_named_to_all_that_came(port):
    address = f"127.0.0.1:{port}"
    found = gather(address, member(0), member(2), num_processes=3)
    told = (
        f"processes.coordinator='{address}' was not reached by process 1 of 3 within "
        "1 s (process 0 waited on host here); start all processes within this time, "
        "and check that they reach this address"
    )
    assert found == [told, told]


def test_a_coordinator_or_host_that_is_missing_is_named_with_what_was_tried(port):
    assert gather(f"127.0.0.1:{port}", member(1)) == [
        f"processes.coordinator='127.0.0.1:{port}' was not reached by process 1 within "
        f"1 s (127.0.0.1 port {port}: connection refused); name the host and a free "
        "port of process 0, and start it with the others"
    ]
    (found,) = gather("no-such-host.invalid:5757", member(1))
    assert re.match(
        r"processes.coordinator='no-such-host.invalid:5757' was not reached by process "
        r"1 within 1 s \(no-such-host.invalid: .+\); name the host",
        found,
    )


@pytest.mark.parametrize("process_id", [0, 1])
def test_a_process_that_was_started_twice_is_named_to_all(port, process_id):
    address = f"127.0.0.1:{port}"
    first = member(0), member(1), member(process_id, pid=7)
    with futures.ThreadPoolExecutor(1) as pool:
        early = pool.submit(gather, address, *first, num_processes=3, seconds=LIMIT)
        time.sleep(1)
        last = gather(address, member(2), num_processes=3, seconds=LIMIT)
        found = early.result() + last
    assert len(set(found)) == 1
    who = rf"host here \(pid ({100 + process_id}|7)\) for /run"
    assert re.fullmatch(
        rf"processes.process_id={process_id} was started twice: {who} and {who}; "
        r"give each process its own number",
        found[0],
    )


def test_two_processes_0_do_not_share_the_port(port, monkeypatch):
    """Fails if both listen where they start at once, and each hears a part."""
    together = threading.Barrier(2)

    def found_free_by_both(*_):
        with contextlib.suppress(threading.BrokenBarrierError):
            together.wait(timeout=0.5)

    monkeypatch.setattr(rendezvous, "_check_free", found_free_by_both)
    # Only the server's wait for late processes ends the test, as a client that starts
    # late on a busy machine must not give up first.
    monkeypatch.setattr(rendezvous_server, "_LATE_SECONDS", 0.2)
    for _ in range(2):
        found = gather(f"127.0.0.1:{port}", member(0), member(0, pid=7), seconds=30.0)
        assert "was started twice" in found[0]
        assert found[0] == found[1]


def test_processes_that_count_differently_are_named(port):
    with futures.ThreadPoolExecutor(1) as pool:
        other = pool.submit(
            wait_for_peers, f"127.0.0.1:{port}", member(1), 3, seconds=LIMIT
        )
        found = gather(f"127.0.0.1:{port}", member(0), seconds=LIMIT)
    assert found == [
        "processes.num_processes=3 on process 1 is 2 on process 0 (host here (pid 101) "
        "for /run and here); make all processes the same"
    ]
    assert str(other.exception()) == found[0]


@pytest.mark.parametrize("line", [b"{", b"[[1]]", b"7", b"\xff"])
def test_a_verdict_that_cannot_be_read_is_none_of_process_0(line):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(rendezvous.GREETING + line + b"\n")
        assert rendezvous._read_verdict(ours) is None


@pytest.mark.parametrize("shares", [False, True])
def test_a_port_that_is_taken_is_named(port, shares):
    """Fails if two share a port, as the kernel lets them do that both ask for it."""
    remedy = "use another port, or end what uses this one"
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(shares))
        other.bind(("127.0.0.1", port))
        if not shares:  # held, and nobody listens
            assert gather(f"127.0.0.1:{port}", member(0)) == [
                f"processes.coordinator='127.0.0.1:{port}' cannot be listened on by "
                f"process 0 (address already in use); {remedy}"
            ]
        other.listen()

        def answer():
            with contextlib.suppress(OSError):
                while True:
                    with other.accept()[0] as connection:
                        connection.recv(1000)
                        connection.sendall(b"SSH-2.0\r\n")

        threading.Thread(target=answer, daemon=True).start()
        assert gather(f"localhost:{port}", member(0)) == [
            f"processes.coordinator='localhost:{port}' cannot be listened on by "
            f"process 0 (something answers there); {remedy}"
        ]
        (found,) = gather(f"127.0.0.1:{port}", member(1))
        assert "answers, but not as process 0 of a run that starts" in found


def test_all_hear_why_process_0_refuses(port):
    problem = Problem("directory", "/run", "is in use", "wait")
    found = gather(
        f"127.0.0.1:{port}", member(0), member(1), refused=(problem,), seconds=LIMIT
    )
    assert found == ["directory='/run' is in use; wait"] * 2


def test_a_process_that_comes_first_waits(port):
    with futures.ThreadPoolExecutor(1) as pool:
        early = pool.submit(
            wait_for_peers, f"127.0.0.1:{port}", member(1), 2, seconds=LIMIT
        )
        time.sleep(0.3)
        wait_for_peers(f"127.0.0.1:{port}", member(0), 2, seconds=LIMIT)
        early.result()
