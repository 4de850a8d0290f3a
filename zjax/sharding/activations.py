"""Sharding of activations on the current mesh, by constraints.

Only axes of type Auto count. Those that an enclosing `jax.shard_map` has made manual
are left alone, so that a block of a model runs inside any of them.
"""

import jax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Shaped

from zjax.sharding import mesh as meshes
from zjax.sharding import rules


def open_size(axis: str) -> int:
    """Size of an Auto axis of the current mesh; 1 if it is manual or there is no mesh.

    Example:
        >>> open_size(meshes.SEQUENCE)
        1
    """
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.shape[axis] if axis in mesh.auto_axes else 1


def row_axes(num_rows: int) -> tuple[str, ...]:
    """The batch axes, major first, that divide a number of rows.

    Example:
        >>> row_axes(8)
        ()
    """
    mesh = jax.sharding.get_abstract_mesh()
    axes: tuple[str, ...] = ()
    for axis in meshes.BATCH_AXES:
        longer = (*axes, axis)
        if axis in mesh.auto_axes and not num_rows % meshes.num_shares(mesh, longer):
            axes = longer
    return axes


def first_row(num_rows: int) -> jax.Array | int:
    """The index in its microbatch of the first local row.

    Args:
        num_rows: Number of local rows; all of them outside of `shard_map`.

    Returns:
        int32[].

    Example:
        >>> first_row(8)
        0
    """
    mesh = jax.sharding.get_abstract_mesh()
    axes = tuple(axis for axis in meshes.BATCH_AXES if axis in mesh.manual_axes)
    return jax.lax.axis_index(axes) * num_rows if axes else 0


def head_axes(num_kv_heads: int) -> tuple[str, ...]:
    """The axes, major first, that shard the heads of attention over whole sequences.

    Args:
        num_kv_heads: Number of heads of keys and values, which the axes divide.

    Returns:
        Names of axes.

    Example:
        >>> head_axes(8)
        ()
    """
    mesh = jax.sharding.get_abstract_mesh()
    axes = tuple(a for a in (meshes.TENSOR, meshes.SEQUENCE) if open_size(a) > 1)
    while axes and num_kv_heads % meshes.num_shares(mesh, axes):
        axes = axes[:-1]
    return axes


def pin_tokens(x: Shaped[Array, "B L *dims"]) -> Shaped[Array, "B L *dims"]:
    """Constrains tokens to be sharded as the batch is, by row and length.

    Args:
        x: Array with one entry per token; other dims are left to the compiler.

    Returns:
        The array, constrained where several devices of the sequence axis divide L.

    Example:
        >>> pin_tokens(jax.numpy.ones((2, 4))).shape
        (2, 4)
    """
    if open_size(meshes.SEQUENCE) == 1 or x.shape[1] % open_size(meshes.SEQUENCE):
        return x
    free = (P.UNCONSTRAINED,) * (x.ndim - 2)
    return pin(x, rules.entry(row_axes(x.shape[0])), meshes.SEQUENCE, *free)


def pin_whole(table: Shaped[Array, "V M"]) -> Shaped[Array, "V M"]:
    """Gathers a table that tokens sharded by sequence look up.

    Args:
        table: Embedding table, which ZeRO may shard; lookups in shards would gather all
            tokens instead.

    Returns:
        The table, replicated where the sequence axis has several devices.

    Example:
        >>> pin_whole(jax.numpy.ones((2, 4))).shape
        (2, 4)
    """
    return table if open_size(meshes.SEQUENCE) == 1 else pin(table, None, None)


def pin(x: Shaped[Array, "*dims"], *entries: object) -> Shaped[Array, "*dims"]:
    """Constrains an array and its gradient to a sharding on the current mesh.

    Args:
        x: Any array, under a mesh.
        entries: Entries of a PartitionSpec.

    Returns:
        The array.
    """
    return jax.lax.with_sharding_constraint(x, P(*entries))
