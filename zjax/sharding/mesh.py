"""The device mesh: six named axes, and the axes that shard each logical dim."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from zjax.errors import ConfigError, PlanError, Problem
from zjax.settings import axes as axis_names
from zjax.settings import schema
from zjax.typing import Device, Logical

PIPELINE, REPLICA, DATA, EXPERT, SEQUENCE, TENSOR = AXES = axis_names.AXES
BATCH_AXES = axis_names.BATCH_AXES
NESTED_AXES = (*BATCH_AXES, PIPELINE, SEQUENCE, TENSOR)
"""Order of axes in a `Mesh`: nested `shard_map`s make outer axes manual first. Devices
are laid out in the order of `AXES`."""
ZERO_AXES = (DATA, EXPERT, SEQUENCE)
"""Axes over which ZeRO shards state; `replica` holds copies of the shards."""
ALL_ZERO_AXES = (*ZERO_AXES, REPLICA)
"""ZeRO axes under `zero.replicas`. The shards of a node are adjacent, so that
its devices gather one contiguous shard over `replica`."""

_AUTO = (AxisType.Auto,) * len(AXES)


def mesh_sizes(mesh: schema.Mesh, num_devices: int) -> dict[str, int]:
    """Resolves the axis of size -1 and refuses sizes that do not fill the devices."""
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
    """Traces a function that may name mesh axes, where no mesh is set yet."""
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
    """Number of shards of a dim over some mesh axes: the product of the axis sizes."""
    return math.prod(mesh.shape[axis] for axis in names)


def device_capacity_bytes(mesh: Mesh | AbstractMesh) -> float:
    """Bytes of memory of the smallest local device of a mesh; infinite if unknown."""
    devices = mesh.local_devices if isinstance(mesh, Mesh) else []
    # CPU devices have no statistics: None.
    stats = [device.memory_stats() or {} for device in devices]
    return float(min((s.get("bytes_limit", math.inf) for s in stats), default=math.inf))


def platform_of(mesh: Mesh | AbstractMesh) -> str:
    """Platform of the devices of a mesh, `cpu` or `gpu`; empty for an abstract mesh."""
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


RULES: dict[str, tuple[str, ...]] = {
    "batch": BATCH_AXES,
    "length": (SEQUENCE,),
    "embed": (),
    "heads": (TENSOR,),
    "kv_heads": (TENSOR,),
    "head_dim": (),
    "mlp": (TENSOR,),
    "vocab": (PIPELINE, TENSOR),  # stages share embedding and head
    "experts": (EXPERT,),
    "gates": (),
    "capacity": (),
    "layers": (PIPELINE,),
    TENSOR: (TENSOR,),  # what `mesh.names` maps foreign names to
}
STACKED_DIMS = ("layers",)
"""Dims of stacked layers; ZeRO never shards them, as one device would then hold all of
a layer."""


def spec_for(logical: Logical, path: str, mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """Finds the model-parallel spec of an array from the names of dims."""
    entries, used_axes = [], set()
    for name in logical:
        axes = RULES[name] if name else ()
        axes = tuple(axis for axis in axes if mesh.shape[axis] > 1)
        if used_axes & set(axes):
            raise PlanError(
                Problem(
                    path,
                    logical,
                    f"claims the {axes[0]} axis twice",
                    "name one of the two dims None",
                )
            )
        used_axes |= set(axes)
        entries.append(entry(axes))
    return PartitionSpec(*entries)


def check_parts(
    shape: tuple[int, ...], spec: PartitionSpec, path: str, mesh: Mesh | AbstractMesh
) -> None:
    """Refuses an array that a batch axis would shard unevenly where it is used.

    Uneven dims are padded in storage and gathered for use; experts, which each device
    uses as a local shard, are not gathered.
    """
    for size, axes in zip(shape, axes_of(spec, len(shape)), strict=True):
        for axis in axes:
            shares = mesh.shape[axis]
            if axis in BATCH_AXES and size % shares:
                problem = f"has a dim of {size} for {shares} devices with parts of "
                remedy = f"use a multiple of {shares}, or another mesh.{axis}"
                raise PlanError(Problem(path, shape, f"{problem}their own", remedy))


def entry(axes: tuple[str, ...]) -> str | tuple[str, ...] | None:
    """Formats the mesh axes of one dim, major first, as an entry of a PartitionSpec."""
    return None if not axes else axes[0] if len(axes) == 1 else axes


def axes_of(spec: PartitionSpec, num_dims: int) -> list[tuple[str, ...]]:
    """Lists the mesh axes of each of `num_dims` dims of a spec; inverts `entry`."""
    # Specs may be shorter than the rank.
    entries = [*spec, *[None] * (num_dims - len(spec))]
    return [
        () if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries
    ]


def reduced_spec(
    spec: PartitionSpec, shape: tuple[int, ...], reduced: tuple[int, ...]
) -> PartitionSpec | None:
    """Finds the spec of an array reduced to dims of size 1; None for other shapes.

    Example:
        >>> reduced_spec(PartitionSpec("data", "tensor"), (8, 6), (1, 6))
        P(None, 'tensor')
    """
    if len(shape) != len(reduced):
        return None
    if any(m not in (n, 1) for n, m in zip(shape, reduced, strict=True)):
        return None
    dims = zip(axes_of(spec, len(shape)), shape, reduced, strict=True)
    return PartitionSpec(*(entry(a) if n == m else None for a, n, m in dims))
