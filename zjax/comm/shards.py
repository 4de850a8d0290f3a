"""Arrays of a plan inside `jax.shard_map`: all-gathered for use, summed into shards.

Which axes a collective goes over follows from where an array is stored and where it is
used, and from nothing else.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from zjax.sharding import rules
from zjax.sharding.mesh import num_shares
from zjax.sharding.placement import ArrayPlan, pad, unpad


def manual_spec(row: ArrayPlan, axes: Sequence[str]) -> PartitionSpec:
    """The part of where an array is stored that is split by hand.

    Args:
        row: The plan of an array.
        axes: Mesh axes that `shard_map` maps.

    Returns:
        A spec that names no other axes.
    """
    return PartitionSpec(*map(rules.entry, _dims(row.stored, row, axes)))


def shard_shape(row: ArrayPlan, axes: Sequence[str]) -> tuple[int, ...]:
    """The shape of what one device stores of an array.

    Args:
        row: The plan of an array.
        axes: Mesh axes that `shard_map` maps.

    Returns:
        The stored shape, each dim divided by the shares it is cut into by hand.
    """
    return _divided(row.stored_shape, row.stored, row, axes)


def used_shape(row: ArrayPlan, axes: Sequence[str]) -> tuple[int, ...]:
    """The shape of what one device uses of an array.

    Args:
        row: The plan of an array.
        axes: Mesh axes that `shard_map` maps.

    Returns:
        The logical shape, each dim divided by the shares it is used in by hand.
    """
    return _divided(row.shape, row.used, row, axes)


def gather(shard: jax.Array, row: ArrayPlan, axes: Sequence[str]) -> jax.Array:
    """All-gathers an array from where it is stored to where it is used.

    Args:
        shard: This device's part of the stored array.
        row: Its plan.
        axes: Mesh axes that `shard_map` maps.

    Returns:
        What this device uses, without padding, in the dtype of the shard.
    """
    own = _of_device(row, axes)

    def run(gathered: jax.Array) -> jax.Array:
        for dim, names in enumerate(_gathered(row, axes)):
            if names:
                gathered = jax.lax.all_gather(gathered, names, axis=dim, tiled=True)
        return gathered

    return unpad(_by_share(run, own, axes)(shard), own)


def reduce(x: jax.Array, row: ArrayPlan, axes: Sequence[str]) -> jax.Array:
    """Sums what the devices hold, from where an array is used to where it is stored.

    Reduce-scatters over the axes that split the array only where it is stored,
    all-reduces over those that do not split it. Over the axes that split it where it is
    used nothing is added: each device has a part of its own.

    Args:
        x: This device's term, in the shape of what it uses.
        row: The plan of the sum.
        axes: Mesh axes that `shard_map` maps.

    Returns:
        This device's part of the stored sum, in the dtype of `x`.
    """
    own = _of_device(row, axes)

    def run(total: jax.Array) -> jax.Array:
        rest = _replicating(row, axes)
        for dim, names in enumerate(_gathered(row, axes)):
            if names:
                total = jax.lax.psum_scatter(
                    total, names, scatter_dimension=dim, tiled=True
                )
                rest = [axis for axis in rest if axis not in names]
        return jax.lax.psum(total, tuple(rest)) if rest else total

    return _by_share(run, own, axes)(pad(x, own))


def fetch(shard: jax.Array, row: ArrayPlan, axes: Sequence[str]) -> jax.Array:
    """Gathers a parameter; its gradient is reduced to the shard at once.

    Args:
        shard: This device's part of the stored parameter.
        row: Its plan.
        axes: Mesh axes that `shard_map` maps.

    Returns:
        What this device uses of the parameter. The gradient of `shard` is the sum over
        the devices that use the same.
    """

    def forward(shard: jax.Array) -> jax.Array:
        return gather(shard, row, axes)

    def backward(_: None, grad: jax.Array) -> tuple[jax.Array]:
        return (reduce(grad, row, axes),)

    # The rule does not call `fetched`: policies of `jax.checkpoint` look inside it.
    fetched = jax.custom_vjp(forward)
    fetched.defvjp(lambda shard: (forward(shard), None), backward)
    return fetched(shard)


def mean_over(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    """Averages over devices in float32; what is not floating-point stays as it is.

    Args:
        x: This device's value.
        axes: Mesh axes that `shard_map` maps.

    Returns:
        The mean, in the dtype of `x`.
    """
    if not axes or not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return jax.lax.pmean(x.astype(jnp.float32), tuple(axes)).astype(x.dtype)


def from_one(tree: Any, is_from: jax.Array, axes: Sequence[str]) -> Any:
    """Hands what one device has to all.

    Args:
        tree: This device's arrays, of any dtype; they may be NaN.
        is_from: bool[], true on the one.
        axes: Mesh axes that `shard_map` maps.

    Returns:
        The arrays of that device.
    """

    def run(tree: Any, is_from: jax.Array) -> Any:
        terms = jax.tree.map(lambda x: jnp.where(is_from, x, jnp.zeros_like(x)), tree)
        return jax.lax.psum(terms, tuple(axes))

    totals = _by_hand(run, PartitionSpec(), axes)(tree, is_from)
    return jax.tree.map(lambda total, x: total.astype(x.dtype), totals, tree)


def _by_share(
    run: Callable[[jax.Array], jax.Array], row: ArrayPlan, axes: Sequence[str]
) -> Callable[[jax.Array], jax.Array]:
    # A compiler that had the other axes would gather the array over them first. Not in
    # dims that are cut by hand, whose parts would come in another order.
    others = _others(axes)
    dims = rules.axes_of(row.spec, len(row.shape))
    whole = [dim if set(dim) <= others else () for dim in dims]
    return _by_hand(run, PartitionSpec(*map(rules.entry, whole)), axes)


def _by_hand(
    run: Callable[..., Any], spec: PartitionSpec, axes: Sequence[str]
) -> Callable[..., Any]:
    """Maps the other axes too: for CPUs, XLA fails on sums of 16 bits where it cuts."""
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
    """The plan of what one device uses of an array, as if that were all of it."""
    split = {axis for names in _dims(row.used, row, axes) for axis in names}

    def own(sharding: NamedSharding) -> NamedSharding:
        dims = rules.axes_of(sharding.spec, len(row.shape))
        left = (tuple(axis for axis in names if axis not in split) for names in dims)
        return sharding.update(spec=PartitionSpec(*map(rules.entry, left)))

    shape, places = used_shape(row, axes), (own(row.stored), own(row.used))
    return dataclasses.replace(row, shape=shape, stored=places[0], used=places[1])


def _gathered(row: ArrayPlan, axes: Sequence[str]) -> list[tuple[str, ...]]:
    """The axes of each dim that split an array by hand only where it is stored."""
    dims = row.gathered_axes
    return [tuple(axis for axis in names if axis in axes) for names in dims]


def _replicating(row: ArrayPlan, axes: Sequence[str]) -> list[str]:
    """The axes over which every device uses the same of an array."""
    split = {axis for names in _dims(row.used, row, axes) for axis in names}
    return [axis for axis in axes if axis not in split]


def _divided(
    shape: tuple[int, ...],
    sharding: NamedSharding,
    row: ArrayPlan,
    axes: Sequence[str],
) -> tuple[int, ...]:
    split = zip(shape, _dims(sharding, row, axes), strict=True)
    return tuple(size // num_shares(sharding.mesh, names) for size, names in split)


def _dims(
    sharding: NamedSharding, row: ArrayPlan, axes: Sequence[str]
) -> list[tuple[str, ...]]:
    """Those axes that split each dim by hand."""
    dims = rules.axes_of(sharding.spec, len(row.shape))
    return [tuple(axis for axis in names if axis in axes) for names in dims]
