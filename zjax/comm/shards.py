"""Shards of a plan inside `jax.shard_map`: gathered whole, summed back to shards."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from zjax.sharding import rules
from zjax.sharding.mesh import num_shares
from zjax.sharding.placement import ArrayPlan, pad, unpad


def manual_spec(row: ArrayPlan, axes: Sequence[str]) -> PartitionSpec:
    """The part of a placement that is split by hand.

    Args:
        row: The place of an array.
        axes: Mesh axes that `shard_map` maps.

    Returns:
        A spec that names no other axes.
    """
    return PartitionSpec(*map(rules.entry, _split_dims(row, axes)))


def shard_shape(row: ArrayPlan, axes: Sequence[str]) -> tuple[int, ...]:
    """The shape of one device's part of a stored array.

    Args:
        row: The place of an array.
        axes: Mesh axes that `shard_map` maps.

    Returns:
        The stored shape, each dim divided by the shares it is cut into by hand.
    """
    mesh = row.sharding.mesh
    split = zip(row.stored_shape, _split_dims(row, axes), strict=True)
    return tuple(size // num_shares(mesh, names) for size, names in split)


def gather(shard: jax.Array, row: ArrayPlan, axes: Sequence[str]) -> jax.Array:
    """All-gathers an array from its shards.

    Args:
        shard: This device's part of the stored array.
        row: Its place.
        axes: Mesh axes that `shard_map` maps.

    Returns:
        The array in its logical shape, in the dtype of the shard.
    """

    def run(whole: jax.Array) -> jax.Array:
        for dim, names in enumerate(_split_dims(row, axes)):
            if names:
                whole = jax.lax.all_gather(whole, names, axis=dim, tiled=True)
        return whole

    return unpad(_by_share(run, row, axes)(shard), row)


def reduce(x: jax.Array, row: ArrayPlan, axes: Sequence[str]) -> jax.Array:
    """Sums what the devices hold, each keeping its shard of the sum.

    Reduce-scatters over the axes that split the array, all-reduces over the others.

    Args:
        x: This device's term, in the logical shape.
        row: The place of the sum.
        axes: Mesh axes that `shard_map` maps.

    Returns:
        This device's part of the stored sum, in the dtype of `x`.
    """

    def run(total: jax.Array) -> jax.Array:
        rest = list(axes)
        for dim, names in enumerate(_split_dims(row, axes)):
            if names:
                total = jax.lax.psum_scatter(
                    total, names, scatter_dimension=dim, tiled=True
                )
                rest = [axis for axis in rest if axis not in names]
        return jax.lax.psum(total, tuple(rest)) if rest else total

    return _by_share(run, row, axes)(pad(x, row))


def fetch(shard: jax.Array, row: ArrayPlan, axes: Sequence[str]) -> jax.Array:
    """Gathers a parameter; its gradient is reduced to the shard at once.

    Args:
        shard: This device's part of the stored parameter.
        row: Its place.
        axes: Mesh axes that `shard_map` maps.

    Returns:
        The parameter in its logical shape. The gradient of `shard` is the sum over
        devices.
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


def _split_dims(row: ArrayPlan, axes: Sequence[str]) -> list[tuple[str, ...]]:
    dims = rules.axes_of(row.spec, len(row.stored_shape))
    return [tuple(axis for axis in names if axis in axes) for names in dims]
