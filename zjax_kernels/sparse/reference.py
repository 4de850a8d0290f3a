"""Block-sparse attention in jax.numpy: the specification of the kernels, on any device.

Memory grows linearly with the length. The schedule is visited item by item, as in the
kernels; heads and sequences are batched.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from zjax_kernels.sparse.chunks import HALF, TILE
from zjax_kernels.sparse.schedule import Schedule


@dataclasses.dataclass(frozen=True)
class Options:
    """Scale and cap of scores.

    Args:
        scale: Factor of the product of q and k, above 0.
        soft_cap: Cap, by `soft_cap * tanh(score / soft_cap)`; 0 is none.
    """

    scale: float
    soft_cap: float = 0.0


class BackwardInputs(NamedTuple):
    """Arrays of the backward pass.

    Args:
        q: [B, S, H, D] queries.
        k: [B, T, K, D] keys; H is a multiple of K.
        v: [B, T, K, D] values.
        d_out: [B, S, H, D] cotangent of the output.
        lse: float32[B, H, S] from `forward`.
        delta: float32[B, H, S], the sum of `d_out` times the output, minus the
            cotangent of `lse`.
        segments: int32[B, S] and int32[B, T], or None.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    d_out: jax.Array
    lse: jax.Array
    delta: jax.Array
    segments: tuple[jax.Array, jax.Array] | None


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: tuple[jax.Array, jax.Array] | None,
    schedule: Schedule,
    options: Options,
) -> tuple[jax.Array, jax.Array]:
    """Returns outputs [B, S, H, D] and log-sum-exps float32[B, H, S].

    H is a multiple of the key heads. A query sees keys of equal segment; a query that
    sees no key gets 0 and -inf.
    """

    def head(q, k, v, segments, pattern):
        def update(rows, columns, get_mask, carry):
            row_max, row_sum, out = carry
            scores = _scores(q[rows], k[columns], options)[0]
            scores = jnp.where(get_mask(), scores, -jnp.inf)
            new_max = jnp.maximum(row_max, scores.max(axis=1))
            # -inf minus -inf is NaN, in rows that have seen no key yet.
            level = jnp.where(jnp.isneginf(new_max), 0.0, new_max)
            correction = jnp.exp(row_max - level)
            p = jnp.exp(scores - level[:, None])
            row_sum = row_sum * correction + p.sum(axis=1)
            return new_max, row_sum, out * correction[:, None] + _dot(p, v[columns])

        length = schedule.num_rows
        zeros = jnp.zeros((length,), jnp.float32)
        start = zeros - jnp.inf, zeros, jnp.zeros((length, q.shape[1]), jnp.float32)
        row_max, row_sum, out = _fold(schedule, pattern, segments, update, start)
        # Queries without keys divide 0 by 1.
        divisor = jnp.where(row_sum == 0, 1.0, row_sum)
        lse = jnp.where(row_sum == 0, -jnp.inf, row_max + jnp.log(divisor))
        return (out / divisor[:, None]).astype(q.dtype), lse

    group = q.shape[2] // k.shape[2]
    # Kernels read a key head for several query heads instead.
    k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    out, lse = _batch_over_heads(head, schedule)(q, k, v, segments)
    return out.swapaxes(1, 2), lse


def backward_queries(
    inputs: BackwardInputs, schedule: Schedule, options: Options
) -> jax.Array:
    """Returns the gradient of the queries, [B, S, H, D]."""

    def head(q, d_out, k, v, lse, delta, segments, pattern):
        def update(rows, columns, get_mask, carry):
            mask, stats = get_mask(), (lse[rows, None], delta[rows, None])
            pairs = (q[rows], k[columns]), (d_out[rows], v[columns])
            _, ds = _d_scores(pairs, stats, mask, options)
            return (carry[0] + _dot(ds, k[columns]),)

        start = (jnp.zeros(q.shape, jnp.float32),)
        # The factor of scores is a factor of the gradient, applied once.
        [dq] = _fold(schedule, pattern, segments, update, start)
        return (dq * options.scale).astype(q.dtype)

    q, k, v, d_out, lse, delta, segments = inputs
    group = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    stats = (x.swapaxes(1, 2) for x in (lse, delta))
    dq = _batch_over_heads(head, schedule)(q, d_out, k, v, *stats, segments)
    return dq.swapaxes(1, 2)


def backward_keys(
    inputs: BackwardInputs, schedule: Schedule, options: Options
) -> tuple[jax.Array, jax.Array]:
    """Returns the gradients of the keys and the values, [B, T, K, D] each.

    `schedule` has tiles of keys.
    """

    def head(k, v, q, d_out, lse, delta, segments, pattern):
        def update(rows, columns, get_mask, carry):
            dk, dv = carry
            mask, stats = get_mask(), (lse[None, columns], delta[None, columns])
            pairs = (k[rows], q[columns]), (v[rows], d_out[columns])
            p, ds = _d_scores(pairs, stats, mask, options)
            return dk + _dot(ds, q[columns]), dv + _dot(p, d_out[columns])

        start = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
        dk, dv = _fold(schedule, pattern, segments, update, start)
        return (dk * options.scale).astype(k.dtype), dv.astype(v.dtype)

    q, k, v, d_out, lse, delta, segments = inputs
    num_kv_heads = k.shape[2]
    q, d_out, lse, delta = (
        _concatenate_group(x, num_kv_heads)
        for x in (q, d_out, lse.swapaxes(1, 2), delta.swapaxes(1, 2))
    )
    if segments is not None:
        group = q.shape[1] // segments[0].shape[1]
        segments = segments[1], jnp.tile(segments[0], (1, group))
    grads = _batch_over_heads(head, schedule)(k, v, q, d_out, lse, delta, segments)
    return tuple(x.swapaxes(1, 2) for x in grads)


def _concatenate_group(x, num_kv_heads):
    """Reshapes [B, S, H, ...] to [B, G * S, K, ...]: queries of a group of heads."""
    batch, length, heads, *rest = x.shape
    x = x.reshape(batch, length, num_kv_heads, heads // num_kv_heads, *rest)
    return jnp.moveaxis(x, 3, 1).reshape(batch, -1, num_kv_heads, *rest)


def _batch_over_heads(head, schedule):
    """Maps `head` over sequences and heads of arrays [B, length, heads, ...]."""

    def run(*arrays_and_segments: Any):
        *arrays, segments = arrays_and_segments
        # One pattern for all heads stays out of the batch: indices are then shared.
        shared = len(schedule.items) == 1
        patterns = 0 if shared else schedule.head_patterns
        axes = [1] * len(arrays)
        heads = jax.vmap(head, in_axes=(*axes, None, None if shared else 0))
        sequences = jax.vmap(heads, in_axes=(*(0 for _ in axes), 0, None))
        return sequences(*arrays, segments, patterns)

    return run


def _fold(schedule, pattern, segments, update, start):
    """Folds `update(rows, columns, get_mask, carry)` over the chunks of a pattern.

    `start` holds arrays of all rows; `update` takes and returns the rows of a tile.
    """

    def item(number, carry):
        tile, first, count = (schedule.items[pattern, number, i] for i in range(3))
        end = first + count
        rows = _tokens(schedule.rows[pattern, tile], schedule.row_unit)

        def chunk(number, carry):
            columns = _tokens(schedule.columns[number], schedule.column_unit)
            mask = functools.partial(_mask, schedule, number, segments, rows, columns)
            return update(rows, columns, mask, carry)

        # Items of a split tile go on where the item before ended.
        tiles = tuple(x[rows] for x in carry)
        results = lax.fori_loop(first, end, chunk, tiles)
        return tuple(x.at[rows].set(y) for x, y in zip(carry, results, strict=True))

    return lax.fori_loop(0, schedule.num_items[0], item, start)


def _tokens(units, size):
    return (units[:, None] * size + jnp.arange(size)[None]).reshape(-1)


def _mask(schedule, chunk, segments, rows, columns):
    """Returns bool[TILE, chunk], the visible pairs of tokens of a chunk."""
    cells_per_row, cells_per_column = (
        schedule.chunk // schedule.cell,
        HALF // schedule.cell,
    )
    bits = jnp.arange(cells_per_row * cells_per_column, dtype=jnp.uint32)

    def unpack(words):
        cells = words.astype(jnp.uint32)[:, None] >> bits[None] & 1
        cells = cells.reshape(TILE // schedule.cell, cells_per_row).astype(bool)
        return cells.repeat(schedule.cell, 0).repeat(schedule.cell, 1)

    mask = unpack(schedule.live[chunk])
    if schedule.causal:
        row, column = rows[:, None] % schedule.cell, columns[None] % schedule.cell
        above = row > column if schedule.transposed else column > row
        mask &= ~(unpack(schedule.diagonal[chunk]) & above)
    if schedule.edges is not None:
        row, column = rows[:, None] % schedule.cell, columns[None] % schedule.cell
        back = column - row if schedule.transposed else row - column
        for number, within in enumerate((back, back + schedule.cell)):
            cells = unpack(schedule.edges[chunk, :, number])
            mask &= ~(cells & (within >= schedule.edge_offset[0]))
    if schedule.masks is not None:
        mask &= _element_mask(schedule, chunk)
    if segments is not None:
        mask &= segments[0][rows, None] == segments[1][None, columns]
    return mask


def _element_mask(schedule, chunk):
    """Returns the token mask of a chunk, bool[TILE, chunk]."""
    words = schedule.masks[schedule.elements[chunk]].swapaxes(1, 2).reshape(TILE, -1)
    bits = words.astype(jnp.uint32)[..., None] >> jnp.arange(
        32, dtype=jnp.uint32
    ).reshape(1, 1, -1)
    return (bits & 1).astype(bool).reshape(TILE, -1)


def _scores(x, y, options):
    """Returns capped scores, and the derivative of the cap."""
    scores = _dot(x, y.T) * options.scale
    if not options.soft_cap:
        return scores, 1.0
    capped = jnp.tanh(scores / options.soft_cap)
    return capped * options.soft_cap, 1 - capped * capped


def _d_scores(pairs, stats, mask, options):
    """Returns the weights and the gradients of the scores."""
    (x, y), (dx, dy) = pairs
    lse, delta = stats
    scores, slope = _scores(x, y, options)
    p = jnp.where(mask, jnp.exp(scores - lse), 0.0)
    return p, p * (_dot(dx, dy.T) - delta) * slope


def _dot(x, y):
    # Rounded to the dtype of the operands, as tensor cores read x.
    return jnp.dot(x.astype(y.dtype), y, preferred_element_type=jnp.float32)
