"""Merge of the outputs of programs that share the latents of a row."""

import jax.numpy as jnp
from jax import Array

from zjax_kernels.decode.mosaic_gpu.work import Sizes


def merge_splits(out: Array, lse: Array) -> Array:
    """Merges attention over shares of the keys into attention over all keys.

    Args:
        out: float32[S, C, T, H, Dv] outputs of S shares.
        lse: float32[S, C, T, H] log-sum-exps of the scores; -inf without a key.

    Returns:
        float32[C, T, H, Dv] outputs; 0 without any key.
    """
    level = lse.max(axis=0, keepdims=True)
    # -inf minus -inf is NaN.
    weights = jnp.exp(lse - jnp.where(jnp.isneginf(level), 0.0, level))
    total = weights.sum(axis=0, keepdims=True)
    weights /= jnp.where(total == 0.0, 1.0, total)
    return (out * weights[..., None]).sum(axis=0)


def by_head(rows: Array, sizes: Sizes) -> Array:
    """Arranges numbers of the rows of tiles, [S, items, TILE], as [S, C, T, H]."""
    shape = (
        *(rows.shape[0], sizes.chunks, sizes.num_heads),
        *(sizes.tokens // sizes.tile_tokens, sizes.head_tiles),
        *(sizes.tile_tokens, sizes.tile_heads),
    )
    tiles = rows[..., : sizes.rows].reshape(shape)
    tiles = tiles.transpose(0, 1, 3, 5, 2, 4, 6)
    return tiles.reshape(rows.shape[0], sizes.chunks, sizes.tokens, -1)
