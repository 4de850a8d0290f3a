"""Plans of blocks that a model selects while it runs, made on the device.

A router gives, for each block of queries, the blocks of keys that it should see; the
kernels then visit these and no others, forward and backward.
"""

import jax
import jax.numpy as jnp

from zjax_kernels.errors import invalid, refuse
from zjax_kernels.sparse.arguments import below, no_array
from zjax_kernels.sparse.cells import HALF, TILE
from zjax_kernels.sparse.plan import Plan
from zjax_kernels.sparse.schedule import Schedule, deal_out

BLOCK = TILE
"""Tokens per block and side of what is selected."""
_PER_BLOCK = BLOCK // HALF


def make_selected_plan(
    selected: jax.Array, *, num_kv_heads: int, causal: bool = False
) -> Plan:
    """Plans attention over selected blocks of 128 tokens.

    Under `jax.jit` it is part of the program; `jax.vmap` it over the sequences of a
    batch, together with `sparse_attention`. Blocks are sums of choices: no gradient
    passes through them.

    Args:
        selected: int32[H, n, k]: for each head and block of queries the numbers of
            blocks of keys, 0 to n - 1 in any order; others, such as -1, are none, and
            repeats count once.
        num_kv_heads: Heads of keys and values; divides H.
        causal: Whether a token sees no later one; later blocks are left out.

    Returns:
        The plan of n * 128 queries and keys, for head sizes up to 128.

    Raises:
        ValueError: What is selected is no such array, or its heads do not divide.

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
    there = (selected >= 0) & (selected <= last)
    cut = there & (selected == rows) & causal
    tokens = num_blocks * BLOCK
    return Plan(
        queries=_queries(selected, there, cut, causal),
        keys=_keys(selected, there, cut, num_kv_heads, causal),
        num_queries=tokens,
        num_keys=tokens,
    )


def _check(selected, num_kv_heads):
    refuse(no_array("selected", selected, "[H, n, k]"))
    if not jnp.issubdtype(selected.dtype, jnp.integer):
        problem, remedy = "is not one of integers", "number the blocks"
        raise invalid("selected.dtype", selected.dtype, problem, remedy)
    if 0 in selected.shape:
        problem, remedy = "has no head, block or choice", "give one or more of each"
        raise invalid("selected.shape", selected.shape, problem, remedy)
    refuse(below("num_kv_heads", num_kv_heads, 1))
    heads = selected.shape[0]
    if heads % num_kv_heads:
        problem = f"does not divide the {heads} heads of what is selected"
        raise invalid("num_kv_heads", num_kv_heads, problem, "give a divisor")


def _queries(selected, there, cut, causal):
    """Full blocks first, then the one on the diagonal, then none."""
    heads, num_blocks, width = selected.shape
    order = jnp.argsort(cut + 2 * ~there, axis=2, stable=True)
    selected, cut = (jnp.take_along_axis(x, order, axis=2) for x in (selected, cut))
    counts = there.sum(axis=2)
    first = jnp.arange(heads * num_blocks).reshape(heads, num_blocks) * width
    return _schedule(
        counts,
        counts - cut.sum(axis=2),
        first,
        columns=jnp.maximum(selected, 0).reshape(-1, 1),
        live=jnp.where(cut.reshape(-1, 1), jnp.array([[0b01, 0b11]]), 0b11),
        diagonal=jnp.where(cut.reshape(-1, 1), jnp.array([[0b01, 0b10]]), 0),
        column_unit=BLOCK,
        num_columns=num_blocks * BLOCK,
        causal=causal,
        transposed=False,
    )


def _keys(selected, there, cut, num_kv_heads, causal):
    """The same pairs by block of keys; a pair is two chunks of 64 queries."""
    heads, num_blocks, width = selected.shape
    group = heads // num_kv_heads
    pairs = group * num_blocks * width
    rank = jnp.where(there, 2 * selected + cut, 2 * num_blocks)
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
    first = jnp.where(counts > 0, first, len(columns))  # one more chunk, of nothing
    counts = jnp.maximum(counts, 1)
    columns, live, diagonal = (
        jnp.pad(x, ((0, 1), (0, 0))) for x in (columns, live, diagonal)
    )
    tiles = jnp.broadcast_to(jnp.arange(num_blocks), counts.shape)
    items = jnp.stack([tiles, first, counts, full, jnp.full_like(tiles, -1)], axis=2)
    longest = jnp.argsort(-counts, axis=1, stable=True)
    order, ends = deal_out(heads, num_blocks)
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
