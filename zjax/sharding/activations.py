"""Where activations live: which axes of the mesh in use split tokens, and their pins.

Only axes that are left to the compiler count. Those that a `jax.shard_map` around the
caller has split by hand are done, so that a block of a model runs inside any of them.
"""

import jax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Shaped

from zjax.sharding import mesh as meshes
from zjax.sharding import rules


def open_size(axis: str) -> int:
    """Devices along an axis of the mesh in use that is left to the compiler.

    Args:
        axis: One of the mesh axes.

    Returns:
        Its size; 1 without a mesh, and where it is split by hand.

    Example:
        >>> open_size(meshes.SEQUENCE)
        1
    """
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.shape[axis] if axis in mesh.auto_axes else 1


def row_axes(num_rows: int) -> tuple[str, ...]:
    """The axes that split the rows of a batch: as many as divide them.

    Args:
        num_rows: Size of the first dim.

    Returns:
        Names of axes, major first.

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
    """The number, in its microbatch, of the first of the rows that are here.

    Args:
        num_rows: How many are here: all of them, where no axis is split by hand.

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
    """The axes that split the heads of attention; those of the sequence hold it whole.

    Args:
        num_kv_heads: Heads of keys and values.

    Returns:
        Names of axes, major first, that divide them.

    Example:
        >>> head_axes(8)
        ()
    """
    mesh = jax.sharding.get_abstract_mesh()
    found = tuple(a for a in (meshes.TENSOR, meshes.SEQUENCE) if open_size(a) > 1)
    while found and num_kv_heads % meshes.num_shares(mesh, found):
        found = found[:-1]
    return found


def pin_tokens(x: Shaped[Array, "B L *dims"]) -> Shaped[Array, "B L *dims"]:
    """Keeps tokens where the batch has them: rows and length split, the rest free.

    Args:
        x: Anything per token.

    Returns:
        The same, pinned where the sequence axis has several devices that divide L.

    Example:
        >>> pin_tokens(jax.numpy.ones((2, 4))).shape
        (2, 4)
    """
    if open_size(meshes.SEQUENCE) == 1 or x.shape[1] % open_size(meshes.SEQUENCE):
        return x
    free = (P.UNCONSTRAINED,) * (x.ndim - 2)
    return pin(x, rules.entry(row_axes(x.shape[0])), meshes.SEQUENCE, *free)


def pin_whole(table: Shaped[Array, "V M"]) -> Shaped[Array, "V M"]:
    """Keeps a table whole for tokens that are split along their sequence.

    Args:
        table: In parts perhaps, as ZeRO may store it; these would ask for all tokens.

    Returns:
        The same, pinned where the sequence axis has several devices.

    Example:
        >>> pin_whole(jax.numpy.ones((2, 4))).shape
        (2, 4)
    """
    return table if open_size(meshes.SEQUENCE) == 1 else pin(table, None, None)


def pin(x: Shaped[Array, "*dims"], *entries: object) -> Shaped[Array, "*dims"]:
    """Pins an array, and its gradient, to a place on the mesh in use.

    Args:
        x: Any array, under a mesh.
        entries: As in a PartitionSpec.

    Returns:
        The same array.
    """
    return jax.lax.with_sharding_constraint(x, P(*entries))
