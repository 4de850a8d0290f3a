"""Connects CPU processes through Gloo before the first step; explains its timeouts.

The first collective of a device group connects the group. Like a reduce-scatter, it
fails if a process is 30 s late, as compiling the first step can make it. `connect`
therefore runs one collective per group, right after a barrier.
"""

import contextlib
import itertools
import math
import re
from collections.abc import Iterator

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zjax.errors import Problem, ProcessError
from zjax.processes.barrier import barrier

_TIMEOUT = re.compile(
    "Gloo (context init|ReduceScatter).*time(d |-)?out", re.IGNORECASE
)
_connections = itertools.count(1)
"""Indices of calls of `connect`, equal in all processes; they name barriers."""


def connect(mesh: Mesh) -> None:
    """Connects all device groups along the axes of a mesh; a collective call.

    Does nothing in a run of one process, and on devices other than CPUs.
    """
    if jax.process_count() == 1 or mesh.devices.flat[0].platform != "cpu":
        return
    with barrier(f"zjax-connect-{next(_connections)}"):
        pass
    axes = [name for name, size in mesh.shape.items() if size > 1]
    for num_axes in range(1, len(axes) + 1):
        for group_axes in itertools.combinations(axes, num_axes):
            jax.block_until_ready(_sum_over(mesh, group_axes))


def _sum_over(mesh: Mesh, axes: tuple[str, ...]) -> jax.Array:
    size = math.prod(mesh.shape[axis] for axis in axes)
    split = NamedSharding(mesh, PartitionSpec(axes))
    ones = jax.jit(lambda: jax.numpy.ones(size), out_shardings=split)()
    replicated = NamedSharding(mesh, PartitionSpec())
    return jax.jit(jax.numpy.sum, out_shardings=replicated)(ones)


@contextlib.contextmanager
def explain_timeouts() -> Iterator[None]:
    """Turns a Gloo timeout in the enclosed code into an error with a remedy.

    Raises:
        ProcessError: In place of JAX's error, which it quotes.
    """
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
