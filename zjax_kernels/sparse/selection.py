"""Plans of blocks that the model selects at run time, made on the device.

A router gives the key blocks of each query block; the kernels visit these alone,
forward and backward.
"""

import jax
import jax.numpy as jnp

from zjax_kernels.errors import invalid, refuse
from zjax_kernels.sparse.arguments import array_problems, integer_problems
from zjax_kernels.sparse.cells import HALF, TILE
from zjax_kernels.sparse.plan import Plan
from zjax_kernels.sparse.schedule import Schedule, assign_round_robin

BLOCK = TILE
"""Tokens per side of a selected block."""
_PER_BLOCK = BLOCK // HALF


def make_selected_plan(
    selected: jax.Array, *, num_kv_heads: int, causal: bool = False
) -> Plan:
    """Plans attention over selected blocks of 128 tokens.

    Call it under `jax.jit`; `jax.vmap` it over the sequences of a batch, together with
    `sparse_attention`. Selections are discrete: no gradient passes through them.

    Args:
        selected: int32[H, n, k]: numbers of key blocks for each head and query block, 0
            to n - 1 in any order; others, such as -1, are ignored, and so are repeats.
        num_kv_heads: Heads of keys and values; divides H.
        causal: Whether a token sees no later one; later blocks are ignored.

    Returns:
        The plan of n * 128 queries and keys, for head sizes up to 128.

    Raises:
        ValueError: `selected` has another shape or dtype, or its heads do not divide.

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
    """Chunks of each query block: full ones, the diagonal one, padding."""
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
        live=jnp.where(on_diagonal.reshape(-1, 1), jnp.array([[0b01, 0b11]]), 0b11),
        diagonal=jnp.where(on_diagonal.reshape(-1, 1), jnp.array([[0b01, 0b10]]), 0),
        column_unit=BLOCK,
        num_columns=num_blocks * BLOCK,
        causal=causal,
        transposed=False,
    )


def _keys(selected, is_live, on_diagonal, num_kv_heads, causal):
    """The same pairs by key block; a pair is two chunks of 64 queries."""
    heads, num_blocks, width = selected.shape
    group = heads // num_kv_heads
    pairs = group * num_blocks * width
    rank = jnp.where(is_live, 2 * selected + on_diagonal, 2 * num_blocks)
    rank = rank.reshape(num_kv_heads, pairs)
    order = jnp.argsort(rank, axis=1, stable=True)
    rank = jnp.take_along_axis(rank, order, axis=1)
    halves = jnp.arange(_PER_BLOCK).reshape(1, 1, -1)
    query = (order // width)[..., None] * _PER_BLOCK + halves
    on_diagonal = (rank % 2 == 1)[..., None, None]
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
    heads, num_blocks = counts.shape
    first = jnp.where(counts > 0, first, len(columns))  # the last chunk is empty
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
        num_slots=0,
        **static,
    )
