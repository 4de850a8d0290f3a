"""Paged attention in jax.numpy: the specification of the kernel, on any device.

Keys are gathered some pages at a time, up to the last page that a chunk needs.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

_KEYS_PER_STEP = 256


class Cache(NamedTuple):
    """Keys and values of all rows, and where each chunk finds them.

    Args:
        keys: [N, KV, page size, D].
        values: [N, KV, page size, Dv].
        pages: int32[C, P], pages of the row of each chunk.
        starts: int32[C], position of the first token of each chunk.
        counts: int32[C], tokens of each chunk that count.
    """

    keys: Array
    values: Array
    pages: Array
    starts: Array
    counts: Array


@dataclasses.dataclass(frozen=True)
class Options:
    """Numbers of the scores and the values.

    Args:
        scale: Factor of the product of query and key.
        window: Keys that a token sees, its own the last; 0 is all.
        soft_cap: Cap, by `soft_cap * tanh(score / soft_cap)`; 0 is none.
        value_size: Channels of the values that are read, the first.
        early: Whether the kernel starts before the last kernels end.
    """

    scale: float
    window: int
    soft_cap: float
    value_size: int
    early: bool = False


def paged_attention(
    q: Array, cache: Cache, sinks: Array | None, options: Options
) -> Array:
    """Returns the outputs of queries [C, T, H, D], [C, T, H, value size]."""
    chunks, tokens, heads, size = q.shape
    _, num_heads, page_size, _ = cache.keys.shape
    grouped = num_heads, heads // num_heads
    q = q.reshape(chunks, tokens, *grouped, size)
    positions = cache.starts[:, None] + jnp.arange(tokens)[None]
    step = max(1, _KEYS_PER_STEP // page_size)
    padding = -cache.pages.shape[1] % step
    pages = jnp.pad(cache.pages, [(0, 0), (0, padding)])

    def gather(pool, number):
        """Returns the keys or values of some pages, [C, KV, keys, channels]."""
        chosen = lax.dynamic_slice_in_dim(pages, number * step, step, axis=1)
        found = jnp.take(pool, chosen, axis=0, mode="clip").swapaxes(1, 2)
        shape = chunks, num_heads, step * page_size, pool.shape[-1]
        # A cache in float8 is read in the dtype of the queries.
        return found.reshape(shape).astype(q.dtype)

    def update(number, state):
        """Adds some pages to the running softmax."""
        row_max, row_sum, out = state
        key = number * step * page_size + jnp.arange(step * page_size)[None, None]
        after = positions[..., None] - key
        seen = (after >= 0) & (key < (cache.starts + cache.counts)[:, None, None])
        if options.window:
            seen &= after < options.window
        keys = gather(cache.keys, number)
        scores = _contract("ctngd,cnkd->cntgk", q, keys) * options.scale
        if options.soft_cap:
            scores = options.soft_cap * jnp.tanh(scores / options.soft_cap)
        scores = jnp.where(seen[:, None, :, None], scores, -jnp.inf)
        new_max = jnp.maximum(row_max, scores.max(axis=-1))
        # -inf minus -inf is NaN, in tokens that have seen no key yet.
        level = jnp.where(jnp.isneginf(new_max), 0.0, new_max)
        correction = jnp.exp(row_max - level)
        p = jnp.exp(scores - level[..., None])
        row_sum = row_sum * correction + p.sum(axis=-1)
        values = gather(cache.values, number)[..., : options.value_size]
        # 0 times what an old row has left behind the end might be NaN.
        values = jnp.where(seen.any(axis=1)[:, None, :, None], values, 0)
        new = _contract("cntgk,cnkd->cntgd", p, values)
        return new_max, row_sum, out * correction[..., None] + new

    shape = chunks, num_heads, tokens, grouped[1]
    start = _start(sinks, shape, grouped)
    zeros = jnp.zeros((*shape, options.value_size), jnp.float32)
    first, end = _range(cache, options, step * page_size)
    _, row_sum, out = lax.fori_loop(first, end, update, (*start, zeros))
    counted = jnp.arange(tokens)[None] < cache.counts[:, None]
    # Tokens that see no key would divide 0 by 0.
    out /= jnp.where(row_sum == 0, 1.0, row_sum)[..., None]
    out = jnp.where(counted[:, None, :, None, None], out, 0.0).swapaxes(1, 2)
    return out.reshape(chunks, tokens, heads, -1).astype(q.dtype)


def _contract(subscripts, x, y):
    """Multiplies in float32."""
    return jnp.einsum(subscripts, x, y, preferred_element_type=jnp.float32)


def _start(sinks, shape, grouped):
    """Returns maximum and sum of a softmax that has seen no key but the sink."""
    if sinks is None:
        return jnp.full(shape, -jnp.inf, jnp.float32), jnp.zeros(shape, jnp.float32)
    sinks = sinks.astype(jnp.float32).reshape(grouped)[:, None]
    return jnp.broadcast_to(sinks, shape), jnp.ones(shape, jnp.float32)


def _range(cache, options, keys_per_step):
    """Returns the steps of the loop that any chunk needs: the first and the end."""
    needed = jnp.where(cache.counts > 0, cache.starts + cache.counts, 0)
    end = -(-needed.max() // keys_per_step)
    if not options.window:
        return 0, end
    oldest = jnp.where(cache.counts > 0, cache.starts, needed.max())
    first = jnp.maximum(oldest.min() - options.window + 1, 0) // keys_per_step
    return first, end
