"""Plans from traced values: windows, and blocks that are selected on the device."""

import dataclasses

import jax
import jax.numpy as jnp

from zjax_kernels.device import invalid, refuse
from zjax_kernels.sparse.arguments import array_problems, integer_problems
from zjax_kernels.sparse.chunks import HALF, TILE
from zjax_kernels.sparse.plan import Plan, device_plan
from zjax_kernels.sparse.schedule import Schedule, assign_round_robin

_FULL, _PARTIAL, _DEAD, _PADDING = range(4)
"""Kinds of chunks by the tokens that a window leaves, in order within an item."""
_TILE, _FIRST, _COUNT, _NUM_FULL = range(4)
"""Fields of an item."""


def limit_window(plan: Plan, window: jax.Array | int) -> Plan:
    """Limits a causal plan: query i sees no key j with i - j >= `window`.

    Args:
        plan: Plan from `make_plan`, of a causal layout.
        window: int32[], 1 or more: number of keys that a query may see, from the query
            itself backwards. The length of the sequence, or more, changes nothing.

    Returns:
        The plan, in shapes that do not depend on the window.

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
    """Limits one direction of a plan to a window."""
    schedule = jax.tree.map(jnp.asarray, schedule)
    item = _items_of_chunks(schedule)
    distance, cell = _distances(schedule, item, num_queries), schedule.cell
    # Pairs of a cell are up to `cell - 1` tokens nearer or farther than its corner: the
    # nearest decides whether the cell lives, the farthest whether it is full.
    live = schedule.live & _pack(distance * cell - (cell - 1) < window)
    within = _pack(distance * cell + (cell - 1) < window)
    place = jnp.arange(len(item)) - _field(schedule, item, _FIRST)
    was_full = place < _field(schedule, item, _NUM_FULL)
    is_full = was_full & ((schedule.live & ~within) == 0).all(axis=1)
    kind = jnp.where(
        is_full, _FULL, jnp.where((live != 0).any(axis=1), _PARTIAL, _DEAD)
    )
    kind = jnp.where(place < _field(schedule, item, _COUNT), kind, _PADDING)
    # Sorted by item and then by kind: chunks of an item stay consecutive.
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
    """Ends items before the dead chunks; an item without live chunks keeps one.

    `item` and `kind` have an entry per chunk.
    """
    size = items[..., 0].size
    full, partial = (
        jax.ops.segment_sum((kind == each).astype(jnp.int32), item, size)
        for each in (_FULL, _PARTIAL)
    )
    full, partial = (x.reshape(items.shape[:-1]) for x in (full, partial))
    # Kernels run one chunk at least, to store zeros; padding items keep 0.
    count = jnp.minimum(jnp.maximum(full + partial, 1), items[..., _COUNT])
    return items.at[..., _COUNT].set(count).at[..., _NUM_FULL].set(full)


def _firsts(schedule: Schedule) -> jax.Array:
    """Returns the first chunk of each item of all patterns; padding comes last."""
    first, count = schedule.items[..., _FIRST], schedule.items[..., _COUNT]
    return jnp.where(count > 0, first, len(schedule.columns)).reshape(-1)


def _items_of_chunks(schedule: Schedule) -> jax.Array:
    """Returns the item of each chunk, int32[chunks], counted over all patterns."""
    firsts = _firsts(schedule)
    order = jnp.argsort(firsts)
    chunks = jnp.arange(len(schedule.columns))
    nth = jnp.searchsorted(firsts[order], chunks, side="right") - 1
    return order[jnp.maximum(nth, 0)]


def _field(schedule: Schedule, item: jax.Array, field: int) -> jax.Array:
    return schedule.items[..., field].reshape(-1)[item]


def _distances(schedule: Schedule, item: jax.Array, num_queries: int) -> jax.Array:
    """Returns cells from each key back to a query, int32[chunks, 2, rows, columns]."""
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
    """Returns the numbers of the cells of units of `size` cells, [chunks, cells]."""
    within = jnp.arange(size).reshape(1, 1, -1)
    return (units[..., None] * size + within).reshape(len(units), -1)


def _pack(cells: jax.Array) -> jax.Array:
    """Packs bool[chunks, 2, rows, columns] as int32[chunks, 2], one bit per cell."""
    bits = cells.reshape(*cells.shape[:2], -1).astype(jnp.uint32)
    places = jnp.arange(bits.shape[2], dtype=jnp.uint32).reshape(1, 1, -1)
    words = (bits << places).sum(axis=2, dtype=jnp.uint32)
    return jax.lax.bitcast_convert_type(words, jnp.int32)


BLOCK = TILE
"""Tokens per side of a selected block."""
_PER_BLOCK = BLOCK // HALF
"""Cells along a side of a block."""


def make_selected_plan(
    selected: jax.Array, *, num_kv_heads: int, causal: bool = False
) -> Plan:
    """Plans attention over selected blocks of 128 tokens.

    Call it under `jax.jit`; `jax.vmap` it over the sequences of a batch, together with
    `sparse_attention`. Selections are discrete and have no gradient.

    Args:
        selected: int32[H, n, k]: key blocks selected by each head and query block, 0 to
            n - 1 in any order; numbers beyond, such as -1, are ignored, and so are
            repeats.
        num_kv_heads: Heads of keys and values; divides H.
        causal: Whether a token sees no later one; later blocks are ignored.

    Returns:
        The plan of n * 128 queries and keys, for head sizes up to 128.

    Raises:
        ValueError: `selected` has another shape or dtype, or heads that do not divide.

    Example:
        >>> near = jnp.array([[[0, -1], [0, 1], [1, 2]]])
        >>> plan = make_selected_plan(near, num_kv_heads=1, causal=True)
        >>> plan.queries.items[0, :, 2].tolist()
        [2, 2, 1]

    Reference:
        Yuan et al., native sparse attention (arXiv:2502.11089), section 3.3.2; Lu et
        al., mixture of block attention (arXiv:2502.13189).
    """
    _check(selected, num_kv_heads)
    num_blocks = selected.shape[1]
    selected = jnp.sort(jnp.asarray(selected, jnp.int32), axis=2)
    # Sorted, a repeat follows an equal number: it becomes -1, a dead block.
    selected = jnp.where(jnp.diff(selected, axis=2, prepend=-1) == 0, -1, selected)
    rows = jnp.arange(num_blocks)[None, :, None]
    last = rows if causal else num_blocks - 1
    is_live = (selected >= 0) & (selected <= last)
    on_diagonal = is_live & (selected == rows) & causal
    tokens = num_blocks * BLOCK
    return Plan(
        queries=_queries(selected, is_live, on_diagonal, causal),
        keys=_keys(selected, is_live, on_diagonal, num_kv_heads, causal),
        num_queries=tokens,
        num_keys=tokens,
    )


def _check(selected, num_kv_heads):
    """Refuses selections of another shape or dtype, and heads that do not divide."""
    refuse(array_problems("selected", selected, "[H, n, k]"))
    if not jnp.issubdtype(selected.dtype, jnp.integer):
        problem, remedy = "is not an integer dtype", "number the blocks"
        raise invalid("selected.dtype", selected.dtype, problem, remedy)
    if 0 in selected.shape:
        problem, remedy = "has an empty dim", "give one or more of each"
        raise invalid("selected.shape", selected.shape, problem, remedy)
    refuse(integer_problems("num_kv_heads", num_kv_heads, 1))
    heads = selected.shape[0]
    if heads % num_kv_heads:
        problem = f"does not divide the {heads} heads of what is selected"
        raise invalid("num_kv_heads", num_kv_heads, problem, "give a divisor")


def _queries(selected, is_live, on_diagonal, causal):
    """Returns tiles of queries: full chunks, then the diagonal chunk, then padding."""
    heads, num_blocks, width = selected.shape
    order = jnp.argsort(on_diagonal + 2 * ~is_live, axis=2, stable=True)
    selected, on_diagonal = (
        jnp.take_along_axis(x, order, axis=2) for x in (selected, on_diagonal)
    )
    counts = is_live.sum(axis=2)
    first = jnp.arange(heads * num_blocks).reshape(heads, num_blocks) * width
    return _schedule(
        counts,
        counts - on_diagonal.sum(axis=2),
        first,
        columns=jnp.maximum(selected, 0).reshape(-1, 1),
        # On the diagonal, the first half of the rows sees the first 64 keys alone.
        live=jnp.where(on_diagonal.reshape(-1, 1), jnp.array([[0b01, 0b11]]), 0b11),
        diagonal=jnp.where(on_diagonal.reshape(-1, 1), jnp.array([[0b01, 0b10]]), 0),
        column_unit=BLOCK,
        num_columns=num_blocks * BLOCK,
        causal=causal,
        transposed=False,
    )


def _keys(selected, is_live, on_diagonal, num_kv_heads, causal):
    """Returns tiles of keys: a selected pair of blocks is two chunks of 64 queries."""
    heads, num_blocks, width = selected.shape
    group = heads // num_kv_heads
    pairs = group * num_blocks * width
    # Sort key: by key block, full before diagonal pairs, dead pairs last.
    rank = jnp.where(is_live, 2 * selected + on_diagonal, 2 * num_blocks)
    rank = rank.reshape(num_kv_heads, pairs)
    order = jnp.argsort(rank, axis=1, stable=True)
    rank = jnp.take_along_axis(rank, order, axis=1)
    halves = jnp.arange(_PER_BLOCK).reshape(1, 1, -1)
    query = (order // width)[..., None] * _PER_BLOCK + halves
    on_diagonal = (rank % 2 == 1)[..., None, None]
    # Halves of 64 queries and of 64 keys of a block on the diagonal.
    late, early = halves[..., None], halves[..., None, :]
    ranks = jnp.arange(2 * num_blocks + 1)
    edges = jax.vmap(lambda x: jnp.searchsorted(x, ranks))(rank)
    start, diagonal, end = edges[:, :-1:2], edges[:, 1::2], edges[:, 2::2]
    shift = jnp.arange(num_kv_heads)[:, None] * pairs
    return _schedule(
        (end - start) * _PER_BLOCK,
        (diagonal - start) * _PER_BLOCK,
        (start + shift) * _PER_BLOCK,
        columns=query.reshape(-1, 1),
        live=(~on_diagonal | (late >= early)).reshape(-1, 2),
        diagonal=(on_diagonal & (late == early)).reshape(-1, 2),
        column_unit=HALF,
        num_columns=group * num_blocks * BLOCK,
        causal=causal,
        transposed=True,
    )


def _schedule(counts, full, first, *, columns, live, diagonal, **static):
    """Builds one direction of a plan; the longest tiles of a head come first."""
    heads, num_blocks = counts.shape
    # Tiles without blocks run the last chunk, which is empty, to store zeros.
    first = jnp.where(counts > 0, first, len(columns))
    counts = jnp.maximum(counts, 1)
    columns, live, diagonal = (
        jnp.pad(x, ((0, 1), (0, 0))) for x in (columns, live, diagonal)
    )
    tiles = jnp.broadcast_to(jnp.arange(num_blocks), counts.shape)
    items = jnp.stack([tiles, first, counts, full, jnp.full_like(tiles, -1)], axis=2)
    longest = jnp.argsort(-counts, axis=1, stable=True)
    order, ends = assign_round_robin(heads, num_blocks)
    units = jnp.arange(num_blocks * _PER_BLOCK).reshape(1, num_blocks, _PER_BLOCK)
    return Schedule(
        items=jnp.take_along_axis(items, longest[..., None], axis=1).astype(jnp.int32),
        num_items=jnp.array([num_blocks], jnp.int32),
        rows=jnp.broadcast_to(units, (heads, *units.shape[1:])).astype(jnp.int32),
        columns=columns.astype(jnp.int32),
        live=live.astype(jnp.int32),
        diagonal=diagonal.astype(jnp.int32),
        splits=jnp.full((heads, 1, 2), -1, jnp.int32),
        head_patterns=jnp.arange(heads, dtype=jnp.int32),
        order=jnp.asarray(order),
        ends=jnp.asarray(ends),
        elements=None,
        masks=None,
        num_heads=heads,
        row_unit=HALF,
        cell=HALF,
        num_rows=num_blocks * BLOCK,
        # Lengths are traced: no tile is split.
        num_slots=0,
        **static,
    )
