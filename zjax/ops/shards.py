"""Collectives on arrays of a plan inside `jax.shard_map`.

The axes of a collective follow from where an array is stored and where it is used.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from zjax.ops import packed
from zjax.sharding import mesh
from zjax.sharding.mesh import REPLICA, num_shares
from zjax.sharding.placement import ArrayPlan, pad, unpad


def manual_spec(row: ArrayPlan, axes: Sequence[str]) -> PartitionSpec:
    """Spec of a stored array, restricted to the `axes` that `shard_map` maps."""
    return PartitionSpec(*map(mesh.entry, _dims(row.stored, row, axes)))


def shard_shape(row: ArrayPlan, axes: Sequence[str]) -> tuple[int, ...]:
    """Shape of a stored array on one device, inside `shard_map` over `axes`."""
    return _divided(row.stored_shape, row.stored, row, axes)


def used_shape(row: ArrayPlan, axes: Sequence[str]) -> tuple[int, ...]:
    """Shape of an array where it is used on one device, without padding."""
    return _divided(row.shape, row.used, row, axes)


def splitting_axes(row: ArrayPlan, axes: Sequence[str]) -> list[str]:
    """Axes along which devices use different parts of an array."""
    split = {axis for names in _dims(row.used, row, axes) for axis in names}
    return [axis for axis in axes if axis in split]


def gather(shard: jax.Array, row: ArrayPlan, axes: Sequence[str]) -> jax.Array:
    """All-gathers a stored shard to the array of `used_shape`."""
    local_row = _of_device(row, axes)

    def run(gathered: jax.Array) -> jax.Array:
        for dim, names in enumerate(_gathered(row, axes)):
            if row.codec and REPLICA in names:
                gathered = packed.all_gather_codes(
                    gathered, names, dim, packed.CODECS[row.codec]
                )
            elif names:
                gathered = jax.lax.all_gather(gathered, names, axis=dim, tiled=True)
        return gathered

    return unpad(_by_share(run, local_row, axes)(shard), local_row)


def reduce(x: jax.Array, row: ArrayPlan, axes: Sequence[str]) -> jax.Array:
    """Sums an array over devices, from where it is used to where it is stored.

    Reduce-scatters over the axes that shard only the stored array, and all-reduces over
    the axes that shard neither. Axes that shard the used array need no sum: along such
    axes each device holds another shard.
    """
    local_row = _of_device(row, axes)

    def run(total: jax.Array) -> jax.Array:
        replicating = _replicating(row, axes)
        for dim, names in enumerate(_gathered(row, axes)):
            if row.codec and REPLICA in names:
                total = packed.reduce_scatter_codes(
                    total, names, dim, packed.CODECS[row.codec]
                )
            elif names:
                total = jax.lax.psum_scatter(
                    total, names, scatter_dimension=dim, tiled=True
                )
            # psum_scatter has summed over these axes already.
            replicating = [axis for axis in replicating if axis not in names]
        return jax.lax.psum(total, tuple(replicating)) if replicating else total

    return _by_share(run, local_row, axes)(pad(x, local_row))


def gather_in_node(
    shard: jax.Array, row: ArrayPlan, compute: ArrayPlan, axes: Sequence[str]
) -> jax.Array:
    """Gathers a parameter over the axes that shard only the master weights (hpZ)."""
    if row.stored == compute.stored:
        return shard
    across = dataclasses.replace(compute, stored=row.stored, used=compute.stored)
    return gather(shard, across, axes)


def gather_params(
    shard: jax.Array,
    stored: jax.Array,
    row: ArrayPlan,
    grads: ArrayPlan,
    axes: Sequence[str],
) -> jax.Array:
    """Gathers a parameter with `gather`; the transpose is `reduce`.

    Gradients go to `shard`, whose values are not read; `stored` has the values.
    """

    def forward(_: jax.Array, stored: jax.Array) -> jax.Array:
        return gather(stored, row, axes)

    def backward(_: None, grad: jax.Array) -> tuple[jax.Array, None]:
        return reduce(grad, grads, axes), None

    # The rule does not call `gathered`: policies of `jax.checkpoint` look inside it.
    gathered = jax.custom_vjp(forward)
    gathered.defvjp(lambda *inputs: (forward(*inputs), None), backward)
    return gathered(shard, stored)


def mean_over(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    """Averages floats over devices in float32; other dtypes take the first device's."""
    if not axes:
        return x
    # Counters and random keys have no mean.
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return jax.lax.all_gather(x, tuple(axes))[0]
    return jax.lax.pmean(x.astype(jnp.float32), tuple(axes)).astype(x.dtype)


def broadcast_from(tree: Any, is_source: jax.Array, axes: Sequence[str]) -> Any:
    """Sends the arrays of the one device with `is_source` to all devices."""

    def run(tree: Any, is_source: jax.Array) -> Any:
        # A product with `is_source` would spread NaN of other devices.
        terms = jax.tree.map(lambda x: jnp.where(is_source, x, jnp.zeros_like(x)), tree)
        return jax.lax.psum(terms, tuple(axes))

    totals = _by_hand(run, PartitionSpec(), axes)(tree, is_source)
    return jax.tree.map(lambda total, x: total.astype(x.dtype), totals, tree)


def _by_share(
    run: Callable[[jax.Array], jax.Array], row: ArrayPlan, axes: Sequence[str]
) -> Callable[[jax.Array], jax.Array]:
    """Maps a collective over all further mesh axes that shard a stored array."""
    # Map all further axes, too, or the compiler gathers the array over them first.
    # Leave out dims that `axes` also shard: shards would come in another order.
    others = _others(axes)
    dims = mesh.axes_of(row.spec, len(row.shape))
    split = [dim if set(dim) <= others else () for dim in dims]
    return _by_hand(run, PartitionSpec(*map(mesh.entry, split)), axes)


def _by_hand(
    run: Callable[..., Any], spec: PartitionSpec, axes: Sequence[str]
) -> Callable[..., Any]:
    """Maps all further axes by hand: XLA for CPUs fails on 16-bit sums it splits."""
    others = _others(axes)
    if not others:
        return run
    return jax.shard_map(
        run, in_specs=spec, out_specs=spec, axis_names=others, check_vma=False
    )


def _others(axes: Sequence[str]) -> set[str]:
    """Mesh axes that are left to the compiler."""
    return set(jax.sharding.get_abstract_mesh().auto_axes).difference(axes)


def _of_device(row: ArrayPlan, axes: Sequence[str]) -> ArrayPlan:
    """Plan of the shard that one device uses, as if it were a global array."""
    split = splitting_axes(row, axes)

    def of_device(sharding: NamedSharding) -> NamedSharding:
        dims = mesh.axes_of(sharding.spec, len(row.shape))
        others = (tuple(axis for axis in names if axis not in split) for names in dims)
        return sharding.update(spec=PartitionSpec(*map(mesh.entry, others)))

    shape, stored, used = used_shape(row, axes), of_device(row.stored), row.used
    return dataclasses.replace(row, shape=shape, stored=stored, used=of_device(used))


def _gathered(row: ArrayPlan, axes: Sequence[str]) -> list[tuple[str, ...]]:
    """Axes of each dim over which `shard_map` gathers an array for use."""
    dims = row.gathered_axes
    return [tuple(axis for axis in names if axis in axes) for names in dims]


def _replicating(row: ArrayPlan, axes: Sequence[str]) -> list[str]:
    """Axes along which every device uses an equal part of an array."""
    split = splitting_axes(row, axes)
    return [axis for axis in axes if axis not in split]


def _divided(
    shape: tuple[int, ...],
    sharding: NamedSharding,
    row: ArrayPlan,
    axes: Sequence[str],
) -> tuple[int, ...]:
    """Divides a shape by the shards over the axes that `shard_map` maps."""
    split = zip(shape, _dims(sharding, row, axes), strict=True)
    return tuple(size // num_shares(sharding.mesh, names) for size, names in split)


def _dims(
    sharding: NamedSharding, row: ArrayPlan, axes: Sequence[str]
) -> list[tuple[str, ...]]:
    """Axes of each dim that `shard_map` maps."""
    dims = mesh.axes_of(sharding.spec, len(row.shape))
    return [tuple(axis for axis in names if axis in axes) for names in dims]
