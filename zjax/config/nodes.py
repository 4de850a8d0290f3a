"""Rules of ZeRO over two levels of links: nodes of `mesh.replica` and their devices."""

from collections.abc import Iterator

from zjax.config import axes, schema
from zjax.config.communication import COMPRESSED_OPTIMIZERS
from zjax.errors import Problem


def node_problems(config: schema.Config, num_devices: int) -> Iterator[Problem]:
    """Yields problems of `zero.shard_over_replica` and of the settings of ZeRO++.

    Args:
        config: Settings whose mesh is in range.
        num_devices: Devices of the run.

    Example:
        >>> zero = schema.Zero(stage=3, shard_over_replica=True)
        >>> print(*node_problems(schema.Config(zero=zero), 8))
        zero.shard_over_replica=True has no effect with mesh.replica=1; leave it at \
False, or set mesh.replica to the number of nodes
    """
    zero = config.zero
    if not zero.shard_over_replica:
        return
    field, sizes = "zero.shard_over_replica", axes.axis_sizes(config, num_devices)
    if sizes["replica"] == 1:
        problem = "has no effect with mesh.replica=1"
        remedy = "leave it at False, or set mesh.replica to the number of nodes"
        yield Problem(field, True, problem, remedy)
    for axis in ("pipeline", "expert", "sequence", "tensor"):
        if sizes[axis] > 1:
            problem = f"is not built for mesh.{axis}={sizes[axis]}"
            yield Problem(field, True, problem, f"use False, or mesh.{axis}=1")
    if zero.offloads_state:
        problem = f"is not built for zero.optimizer_memory={zero.optimizer_memory!r}"
        yield Problem(field, True, problem, "use False, or zero.memory='device'")
    yield from _messages(config)
    if zero.secondary_partition and sizes["data"] == 1:
        problem = "stores all parameters on each device of mesh.data=1"
        remedy = "use False, or more devices per node"
        yield Problem("zero.secondary_partition", True, problem, remedy)


def _messages(config: schema.Config) -> Iterator[Problem]:
    """Refuses messages between copies of the model, where there is one in all."""
    codec, name = config.communication.codec, config.optimizer.name
    problem = "needs copies of the model, and zero.shard_over_replica=True keeps one"
    if codec != "none":
        remedy = "use 'none', or zero.shard_over_replica=False"
        yield Problem("communication.codec", codec, problem, remedy)
    if name in COMPRESSED_OPTIMIZERS:
        remedy = "use another optimizer, or zero.shard_over_replica=False"
        yield Problem("optimizer.name", name, problem, remedy)
