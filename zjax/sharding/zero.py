"""ZeRO as placement: an array kept once per replica group instead of once per device.

The partitioning is that of Rajbhandari et al. (arXiv:1910.02054, section 5). The paper
schedules its gathers and scatters; here an array is only given its place, and the
compiler derives the communication.
"""

import math
from collections.abc import Sequence

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from zjax.sharding import mesh as meshes
from zjax.sharding import rules


def extend_spec(
    shape: tuple[int, ...],
    spec: PartitionSpec,
    mesh: Mesh | AbstractMesh,
    *,
    min_elements: int = 0,
    whole_dims: Sequence[int] = (),
) -> PartitionSpec:
    """Splits one array over the ZeRO axes that still hold copies of it.

    Axes named by `spec` belong to other kinds of parallelism and stay. The others are
    appended, as the minor part, to the dim that leaves the fewest elements on a device.
    Where no dim divides, the array is padded in storage (`stored_shape`).

    Args:
        shape: Global shape.
        spec: Placement by the model-parallel rules.
        mesh: Supplies the axis sizes; no devices are touched.
        min_elements: Arrays with fewer elements, in a layer, stay as they are.
        whole_dims: Dims that must not be split, such as stacked layers.

    Returns:
        The extended spec, or `spec` itself where splitting saves nothing.

    Example:
        >>> from zjax.config import schema
        >>> mesh = meshes.abstract_mesh(schema.Mesh(tensor=2), 8)
        >>> extend_spec((512, 2048), PartitionSpec(None, "tensor"), mesh)
        P('data', 'tensor')

    Reference:
        ZeRO, arXiv:1910.02054, section 5.
    """
    axes = rules.axes_of(spec, len(shape))
    taken = {axis for dim in axes for axis in dim}
    free = tuple(a for a in meshes.ZERO_AXES if a not in taken and mesh.shape[a] > 1)
    layer = (size for dim, size in enumerate(shape) if dim not in whole_dims)
    if not free or math.prod(layer) < min_elements:
        return spec

    def may_be_split(dim: int) -> bool:
        # Padding is at the end of a dim, not of each part that a device uses alone.
        shares = meshes.num_shares(mesh, [*axes[dim], *free])
        is_own = any(axis in meshes.BATCH_AXES for axis in axes[dim])
        return dim not in whole_dims and not (is_own and shape[dim] % shares)

    extended = [
        PartitionSpec(*(rules.entry(a + free * (i == dim)) for i, a in enumerate(axes)))
        for dim in range(len(shape))
        if may_be_split(dim)
    ]

    def cost(candidate: PartitionSpec) -> tuple[int, int, int]:
        stored = stored_shape(shape, candidate, mesh)
        shares = meshes.num_shares(mesh, [*taken, *free])
        # A dim that others split too cannot be gathered in one piece.
        dims = rules.axes_of(candidate, len(shape))
        is_shared = any(set(free) < set(dim) for dim in dims)
        return math.prod(stored) // shares, math.prod(stored), is_shared

    current = math.prod(stored_shape(shape, spec, mesh))
    current //= meshes.num_shares(mesh, list(taken))
    # Of equally good dims the outermost wins: its shards are contiguous in memory.
    best = min(extended, key=cost, default=spec)
    return best if extended and cost(best)[0] < current else spec


def stored_shape(
    shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh | AbstractMesh
) -> tuple[int, ...]:
    """The shape rounded up so that every device holds an equal share.

    Args:
        shape: Global shape.
        spec: Its placement.
        mesh: Supplies the axis sizes.

    Returns:
        Each dim rounded up to a multiple of the shares it is cut into.

    Example:
        >>> from zjax.config import schema
        >>> mesh = meshes.abstract_mesh(schema.Mesh(), 8)
        >>> stored_shape((50257,), PartitionSpec("data"), mesh)
        (50264,)
    """
    shares = [meshes.num_shares(mesh, axes) for axes in rules.axes_of(spec, len(shape))]
    return tuple(-(-n // k) * k for n, k in zip(shape, shares, strict=True))
