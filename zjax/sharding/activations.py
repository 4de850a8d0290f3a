"""Sharding of activations and of batches on the current mesh."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Shaped

from zjax.sharding import mesh as meshes
from zjax.sharding import rules
from zjax.sharding.paths import path_of
from zjax.sharding.plan import Plan
from zjax.typing import Batch, Entries, Entry


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

    Example:
        >>> first_row(8)
        0
    """
    mesh = jax.sharding.get_abstract_mesh()
    axes = tuple(axis for axis in meshes.BATCH_AXES if axis in mesh.manual_axes)
    return jax.lax.axis_index(axes) * num_rows if axes else 0


def head_axes(num_kv_heads: int) -> tuple[str, ...]:
    """The axes, major first, that shard the heads of attention over whole sequences.

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

    Example:
        >>> pin_whole(jax.numpy.ones((2, 4))).shape
        (2, 4)
    """
    return table if open_size(meshes.SEQUENCE) == 1 else pin(table, None, None)


def pin(x: Shaped[Array, "*dims"], *entries: object) -> Shaped[Array, "*dims"]:
    """Constrains an array and its gradient to a sharding on the current mesh."""
    return jax.lax.with_sharding_constraint(x, P(*entries))


def map_rows(
    of_rows: Callable[[Any], Any],
    of_others: Callable[[Any], Any],
    batch: Batch,
    entries: Entries,
) -> Any:
    """Applies one function to arrays of rows and another to replicated arrays.

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
    """Yields path and array of each array of a batch that holds rows."""
    for keys, leaf in jax.tree_util.tree_leaves_with_path(batch):
        path = path_of(keys)
        if len(leaf.shape) and entries.get(path, Entry()).has_rows:
            yield path, leaf


def field_of(path: str, batch: str = "batch") -> str:
    """The name in errors of an array of a batch; its path is empty if it is the batch.

    Example:
        >>> field_of("tokens"), field_of("")
        ('batch/tokens', 'batch')
    """
    return f"{batch}/{path}" if path else batch


def batch_shardings(plan: Plan, batch: Batch, entries: Entries) -> Any:
    """The shardings of a batch."""
    return map_rows(plan.batch_sharding, lambda x: plan.replicated, batch, entries)
