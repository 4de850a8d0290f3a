"""A slow network inside one Linux machine: nodes in network namespaces, and a switch.

`isolate` runs a program in namespaces of its own (network, host name, processes and
mounts). In there, `Network` makes a bridge, a namespace per node and a pair of virtual
interfaces between them. Nothing of this is visible outside, or has a name there, and
the kernel removes it with the last process: also after Ctrl-C, SIGTERM or SIGKILL.

The host name of a node is its address, because Gloo in JAX binds to the address that
its host name resolves to.
"""

import contextlib
import ctypes
import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Self

TOOLS = ("unshare", "nsenter", "ip", "tc")
INTERFACE = "eth0"
"""Interface of every node."""
PORT = 5757
"""Free in every node: its namespace has no other programs."""
BURST_BYTES = 128 * 1024
"""Bytes that pass at once: two of the largest packets of a virtual interface."""
BURST_SECONDS = 0.002
QUEUE = "50ms"
"""Longest wait of a packet at the limit, before it is dropped."""
PROBE_SECONDS = 1.0
CONNECT_SECONDS = 10.0
_ISOLATED = "SLOW_NETWORK_ISOLATED"
_PR_SET_PDEATHSIG = 1


@dataclasses.dataclass(frozen=True)
class Link:
    """The link of each node to the switch, in either direction.

    Args:
        megabits: Rate in 10**6 bits per second; infinite for no limit.
        delay_ms: Milliseconds added in each direction.
    """

    megabits: float
    delay_ms: float = 0.0

    @property
    def bytes_per_second(self) -> float:
        """The rate in bytes."""
        return self.megabits * 1e6 / 8

    def queues(self, interface: str) -> list[list[str]]:
        """Commands of `tc` that limit what an interface sends."""
        burst = max(BURST_BYTES, int(self.bytes_per_second * BURST_SECONDS))
        device = ["tc", "qdisc", "add", "dev", interface]
        rate = ["rate", f"{self.megabits:g}mbit", "burst", str(burst)]
        commands = [[*device, "root", "handle", "1:", "tbf", *rate, "latency", QUEUE]]
        if self.delay_ms:
            delay = ["netem", "delay", f"{self.delay_ms:g}ms", "limit", "100000"]
            commands.append([*device, "parent", "1:1", "handle", "2:", *delay])
        return commands


def address(node: int) -> str:
    """The address of a node, which is also its host name.

    Example:
        >>> address(0)
        '10.0.0.1'
    """
    return f"10.0.0.{node + 1}"


def why_not() -> str:
    """Why this machine allows no namespaces; empty if it does."""
    for tool in TOOLS:
        if shutil.which(tool) is None:
            return f"{tool} is not installed (packages iproute2 and util-linux)"
    trial = [*_unshare(), "ip", "link", "add", "name", "br0", "type", "bridge"]
    found = subprocess.run(trial, capture_output=True, text=True)
    if found.returncode:
        return f"network namespaces are not allowed here ({_last_line(found.stderr)})"
    return ""


def is_isolated() -> bool:
    """Whether `isolate` started this program."""
    return os.environ.get(_ISOLATED) == "1"


def isolate(command: Sequence[str]) -> int:
    """Runs a program in namespaces of its own, and ends all of it in any case.

    Returns:
        The program's exit code.
    """
    environ = os.environ | {_ISOLATED: "1"}
    words = [*_unshare(), *command]
    with _end_on_signals():
        program = subprocess.Popen(words, env=environ, preexec_fn=_die_with_parent)
        try:
            return program.wait()
        finally:
            program.kill()
            program.wait()


class Network:
    """Nodes behind a switch; a context, at whose end all programs of nodes are gone.

    Args:
        num_nodes: Number of nodes, 2 or more.
    """

    def __init__(self, num_nodes: int):
        self.num_nodes = num_nodes
        self._holders: list[subprocess.Popen] = []
        self._programs: list[subprocess.Popen] = []

    def __enter__(self) -> Self:
        _run(["ip", "link", "add", "name", "br0", "type", "bridge"])
        _run(["ip", "link", "set", "br0", "up"])
        for node in range(self.num_nodes):
            self._add(node)
        return self

    def __exit__(self, *error: object) -> None:
        for process in (*self._programs, *self._holders):
            process.kill()
            process.wait()

    def inside(self, node: int, command: Sequence[str]) -> list[str]:
        """A command that runs in a node."""
        own = f"/proc/{self._holders[node].pid}/ns"
        return ["nsenter", f"--net={own}/net", f"--uts={own}/uts", "--", *command]

    def start(
        self, node: int, command: Sequence[str], **how: object
    ) -> subprocess.Popen:
        """Starts a program in a node; `how` are arguments of `subprocess.Popen`."""
        program = subprocess.Popen(self.inside(node, command), **how)  # pyright: ignore
        self._programs.append(program)
        return program

    def limit(self, link: Link) -> None:
        """Limits what every node sends and receives.

        Raises:
            SystemExit: The kernel lacks a queue, as that of delays.
        """
        for node in range(self.num_nodes):
            for command in link.queues(f"node{node}"):
                _run(command)
            for command in link.queues(INTERFACE):
                _run(self.inside(node, command))

    def measure(self) -> float:
        """Bytes per second of one connection from node 1 to node 0."""
        own = [sys.executable, __file__]
        receiver = self.start(0, [*own, "receive"], stdout=subprocess.PIPE, text=True)
        _run(self.inside(1, [*own, "send", address(0)]))
        text, _ = receiver.communicate(timeout=CONNECT_SECONDS)
        return json.loads(text)

    def _add(self, node: int) -> None:
        """Makes a namespace, held by a process, and its link to the switch."""
        script = f"hostname {address(node)} && echo ready && exec sleep infinity"
        holder = subprocess.Popen(
            ["unshare", "--net", "--uts", "sh", "-c", script], stdout=subprocess.PIPE
        )
        self._holders.append(holder)
        assert holder.stdout is not None
        if holder.stdout.readline() != b"ready\n":
            raise SystemExit("a namespace in a namespace is not allowed here")
        port, peer = f"node{node}", ["peer", "name", INTERFACE, "netns"]
        _run(
            ["ip", "link", "add", port, "type", "veth", *peer, str(holder.pid)],
            ["ip", "link", "set", port, "master", "br0", "up"],
            self.inside(node, ["ip", "link", "set", "lo", "up"]),
            self.inside(
                node, ["ip", "address", "add", f"{address(node)}/24", "dev", INTERFACE]
            ),
            self.inside(node, ["ip", "link", "set", INTERFACE, "up"]),
        )


def sent_bytes(text: str) -> int:
    """Bytes that left a node, from its `/proc/net/dev`."""
    for line in text.splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == INTERFACE:
            return int(counters.split()[8])
    raise ValueError(f"no interface {INTERFACE}")


def receive() -> float:
    """Takes all of one connection; bytes per second."""
    with socket.create_server(("", PORT)) as server:
        connection, _ = server.accept()
        with connection:
            start, count = time.perf_counter(), 0
            while size := len(connection.recv(1 << 20)):
                count += size
            return count / (time.perf_counter() - start)


def send(host: str) -> None:
    """Sends for a while, once somebody listens."""
    deadline = time.monotonic() + CONNECT_SECONDS
    while True:
        try:
            connection = socket.create_connection((host, PORT), timeout=CONNECT_SECONDS)
            break
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
    block, end = bytes(1 << 18), time.perf_counter() + PROBE_SECONDS
    with connection:
        while time.perf_counter() < end:
            connection.sendall(block)


def _unshare() -> list[str]:
    own = ["--net", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
    return ["unshare", *([] if os.geteuid() == 0 else ["--map-root-user"]), *own]


def _run(*commands: Sequence[str]) -> None:
    for command in commands:
        found = subprocess.run(command, capture_output=True, text=True)
        if found.returncode:
            said = _last_line(found.stderr)
            raise SystemExit(f"`{' '.join(command)}` failed: {said}")


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1]


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@contextlib.contextmanager
def _end_on_signals() -> Iterator[None]:
    """Lets SIGTERM and SIGINT unwind the stack.

    A shell without job control starts programs in the background with SIGINT ignored,
    and Python leaves it so.
    """

    def end(number: int, frame: object) -> None:
        sys.exit(128 + number)

    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        print(json.dumps(receive()))
    else:
        send(sys.argv[2])
