"""Barriers that raise on all processes, timeouts of Gloo, and lost heartbeats."""

import contextlib
import itertools
import json
import math
import re
from collections.abc import Iterator

import jax
from jax._src import distributed  # JAX has no public access to the coordinator's client
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zjax import errors
from zjax.errors import Problem, ProcessError, ZjaxError, find_errno

_PATTERNS = (
    re.compile(r"Task (\d+) heartbeat timeout"),
    re.compile(r"stopped sending heartbeats\):\s*(\d+)"),
)
_LEADER = re.compile(
    r"Failed to send RPC to coordination service|RPC: /\S+CoordinationService/Heartbeat"
)
"""Matches a failed RPC to process 0, which runs the service that collects
heartbeats."""


def find_unresponsive(text: str) -> int | None:
    """Finds the process that stopped sending heartbeats in a survivor's stderr."""
    matches = [match for pattern in _PATTERNS if (match := pattern.search(text))]
    if matches:
        return int(matches[0][1])
    # Process 0 runs the service, which cannot report the missing heartbeats of process
    # 0.
    return 0 if _LEADER.search(text) else None


_TIMEOUT = re.compile(
    "Gloo (context init|ReduceScatter).*time(d |-)?out", re.IGNORECASE
)
_connections = itertools.count(1)
"""Indices of calls of `connect`, equal in all processes; they name barriers."""


def connect(mesh: Mesh) -> None:
    """Connects all device groups along the axes of a mesh; a collective call.

    The first collective of a group connects it and fails if a process is 30 s late, as
    compiling a step can make it. Nothing happens in a run of one process, or on other
    devices than CPUs.
    """
    if jax.process_count() == 1 or mesh.devices.flat[0].platform != "cpu":
        return
    # The barrier waits up to 10 minutes, Gloo only 30 s.
    with barrier(f"zjax-connect-{next(_connections)}"):
        pass
    axes = [name for name, size in mesh.shape.items() if size > 1]
    for num_axes in range(1, len(axes) + 1):
        for group_axes in itertools.combinations(axes, num_axes):
            jax.block_until_ready(_sum_over(mesh, group_axes))


def _sum_over(mesh: Mesh, axes: tuple[str, ...]) -> jax.Array:
    """Runs a collective over some axes of a mesh."""
    size = math.prod(mesh.shape[axis] for axis in axes)
    split = NamedSharding(mesh, PartitionSpec(axes))
    ones = jax.jit(lambda: jax.numpy.ones(size), out_shardings=split)()
    replicated = NamedSharding(mesh, PartitionSpec())
    return jax.jit(jax.numpy.sum, out_shardings=replicated)(ones)


@contextlib.contextmanager
def explain_timeouts() -> Iterator[None]:
    """Turns a Gloo timeout in the enclosed code into an error with a remedy."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        message, _, _ = str(error).partition(" [type.")
        if not _TIMEOUT.search(message):
            raise
        problem = f"waited 30 s for each other, Gloo's fixed limit on CPUs ({message})"
        remedy = (
            "run one process for the CPUs of a machine, or on one that is less busy, "
            "and run again to resume"
        )
        num_processes = jax.process_count()
        raise ProcessError(
            Problem("processes.num_processes", num_processes, problem, remedy)
        ) from error


_BARRIER_MILLISECONDS = 600_000
_CAUSE_LENGTH = 200


class PeerError(OSError):
    """Another process failed, with a cause of one line and an `errno` (or 0)."""

    def __init__(self, process_id: int, cause: str, number: int):
        super().__init__(number, cause)
        self._text = f"process {process_id}: {cause}"

    def __str__(self) -> str:
        return self._text


@contextlib.contextmanager
def barrier(name: str) -> Iterator[None]:
    """Waits until all processes have done the enclosed work, or one has failed.

    If one fails, all processes raise: a ZjaxError that names the failed process, or a
    PeerError. May be used in any thread; the name must be unique in the run.
    """
    if jax.process_count() == 1:
        yield
        return
    client = distributed.global_state.client
    assert client is not None
    try:
        yield
    except Exception as error:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # must not hide `error`
            # The error is stored before the barrier, so that every peer finds it behind
            # the barrier.
            client.key_value_set(f"{name}/{jax.process_index()}", _to_json(error))
            client.wait_at_barrier(name, _BARRIER_MILLISECONDS)
        raise
    client.wait_at_barrier(name, _BARRIER_MILLISECONDS)
    failures = client.key_value_dir_get(name)
    if failures:
        # The failed process with the lowest number, so that all processes raise equal
        # errors.
        key, text = min(failures, key=lambda pair: _process_of(pair[0]))
        raise _from_json(_process_of(key), text)


def root_of(error: BaseException) -> BaseException:
    """First error of a chain of causes."""
    while error.__cause__ is not None:  # Orbax wraps errors of TensorStore
        error = error.__cause__
    return error


def describe_error(error: BaseException) -> str:
    """Type and first line of an error's root cause, or the text of a `PeerError`."""
    error = root_of(error)
    if isinstance(error, PeerError):
        return str(error)
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first[:_CAUSE_LENGTH]}"


def _to_json(error: Exception) -> str:
    """Encodes an error for peers."""
    problems = error.problems if isinstance(error, ZjaxError) else ()
    record = {
        "cause": describe_error(error),
        "errno": find_errno(error),
        "kind": type(error).__name__,
        "problems": [vars(problem) for problem in problems],
    }
    return json.dumps(record, default=str)  # values may be of any type


def _process_of(key: str) -> int:
    return int(key.rpartition("/")[2])


def _from_json(process_id: int, text: str) -> Exception:
    """Decodes the error of a peer; a ZjaxError keeps the type and the problems."""
    record = json.loads(text)
    peer = PeerError(process_id, record["cause"], record["errno"])
    if not record["problems"]:
        return peer
    named = [
        Problem(**fields | {"field": f"process {process_id}: {fields['field']}"})
        for fields in record["problems"]
    ]
    error = getattr(errors, record["kind"])(*named)
    error.__cause__ = peer
    return error
