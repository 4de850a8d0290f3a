"""ZeRO as sharding: a group of devices stores an array once, not once per device.

The partitioning follows Rajbhandari et al. (arXiv:1910.02054, section 5). The paper
schedules gathers and scatters itself; here the compiler derives them from shardings.
"""

import dataclasses
import math
from collections.abc import Sequence

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from zjax.settings import schema
from zjax.sharding import mesh as meshes


@dataclasses.dataclass(frozen=True)
class Splits:
    """Roles of arrays that a ZeRO stage shards over the ZeRO axes.

    Args:
        state: Whether master weights, optimizer state, and the gradients that enter the
            optimizer are sharded.
    """

    state: bool
    grad_sum: bool
    compute: bool


def splits_of(stage: int) -> Splits:
    """Maps a ZeRO stage, 0 to 3, to sharded roles; nothing else reads the number."""
    return Splits(state=stage >= 1, grad_sum=stage >= 2, compute=stage >= 3)


def zero_axes(settings: schema.Zero) -> tuple[str, ...]:
    """Returns the mesh axes over which ZeRO shards state, major first."""
    return meshes.ALL_ZERO_AXES if settings.replicas else meshes.ZERO_AXES


def extend_spec(
    shape: tuple[int, ...],
    spec: PartitionSpec,
    mesh: Mesh | AbstractMesh,
    *,
    axes: Sequence[str] = meshes.ZERO_AXES,
    min_elements: int = 0,
    stacked_dims: Sequence[int] = (),
) -> PartitionSpec:
    """Shards an array over the ZeRO axes that still hold copies of the array.

    Axes in `spec` stay. The free ZeRO axes are appended, as minor axes, to the dim that
    leaves the fewest elements on a device; if they do not divide the dim, the array is
    stored padded (`stored_shape`). Arrays of fewer than `min_elements` per layer, and
    arrays that sharding would not shrink, keep `spec`.

    Reference:
        ZeRO, arXiv:1910.02054, section 5.
    """
    used = meshes.axes_of(spec, len(shape))
    spec_axes = {axis for dim in used for axis in dim}
    free = tuple(a for a in axes if a not in spec_axes and mesh.shape[a] > 1)
    # Stacks are gathered layer by layer, so one layer decides.
    layer = (size for dim, size in enumerate(shape) if dim not in stacked_dims)
    if not free or math.prod(layer) < min_elements:
        return spec

    def may_be_split(dim: int) -> bool:
        # Refuse to pad a dim of experts: padding goes to its end, and would move the
        # bounds between the experts of two devices.
        shares = meshes.num_shares(mesh, [*used[dim], *free])
        is_expert = any(axis in meshes.BATCH_AXES for axis in used[dim])
        return dim not in stacked_dims and not (is_expert and shape[dim] % shares)

    extended = [
        PartitionSpec(
            *(meshes.entry(a + free * (i == dim)) for i, a in enumerate(used))
        )
        for dim in range(len(shape))
        if may_be_split(dim)
    ]

    def cost(candidate: PartitionSpec) -> tuple[int, int, int]:
        stored = stored_shape(shape, candidate, mesh)
        shares = meshes.num_shares(mesh, [*spec_axes, *free])
        # Prefer a dim that no axis of `spec` shards: its gathered shard is contiguous.
        dims = meshes.axes_of(candidate, len(shape))
        has_other_axes = any(set(free) < set(dim) for dim in dims)
        return math.prod(stored) // shares, math.prod(stored), has_other_axes

    current = math.prod(stored_shape(shape, spec, mesh))
    current //= meshes.num_shares(mesh, list(spec_axes))
    # Of equal costs take the outermost dim: its shards are contiguous in memory.
    best = min(extended, key=cost, default=spec)
    return best if extended and cost(best)[0] < current else spec


def stored_shape(
    shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh | AbstractMesh
) -> tuple[int, ...]:
    """Pads a global shape to shards of equal size."""
    shares = [
        meshes.num_shares(mesh, axes) for axes in meshes.axes_of(spec, len(shape))
    ]
    return tuple(-(-n // k) * k for n, k in zip(shape, shares, strict=True))
