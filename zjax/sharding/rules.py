"""Which mesh axis splits which kind of array dim: model parallelism as one table."""

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from zjax.errors import PlanError, Problem
from zjax.sharding import mesh as meshes
from zjax.typing import Logical

RULES: dict[str, tuple[str, ...]] = {
    "batch": meshes.BATCH_AXES,
    "length": (meshes.SEQUENCE,),
    "embed": (),
    "heads": (meshes.TENSOR,),
    "kv_heads": (meshes.TENSOR,),
    "head_dim": (),
    "mlp": (meshes.TENSOR,),
    "vocab": (meshes.PIPELINE, meshes.TENSOR),
    "experts": (meshes.EXPERT,),
    "capacity": (),
    "layers": (meshes.PIPELINE,),
    meshes.TENSOR: (meshes.TENSOR,),
}
STACKED_DIMS = ("layers",)
"""Dims that number whole layers; ZeRO never splits them, or one layer would live on one
device."""


def spec_for(logical: Logical, path: str, mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """Places one array by the names of its dims.

    Args:
        logical: One name of `RULES` or None per dim.
        path: Name of the array, for errors.
        mesh: Supplies the axis sizes; axes of size 1 are left out of the spec.

    Returns:
        The model-parallel placement, one entry per dim.

    Raises:
        PlanError: Two dims claim one mesh axis.

    Example:
        >>> from zjax.config import schema
        >>> mesh = meshes.abstract_mesh(schema.Mesh(tensor=2), 8)
        >>> spec_for(("embed", "mlp"), "kernel", mesh)
        P(None, 'tensor')
    """
    entries, taken = [], set()
    for name in logical:
        axes = RULES[name] if name else ()
        axes = tuple(axis for axis in axes if mesh.shape[axis] > 1)
        if taken & set(axes):
            raise PlanError(
                Problem(
                    path,
                    logical,
                    f"claims the {axes[0]} axis twice",
                    "name one of the two dims None",
                )
            )
        taken |= set(axes)
        entries.append(entry(axes))
    return PartitionSpec(*entries)


def check_parts(
    shape: tuple[int, ...], spec: PartitionSpec, path: str, mesh: Mesh | AbstractMesh
) -> None:
    """Refuses an array of which devices would use parts of unequal size.

    Other dims that do not divide are padded where they are stored; what one device of
    the batch uses alone cannot be.

    Args:
        shape: Logical shape.
        spec: Where the array is used.
        path: Name of the array, for the error.
        mesh: Supplies the axis sizes.

    Raises:
        PlanError: An axis of the batch splits a dim that it does not divide.
    """
    for size, axes in zip(shape, axes_of(spec, len(shape)), strict=True):
        for axis in axes:
            shares = mesh.shape[axis]
            if axis in meshes.BATCH_AXES and size % shares:
                problem = f"has a dim of {size} for {shares} devices with parts of "
                remedy = f"use a multiple of {shares}, or another mesh.{axis}"
                raise PlanError(Problem(path, shape, f"{problem}their own", remedy))


def entry(axes: tuple[str, ...]) -> str | tuple[str, ...] | None:
    """The axes of one dim as a PartitionSpec writes them.

    Args:
        axes: Mesh axes, major first.

    Returns:
        None, the single name, or the tuple.

    Example:
        >>> entry(()), entry(("data",)), entry(("tensor", "data"))
        (None, 'data', ('tensor', 'data'))
    """
    return None if not axes else axes[0] if len(axes) == 1 else axes


def axes_of(spec: PartitionSpec, num_dims: int) -> list[tuple[str, ...]]:
    """The inverse of `entry` for a whole spec, one tuple of axes per dim.

    Args:
        spec: A placement of up to `num_dims` entries.
        num_dims: Dims of the array.

    Returns:
        The axes of each dim.

    Example:
        >>> axes_of(PartitionSpec("data"), 2)
        [('data',), ()]
    """
    entries = [*spec, *[None] * (num_dims - len(spec))]
    return [
        () if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries
    ]


def reduced_spec(
    spec: PartitionSpec, shape: tuple[int, ...], reduced: tuple[int, ...]
) -> PartitionSpec | None:
    """Places what is left of an array after sums or maxima over some of its dims.

    Args:
        spec: Placement of the array.
        shape: Its shape.
        reduced: The same with 1 for those dims, or for none.

    Returns:
        The spec without the axes of those dims; None for any other shape.

    Example:
        >>> reduced_spec(PartitionSpec("data", "tensor"), (8, 6), (1, 6))
        P(None, 'tensor')
    """
    if len(shape) != len(reduced):
        return None
    if any(m not in (n, 1) for n, m in zip(shape, reduced, strict=True)):
        return None
    kept = zip(axes_of(spec, len(shape)), shape, reduced, strict=True)
    return PartitionSpec(*(entry(a) if n == m else None for a, n, m in kept))
