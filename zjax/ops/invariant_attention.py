"""Attention whose values for a token depend on the earlier tokens of its text alone.

Keys come in blocks of fixed length from the start of the text, whatever else a row, a
page or a pass has: one query or many, packed texts or a cache, give equal bits.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from zjax.ops import invariant
from zjax.ops.attention import Bounds
from zjax.ops.invariant import fence, product, total
from zjax_kernels import invariant as kernels

BLOCK = 16
"""Keys of a block."""
Fetch = Callable[[Any], tuple[jax.Array, jax.Array]]
"""Function from the number of a block of keys to keys [B, T or 1, BLOCK, KV, D] and
values [B, T or 1, BLOCK, KV, Dv]."""


class Scores(NamedTuple):
    """What becomes of the products of queries and keys.

    Args:
        scale: Factor of the products.
        window: Keys that a token sees, the last its own; 0 is all.
        soft_cap: Bound by tanh; 0 is none.
    """

    scale: float
    window: int = 0
    soft_cap: float = 0.0


def scores_of(bounds: Bounds, head_size: int) -> Scores:
    """Returns what attention of a layer makes of products of heads of a size.

    Example:
        >>> scores_of(Bounds(window=3), 16)
        Scores(scale=0.25, window=3, soft_cap=0.0)
    """
    return Scores(head_size**-0.5, bounds.window, bounds.soft_cap)


def attend(
    q: Float[Array, "B T H D"],
    fetch: Fetch,
    num_blocks: int,
    positions: Int[Array, "B T"],
    scores: Scores,
    sinks: Float[Array, " H"] | None = None,
) -> Float[Array, "B T H Dv"]:
    """Computes softmax(q k) v over the keys up to the position of each query.

    Args:
        q: Queries.
        fetch: Function to a block of keys; what stands behind a text may be anything.
        num_blocks: Blocks of the longest text, 1 or more.
        positions: Position of each query in the text.
        scores: Scale, window and bound.
        sinks: Score of each head without a value, or None.

    Returns:
        Outputs in the dtype of the queries. Blocks that a query does not see change no
        bit.

    Reference:
        Milakov and Gimelshein, Online normalizer calculation for softmax
        (arXiv:1805.02867).
    """
    keys, values = jax.eval_shape(fetch, 0)
    heads = keys.shape[3]
    grouped = q.reshape(*q.shape[:2], heads, -1, q.shape[-1])

    def update(number: Any, state: Any) -> Any:
        largest, norm, out = state
        keys, values = fetch(number)
        key = number * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)
        back = positions[..., None] - key[None, None]
        seen = back >= 0
        if scores.window:
            seen &= back < scores.window
        found = jnp.where(seen[:, :, None, None], _score(grouped, keys, scores), _NONE)
        highest = jnp.maximum(largest, found.max(-1))
        # -inf minus -inf is NaN, in tokens that have seen no key yet.
        level = jnp.where(highest == _NONE, 0.0, highest)
        weights = invariant.exp(found - level[..., None])
        before = invariant.exp(largest - level)
        # 0 times what an old text has left behind the end might be NaN.
        values = jnp.where(seen[..., None, None], values.astype(jnp.float32), 0)
        by_channel = jnp.moveaxis(values, 2, -1)[:, :, :, None]
        new = total(product(weights[..., None, :], by_channel))
        # Rounded as products are: a block that a query does not see changes no bit.
        norm = fence(product(norm, before) + total(weights))
        return highest, norm, fence(product(out, before[..., None]) + new)

    shape = grouped.shape[:-1]
    start = jnp.full(shape, _NONE, jnp.float32), jnp.zeros(shape, jnp.float32)
    if sinks is not None:
        given = sinks.astype(jnp.float32).reshape(1, 1, *shape[2:])
        start = jnp.broadcast_to(given, shape), jnp.ones(shape, jnp.float32)
    zeros = jnp.zeros((*shape, values.shape[-1]), jnp.float32)
    _, norm, out = jax.lax.fori_loop(0, num_blocks, update, (*start, zeros))
    # A token that sees no key would divide 0 by 0.
    out /= jnp.where(norm == 0, 1.0, norm)[..., None]
    return invariant.round_to(out, q.dtype).reshape(*q.shape[:3], -1)


_NONE = -jnp.inf
"""Score of a key that a query does not see."""


def _score(
    q: Float[Array, "B T KV G D"], keys: Float[Array, "B T2 S KV D"], scores: Scores
) -> Float[Array, "B T KV G S"]:
    """Multiplies queries by the keys of a block."""
    by_head = jnp.swapaxes(keys, 2, 3)[:, :, :, None]
    found = total(product(q[..., None, :], by_head))
    return invariant.soft_cap(product(found, scores.scale), scores.soft_cap)


def attend_to_rows(
    plain: Callable[..., jax.Array],
    q: Float[Array, "B L H D"],
    k: Float[Array, "B L KV D"],
    v: Float[Array, "B L KV Dv"],
    positions: Int[Array, "B L"],
    scores: Scores,
    *,
    sinks: Float[Array, " H"] | None = None,
    **masks: Any,
) -> Float[Array, "B L H Dv"]:
    """Attends within the texts of rows, each of which begins where positions are 0.

    `plain(q, k, v, sinks=..., **masks)` is the same attention, for the gradient.
    """
    names, others = [*masks], (*masks.values(), positions)

    def compute_plain(q: Any, k: Any, v: Any, sinks: Any, *others: Any) -> Any:
        given = dict(zip(names, others, strict=False))
        return plain(q, k, v, sinks=sinks, **given)

    def compute(q: Any, k: Any, v: Any, sinks: Any, *others: Any) -> Any:
        fetch, num_blocks = _rows(k, v, others[-1])
        return attend(q, fetch, num_blocks, others[-1], scores, sinks)

    def run_kernel(q: Any, k: Any, v: Any, sinks: Any, *others: Any) -> Any:
        how = {**scores._asdict(), "sinks": sinks}
        return kernels.packed_attention(q, k, v, others[-1], **how)

    has_kernel = kernels.has_attention(q, k, v)
    chosen = run_kernel if has_kernel else compute
    run = invariant.with_gradient_of(compute_plain, chosen)
    return run(q, k, v, sinks, others=others)


def _rows(k: jax.Array, v: jax.Array, positions: jax.Array) -> tuple[Fetch, int]:
    """Returns the blocks of the text of each token of rows, and the most blocks."""
    num_rows, length, *_ = k.shape
    starts = jnp.arange(length, dtype=jnp.int32)[None] - positions
    rows = jnp.arange(num_rows, dtype=jnp.int32)[:, None, None]

    def fetch(number: Any) -> tuple[jax.Array, jax.Array]:
        block = number * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)
        found = jnp.minimum(starts[..., None] + block[None, None], length - 1)
        return k[rows, found], v[rows, found]

    return fetch, -(-length // BLOCK)


def attend_to_pages(
    q: Float[Array, "C T H D"],
    keys: Float[Array, "N KV page D"],
    values: Float[Array, "N KV page Dv"],
    pages: Int[Array, "C P"],
    starts: Int[Array, " C"],
    counts: Int[Array, " C"],
    scores: Scores,
    sinks: Float[Array, " H"] | None = None,
) -> Float[Array, "C T H Dv"]:
    """Attends to the pages of texts, in order.

    Chunks begin at positions `starts` of the texts; `counts` of the T tokens count.
    """
    if kernels.has_attention(q, keys, values):
        how = {**scores._asdict(), "sinks": sinks}
        where = pages, starts, counts
        return kernels.paged_attention(q, keys, values, *where, **how)
    positions = starts[:, None] + jnp.arange(q.shape[1], dtype=jnp.int32)[None]
    page_size, most = keys.shape[2], pages.shape[1] * keys.shape[2]

    def fetch(number: Any) -> tuple[jax.Array, jax.Array]:
        places = number * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)
        places = jnp.minimum(places, most - 1)
        found = pages[:, places // page_size]
        inside = (places % page_size)[None]
        return keys[found, :, inside][:, None], values[found, :, inside][:, None]

    num_blocks = -(-most // BLOCK)
    return attend(q, fetch, num_blocks, positions, scores, sinks)
