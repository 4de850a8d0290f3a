"""Merges the partial results of tiles that several programs computed."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from zjax_kernels.sparse.schedule import Schedule


def merge_outputs(
    out: jax.Array,
    lse: jax.Array,
    partial: Sequence[jax.Array],
    schedule: Schedule,
) -> tuple[jax.Array, jax.Array]:
    """Adds split tiles to `out` [B, S, H, D] and `lse` [B, H, S].

    `partial` are outputs over some of the keys, float32[B, H, slots, TILE, D], and
    their log-sum-exps, float32[B, H, slots, TILE].
    """
    partial_out, partial_lse = partial
    slots, tokens = _splits(schedule)
    heads = jnp.arange(len(slots))[:, None, None]
    exists = slots >= 0
    lses = jnp.where(exists[None, ..., None], partial_lse[:, heads, slots], -jnp.inf)
    merged = jax.nn.logsumexp(lses, axis=3)
    level = jnp.where(jnp.isneginf(merged), 0.0, merged)
    weights = jnp.exp(lses - level[:, :, :, None])
    outputs = jnp.where(
        exists[None, ..., None, None], partial_out[:, heads, slots], 0.0
    )
    outputs = (outputs * weights[..., None]).sum(axis=3)
    out = out.at[:, tokens, heads].set(outputs.astype(out.dtype), mode="drop")
    return out, lse.at[:, heads, tokens].set(merged, mode="drop")


def merge_gradients(x: jax.Array, partial: jax.Array, schedule: Schedule) -> jax.Array:
    """Adds split tiles, float32[B, H, slots, TILE, D], to `x` [B, S, H, D]."""
    slots, tokens = _splits(schedule)
    heads = jnp.arange(len(slots))[:, None, None]
    exists = (slots >= 0)[None, ..., None, None]
    sums = jnp.where(exists, partial[:, heads, slots], 0.0).sum(axis=3)
    return x.at[:, tokens, heads].set(sums.astype(x.dtype), mode="drop")


def _splits(schedule):
    """Slots [H, tiles, pieces] and tokens [H, tiles, TILE] of split tiles."""
    splits = schedule.splits[schedule.head_patterns]
    tiles, slots = splits[..., 0], splits[..., 1:]
    patterns = schedule.head_patterns[:, None]
    units = schedule.rows[patterns, jnp.maximum(tiles, 0)]
    within = jnp.arange(schedule.row_unit).reshape(1, 1, 1, -1)
    tokens = units[..., None] * schedule.row_unit + within
    tokens = tokens.reshape(*tiles.shape, -1)
    return slots, jnp.where(tiles[..., None] >= 0, tokens, schedule.num_rows)
