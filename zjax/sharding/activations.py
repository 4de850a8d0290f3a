"""Shardings of activations and of batches on the current mesh."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Shaped

from zjax.sharding import mesh as meshes
from zjax.sharding.naming import path_of
from zjax.sharding.plan import Plan
from zjax.typing import Batch, Entries, Entry


def open_size(axis: str) -> int:
    """Size of an Auto axis of the current mesh; 1 if it is manual or without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.shape[axis] if axis in mesh.auto_axes else 1


def row_axes(num_rows: int) -> tuple[str, ...]:
    """Returns the batch axes, major first, that together divide a number of rows."""
    mesh = jax.sharding.get_abstract_mesh()
    axes: tuple[str, ...] = ()
    for axis in meshes.BATCH_AXES:
        longer = (*axes, axis)
        if axis in mesh.auto_axes and not num_rows % meshes.num_shares(mesh, longer):
            axes = longer
    return axes


def first_row(num_rows: int) -> jax.Array | int:
    """Index in the microbatch of the first local row, int32[]; 0 outside shard_map."""
    mesh = jax.sharding.get_abstract_mesh()
    # Inside `shard_map` devices hold rows in the order of these axes.
    axes = tuple(axis for axis in meshes.BATCH_AXES if axis in mesh.manual_axes)
    return jax.lax.axis_index(axes) * num_rows if axes else 0


def head_axes(num_kv_heads: int) -> tuple[str, ...]:
    """Returns the axes, major first, that shard heads while sequences are gathered.

    The product of the axes divides the number of heads of keys and values.
    """
    mesh = jax.sharding.get_abstract_mesh()
    axes = tuple(a for a in (meshes.TENSOR, meshes.SEQUENCE) if open_size(a) > 1)
    # Drops minor axes first: grouped-query attention may have fewer key heads than
    # devices.
    while axes and num_kv_heads % meshes.num_shares(mesh, axes):
        axes = axes[:-1]
    return axes


def pin_tokens(x: Shaped[Array, "B L *dims"]) -> Shaped[Array, "B L *dims"]:
    """Constrains an array with one entry per token to be sharded by row and by length.

    Lengths that the sequence axis does not divide are left to the compiler.
    """
    if open_size(meshes.SEQUENCE) == 1 or x.shape[1] % open_size(meshes.SEQUENCE):
        return x
    # None would replicate features that the tensor axis shards.
    free = (P.UNCONSTRAINED,) * (x.ndim - 2)
    return pin(x, meshes.entry(row_axes(x.shape[0])), meshes.SEQUENCE, *free)


def pin_whole(table: Shaped[Array, "V M"]) -> Shaped[Array, "V M"]:
    """Replicates an embedding table in which tokens sharded by sequence are looked up.

    A lookup in a table that ZeRO shards would gather all tokens instead.
    """
    return table if open_size(meshes.SEQUENCE) == 1 else pin(table, None, None)


def pin(x: Shaped[Array, "*dims"], *entries: object) -> Shaped[Array, "*dims"]:
    """Constrains an array and the cotangent to a sharding on the current mesh."""
    return jax.lax.with_sharding_constraint(x, P(*entries))


def pin_rows(x: Shaped[Array, "*dims"], *entries: object) -> Shaped[Array, "*dims"]:
    """Constrains rows to the batch axes of the mesh in use, as far as the axes divide.

    `entries` are the mesh axes of the next dims. Without a mesh nothing is constrained.

    Example:
        >>> pin_rows(jax.numpy.ones((2, 4))).shape
        (2, 4)
    """
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return pin(x, meshes.entry(row_axes(x.shape[0])), *entries)


def pin_everywhere(x: Shaped[Array, "*dims"]) -> Shaped[Array, "*dims"]:
    """Constrains all devices of the mesh in use, if there is one, to hold all of `x`.

    Example:
        >>> pin_everywhere(jax.numpy.ones((2, 4))).shape
        (2, 4)
    """
    return x if jax.sharding.get_abstract_mesh().empty else pin(x)


def map_rows(
    of_rows: Callable[[Any], Any],
    of_others: Callable[[Any], Any],
    batch: Batch,
    entries: Entries,
) -> Any:
    """Maps `of_rows` over arrays with rows, `of_others` over replicated arrays.

    Example:
        >>> import numpy as np
        >>> entries = {"table": Entry((3,))}
        >>> batch = {"x": np.ones(4), "table": np.ones(3), "scale": np.ones(())}
        >>> map_rows(lambda x: "rows", lambda x: "all", batch, entries)
        {'scale': 'all', 'table': 'all', 'x': 'rows'}
    """

    def one(keys: Any, x: Any) -> Any:
        has_rows = entries.get(path_of(keys), Entry()).has_rows
        return of_rows(x) if has_rows and len(x.shape) else of_others(x)

    return jax.tree_util.tree_map_with_path(one, batch)


def rows_of(batch: Batch, entries: Entries) -> Iterator[tuple[str, Any]]:
    """Yields path and array of each array of a batch whose first dim is the batch."""
    for keys, leaf in jax.tree_util.tree_leaves_with_path(batch):
        path = path_of(keys)
        if len(leaf.shape) and entries.get(path, Entry()).has_rows:
            yield path, leaf


def field_of(path: str, batch: str = "batch") -> str:
    """Name of an array of a batch in errors; `path` is empty if the batch is one array.

    Example:
        >>> field_of("tokens"), field_of("")
        ('batch/tokens', 'batch')
    """
    return f"{batch}/{path}" if path else batch


def batch_shardings(plan: Plan, batch: Batch, entries: Entries) -> Any:
    """Shardings of the arrays of a batch, by the `entries` of the loss."""
    return map_rows(plan.batch_sharding, lambda x: plan.replicated, batch, entries)
