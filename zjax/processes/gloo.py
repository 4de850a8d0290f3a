"""Gloo, by which processes on CPUs communicate, and the limits that nobody can set.

A group of devices is connected by the first collective among them, for which a process
waits 30 s, and so it does in every reduce-scatter; a first step compiles longer than
that where the processes of a run share a busy machine.
"""

import contextlib
import itertools
import math
import re
from collections.abc import Iterator

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zjax.errors import Problem, ProcessError
from zjax.processes.together import together

_LIMIT = re.compile("Gloo (context init|ReduceScatter).*time(d |-)?out", re.IGNORECASE)
_connections = itertools.count(1)
"""Numbers of the calls of `connect`, the same in all processes."""


def connect(mesh: Mesh) -> None:
    """Connects the groups of devices along the axes of a mesh, once all are there.

    Does nothing in a run of one process, and on other devices than CPUs.

    Args:
        mesh: Of the devices of all processes, which all call this.
    """
    if jax.process_count() == 1 or mesh.devices.flat[0].platform != "cpu":
        return
    with together(f"zjax-connect-{next(_connections)}"):
        pass
    axes = [name for name, size in mesh.shape.items() if size > 1]
    for number in range(1, len(axes) + 1):
        for group in itertools.combinations(axes, number):
            jax.block_until_ready(_sum_over(mesh, group))


def _sum_over(mesh: Mesh, axes: tuple[str, ...]) -> jax.Array:
    size = math.prod(mesh.shape[axis] for axis in axes)
    split = NamedSharding(mesh, PartitionSpec(axes))
    ones = jax.jit(lambda: jax.numpy.ones(size), out_shardings=split)()
    whole = NamedSharding(mesh, PartitionSpec())
    return jax.jit(jax.numpy.sum, out_shardings=whole)(ones)


@contextlib.contextmanager
def limits_named() -> Iterator[None]:
    """Says what to do where a process waited for another as long as Gloo lets it.

    Yields:
        Nothing.

    Raises:
        ProcessError: In place of the error of JAX, which it quotes.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        said, _, _ = str(error).partition(" [type.")
        if not _LIMIT.search(said):
            raise
        problem = (
            "waited 30 s for each other, as long as Gloo lets them on CPUs and no "
            f"setting changes ({said})"
        )
        remedy = (
            "run one process for the CPUs of a machine, or on one that is less busy, "
            "and run again to resume"
        )
        number = jax.process_count()
        raise ProcessError(
            Problem("processes.num_processes", number, problem, remedy)
        ) from error
