"""The device mesh: six named axes that always exist, slowest link first.

Axes of size 1 cost nothing.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr
from jax.sharding import AbstractMesh, AxisType, Mesh

from zjax.errors import ConfigError, Problem
from zjax.settings import axes, schema
from zjax.typing import Device

PIPELINE, REPLICA, DATA, EXPERT, SEQUENCE, TENSOR = AXES = axes.AXES
BATCH_AXES = axes.BATCH_AXES
"""Axes that shard the batch."""
NESTED_AXES = (*BATCH_AXES, PIPELINE, SEQUENCE, TENSOR)
"""Order of axes in a `Mesh`: nested `shard_map`s make outer axes manual first. Devices
are laid out in the order of `AXES`."""
ZERO_AXES = (DATA, EXPERT, SEQUENCE)
"""Axes over which ZeRO shards state; `replica` holds copies of the shards."""
ALL_ZERO_AXES = (*ZERO_AXES, REPLICA)
"""ZeRO axes under `zero.shard_over_replica`. The shards of a node are adjacent, so that
its devices gather one contiguous shard over `replica`."""

_AUTO = (AxisType.Auto,) * len(AXES)


def mesh_sizes(mesh: schema.Mesh, num_devices: int) -> dict[str, int]:
    """Resolves the axis of size -1 and refuses sizes that do not fill the devices.

    Example:
        >>> mesh_sizes(schema.Mesh(tensor=2), 8)["data"]
        4
    """
    sizes = {axis: getattr(mesh, axis) for axis in AXES}
    known = math.prod(size for size in sizes.values() if size > 0)
    # With 1 the product below differs from the number of devices, and is refused.
    free = num_devices // known if num_devices % known == 0 else 1
    resolved = {axis: free if size == -1 else size for axis, size in sizes.items()}
    if math.prod(resolved.values()) != num_devices:
        raise ConfigError(
            Problem(
                "mesh",
                "x".join(map(str, sizes.values())),
                f"does not fill {num_devices} devices",
                f"choose {', '.join(AXES)} whose product is {num_devices}",
            )
        )
    return resolved


def make_mesh(mesh: schema.Mesh, devices: Sequence[Device] | None = None) -> Mesh:
    """Arranges devices along the six axes.

    Args:
        mesh: Sizes per axis; at most one is -1.
        devices: Devices to use; all devices by default.

    Returns:
        A mesh of axes of type Auto.

    Raises:
        ConfigError: The sizes do not multiply to the number of devices.

    Example:
        >>> make_mesh(schema.Mesh(), jax.devices()[:1]).shape["data"]
        1
    """
    devices = jax.devices() if devices is None else devices
    sizes = mesh_sizes(mesh, len(devices))
    # Links get faster along `AXES`; afterwards only the order of the names changes.
    laid = jax.make_mesh(tuple(sizes.values()), AXES, _AUTO, devices=devices).devices
    nested = laid.transpose([AXES.index(axis) for axis in NESTED_AXES])
    return Mesh(nested, NESTED_AXES, axis_types=_AUTO)


def abstract_mesh(mesh: schema.Mesh, num_devices: int) -> AbstractMesh:
    """Makes a mesh without devices, to plan for other machines.

    Args:
        mesh: Sizes per axis; at most one is -1.
        num_devices: Number of devices to plan for, 1 or more.

    Returns:
        A mesh on which shardings can be computed.

    Raises:
        ConfigError: The sizes do not multiply to the number of devices.

    Example:
        >>> abstract_mesh(schema.Mesh(tensor=8), 1024).shape["data"]
        128
    """
    sizes = mesh_sizes(mesh, num_devices)
    nested = tuple(sizes[axis] for axis in NESTED_AXES)
    return AbstractMesh(nested, NESTED_AXES, axis_types=_AUTO)


def trace(function: Callable[..., Any], *args: Any) -> ClosedJaxpr:
    """Traces a function that may name mesh axes, where no mesh is set yet.

    Example:
        >>> in_parts = jax.sharding.PartitionSpec("data")
        >>> constrain = jax.lax.with_sharding_constraint
        >>> len(trace(lambda x: constrain(x, in_parts), jax.numpy.ones(8)).eqns)
        1
    """
    # First without a mesh, as the function may set one itself.
    try:
        return jax.make_jaxpr(function)(*args)
    except (RuntimeError, ValueError):  # JAX raises either where a mesh is missing
        # With a mesh the error has another cause.
        if not jax.sharding.get_abstract_mesh().empty:
            raise
    with jax.sharding.use_abstract_mesh(abstract_mesh(schema.Mesh(), 1)):
        return jax.make_jaxpr(function)(*args)


def num_shares(mesh: Mesh | AbstractMesh, names: Sequence[str]) -> int:
    """Number of shards of a dim over some mesh axes: the product of the axis sizes.

    Example:
        >>> num_shares(abstract_mesh(schema.Mesh(tensor=2), 8), (DATA, TENSOR))
        8
    """
    return math.prod(mesh.shape[axis] for axis in names)


def device_capacity_bytes(mesh: Mesh | AbstractMesh) -> float:
    """Bytes of memory of the smallest local device of a mesh; infinite if unknown."""
    devices = mesh.local_devices if isinstance(mesh, Mesh) else []
    # CPU devices have no statistics: None.
    stats = [device.memory_stats() or {} for device in devices]
    return float(min((s.get("bytes_limit", math.inf) for s in stats), default=math.inf))


def platform_of(mesh: Mesh | AbstractMesh) -> str:
    """Platform of the devices of a mesh, `cpu` or `gpu`; empty for an abstract mesh.

    Example:
        >>> platform_of(make_mesh(schema.Mesh(), jax.devices("cpu")[:1]))
        'cpu'
    """
    return mesh.devices.flat[0].platform if isinstance(mesh, Mesh) else ""


def is_simulated(mesh: Mesh | AbstractMesh) -> bool:
    """Whether the devices are simulated, so that programs must not run concurrently.

    Simulated devices share few threads: collectives of concurrent programs would
    deadlock.

    Example:
        >>> is_simulated(make_mesh(schema.Mesh(), jax.devices("cpu")[:1]))
        True
    """
    return platform_of(mesh) == "cpu"
