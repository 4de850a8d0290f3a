"""Puts the parts of tiles together whose work several programs did."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from zjax_kernels.sparse.schedule import Schedule


def merge_averages(
    out: jax.Array,
    lse: jax.Array,
    parts: Sequence[jax.Array],
    schedule: Schedule,
) -> tuple[jax.Array, jax.Array]:
    """Averages over all keys, from averages over some.

    Args:
        out: [B, S, H, D], without the tiles that were split.
        lse: float32[B, H, S], the same.
        parts: float32[B, H, slots, TILE, D] averages, and float32[B, H, slots, TILE].
        schedule: Which slots make up which tiles.

    Returns:
        `out` and `lse` with all tiles.
    """
    part, part_lse = parts
    slots, tokens = _splits(schedule)
    heads = jnp.arange(len(slots))[:, None, None]
    there = slots >= 0
    sums = jnp.where(there[None, ..., None], part_lse[:, heads, slots], -jnp.inf)
    merged = jax.nn.logsumexp(sums, axis=3)
    level = jnp.where(jnp.isneginf(merged), 0.0, merged)
    weights = jnp.exp(sums - level[:, :, :, None])
    averages = jnp.where(there[None, ..., None, None], part[:, heads, slots], 0.0)
    averages = (averages * weights[..., None]).sum(axis=3)
    out = out.at[:, tokens, heads].set(averages.astype(out.dtype), mode="drop")
    return out, lse.at[:, heads, tokens].set(merged, mode="drop")


def merge_sums(x: jax.Array, part: jax.Array, schedule: Schedule) -> jax.Array:
    """Sums over all columns, from sums over some.

    Args:
        x: [B, S, H, D], without the tiles that were split.
        part: float32[B, H, slots, TILE, D].
        schedule: Which slots make up which tiles.

    Returns:
        `x` with all tiles.
    """
    slots, tokens = _splits(schedule)
    heads = jnp.arange(len(slots))[:, None, None]
    there = (slots >= 0)[None, ..., None, None]
    sums = jnp.where(there, part[:, heads, slots], 0.0).sum(axis=3)
    return x.at[:, tokens, heads].set(sums.astype(x.dtype), mode="drop")


def _splits(schedule):
    """Slots [H, tiles, parts] and tokens [H, tiles, TILE] of tiles that were split."""
    splits = schedule.splits[schedule.head_patterns]
    tiles, slots = splits[..., 0], splits[..., 1:]
    patterns = schedule.head_patterns[:, None]
    units = schedule.rows[patterns, jnp.maximum(tiles, 0)]
    within = jnp.arange(schedule.row_unit).reshape(1, 1, 1, -1)
    tokens = units[..., None] * schedule.row_unit + within
    tokens = tokens.reshape(*tiles.shape, -1)
    return slots, jnp.where(tiles[..., None] >= 0, tokens, schedule.num_rows)
