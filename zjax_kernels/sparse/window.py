"""Plans whose queries see the keys of a window, whose size is known on the device.

The window changes the arrays of a plan and none of its shapes: one program runs all
sizes. Chunks outside of the window go to the end of their item, which is cut before
them, so that the kernels neither load nor multiply them.
"""

import dataclasses

import jax
import jax.numpy as jnp

from zjax_kernels.errors import invalid
from zjax_kernels.sparse.cells import HALF, TILE
from zjax_kernels.sparse.plan import Plan, device_plan
from zjax_kernels.sparse.schedule import Schedule

_FULL, _PARTIAL, _DEAD, _PADDING = range(4)
"""Chunks by how many of their tokens the window leaves, in their order in an item."""
_TILE, _FIRST, _COUNT, _NUM_FULL = range(4)
"""Fields of an item."""


def limit_window(plan: Plan, window: jax.Array | int) -> Plan:
    """Limits a causal plan: query i sees no key j with i - j >= `window`.

    Args:
        plan: Plan from `make_plan`, of a causal layout.
        window: int32[], 1 or more: the query itself and the keys before it that it may
            see. The length of the sequence, or more, changes nothing.

    Returns:
        The plan, whose shapes do not depend on the window.

    Raises:
        ValueError: The plan is of a layout that is not causal.

    Example:
        >>> import numpy as np
        >>> from zjax_kernels.sparse import BlockLayout, make_plan, sparse_attention
        >>> live = np.tri(4, dtype=bool)
        >>> layout = BlockLayout.from_dense(live, block=16, num_heads=1, causal=True)
        >>> plan = make_plan(layout)
        >>> x = jax.random.normal(jax.random.key(0), (1, 64, 1, 8))
        >>> out = jax.jit(
        ...     lambda size: sparse_attention(x, x, x, limit_window(plan, size))
        ... )
        >>> bool((out(1) == x).all())  # each query sees itself
        True

    Reference:
        Zhu et al., SkyLadder (arXiv:2503.15450), for windows that grow in training.
    """
    plan = device_plan(plan)
    if not plan.queries.causal:
        remedy = "use BlockLayout.from_dense(..., causal=True)"
        raise invalid("plan.queries.causal", False, "has no past", remedy)
    window = jnp.asarray(window, jnp.int32)
    length = plan.queries.num_rows
    queries, keys = (
        _limit(schedule, window, length) for schedule in (plan.queries, plan.keys)
    )
    return dataclasses.replace(plan, queries=queries, keys=keys)


def _limit(schedule: Schedule, window: jax.Array, num_queries: int) -> Schedule:
    """Limits one direction of a plan."""
    schedule = jax.tree.map(jnp.asarray, schedule)
    item = _items_of_chunks(schedule)
    distance, cell = _distances(schedule, item, num_queries), schedule.cell
    live = schedule.live & _pack(distance * cell - (cell - 1) < window)
    within = _pack(distance * cell + (cell - 1) < window)
    place = jnp.arange(len(item)) - _field(schedule, item, _FIRST)
    was_full = place < _field(schedule, item, _NUM_FULL)
    is_full = was_full & ((schedule.live & ~within) == 0).all(axis=1)
    kind = jnp.where(
        is_full, _FULL, jnp.where((live != 0).any(axis=1), _PARTIAL, _DEAD)
    )
    kind = jnp.where(place < _field(schedule, item, _COUNT), kind, _PADDING)
    # The chunks of an item are consecutive, and stay in their item.
    order = jnp.argsort(_firsts(schedule)[item] * 4 + kind, stable=True)
    edges = [_pack(distance == window // cell + later) for later in (0, 1)]
    return dataclasses.replace(
        schedule,
        items=_shorten(jnp.asarray(schedule.items), item, kind),
        columns=schedule.columns[order],
        live=live[order],
        diagonal=schedule.diagonal[order],
        elements=None if schedule.elements is None else schedule.elements[order],
        edges=jnp.stack(edges, axis=-1)[order],
        edge_offset=(window % cell)[None],
    )


def _shorten(items: jax.Array, item: jax.Array, kind: jax.Array) -> jax.Array:
    """Items that end before their dead chunks; one chunk is left of those of no other.

    `item` and `kind` are those of each chunk.
    """
    size = items[..., 0].size
    full, partial = (
        jax.ops.segment_sum((kind == each).astype(jnp.int32), item, size)
        for each in (_FULL, _PARTIAL)
    )
    full, partial = (x.reshape(items.shape[:-1]) for x in (full, partial))
    count = jnp.minimum(jnp.maximum(full + partial, 1), items[..., _COUNT])
    return items.at[..., _COUNT].set(count).at[..., _NUM_FULL].set(full)


def _firsts(schedule: Schedule) -> jax.Array:
    """First chunk of each item of all patterns; padding comes after all chunks."""
    first, count = schedule.items[..., _FIRST], schedule.items[..., _COUNT]
    return jnp.where(count > 0, first, len(schedule.columns)).reshape(-1)


def _items_of_chunks(schedule: Schedule) -> jax.Array:
    """int32[chunks]: the item of each chunk, counted over all patterns."""
    firsts = _firsts(schedule)
    order = jnp.argsort(firsts)
    chunks = jnp.arange(len(schedule.columns))
    nth = jnp.searchsorted(firsts[order], chunks, side="right") - 1
    return order[jnp.maximum(nth, 0)]


def _field(schedule: Schedule, item: jax.Array, field: int) -> jax.Array:
    return schedule.items[..., field].reshape(-1)[item]


def _distances(schedule: Schedule, item: jax.Array, num_queries: int) -> jax.Array:
    """int32[chunks, 2, rows, columns]: cells from each key back to its query."""
    cell, num_items = schedule.cell, schedule.items.shape[1]
    tile = jnp.maximum(_field(schedule, item, _TILE), 0)
    units = jnp.asarray(schedule.rows)[item // num_items, tile]
    rows = _cells(units, schedule.row_unit // cell).reshape(
        len(item), TILE // HALF, HALF // cell, 1
    )
    columns = _cells(jnp.asarray(schedule.columns), schedule.column_unit // cell)
    columns = columns[:, None, None]
    if not schedule.transposed:
        return rows - columns
    # The columns are the queries of all heads of a group, one head after another.
    return columns % (num_queries // cell) - rows


def _cells(units: jax.Array, size: int) -> jax.Array:
    """Numbers of the cells of units that have `size` each, [chunks, cells]."""
    within = jnp.arange(size).reshape(1, 1, -1)
    return (units[..., None] * size + within).reshape(len(units), -1)


def _pack(cells: jax.Array) -> jax.Array:
    """bool[chunks, 2, rows, columns] as int32[chunks, 2], one bit per cell."""
    bits = cells.reshape(*cells.shape[:2], -1).astype(jnp.uint32)
    places = jnp.arange(bits.shape[2], dtype=jnp.uint32).reshape(1, 1, -1)
    words = (bits << places).sum(axis=2, dtype=jnp.uint32)
    return jax.lax.bitcast_convert_type(words, jnp.int32)
