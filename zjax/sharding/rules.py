"""Model parallelism as one table: which mesh axes shard which logical dim."""

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
    "vocab": (meshes.PIPELINE, meshes.TENSOR),  # stages share embedding and head
    "experts": (meshes.EXPERT,),
    "gates": (),
    "capacity": (),
    "layers": (meshes.PIPELINE,),
    meshes.TENSOR: (meshes.TENSOR,),  # what `mesh.names` maps foreign names to
}
STACKED_DIMS = ("layers",)
"""Dims of stacked layers; ZeRO never shards them, as one device would then hold all of
a layer."""


def spec_for(logical: Logical, path: str, mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """Finds the model-parallel spec of an array from the names of dims.

    Example:
        >>> from zjax.settings import schema
        >>> mesh = meshes.abstract_mesh(schema.Mesh(tensor=2), 8)
        >>> spec_for(("embed", "mlp"), "kernel", mesh)
        P(None, 'tensor')
    """
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
            if axis in meshes.BATCH_AXES and size % shares:
                problem = f"has a dim of {size} for {shares} devices with parts of "
                remedy = f"use a multiple of {shares}, or another mesh.{axis}"
                raise PlanError(Problem(path, shape, f"{problem}their own", remedy))


def entry(axes: tuple[str, ...]) -> str | tuple[str, ...] | None:
    """Formats the mesh axes of one dim, major first, as an entry of a PartitionSpec.

    Example:
        >>> entry(()), entry(("data",)), entry(("tensor", "data"))
        (None, 'data', ('tensor', 'data'))
    """
    return None if not axes else axes[0] if len(axes) == 1 else axes


def axes_of(spec: PartitionSpec, num_dims: int) -> list[tuple[str, ...]]:
    """Lists the mesh axes of each of `num_dims` dims of a spec, the inverse of `entry`.

    Example:
        >>> axes_of(PartitionSpec("data"), 2)
        [('data',), ()]
    """
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
