"""Merge of outputs over shares of the keys."""

import functools
from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array

from zjax_kernels.sparse.mosaic_gpu.arithmetic import per_row


def merge_splits(
    parts: Sequence[tuple[Array, Array]], sinks: Array | None = None
) -> Array:
    """Merges attention over shares of the keys into attention over all keys.

    Args:
        parts: float32[rows, channels] outputs of each share, and float32[rows]
            log-sum-exps of the scores; 0 and -inf for rows that see no key of the
            share.
        sinks: float32[rows] scores of a key without a value, or None.

    Returns:
        float32[rows, channels] outputs; 0 for rows that see no key.
    """
    level = functools.reduce(jnp.maximum, (lse for _, lse in parts))
    # -inf minus -inf is NaN, in rows that have seen no key.
    level = jnp.where(level == -jnp.inf, 0.0, level)
    weights = [jnp.exp(lse - level) for _, lse in parts]
    total = functools.reduce(jnp.add, weights)
    if sinks is not None:
        total += jnp.exp(sinks - level)
    factor = 1.0 / jnp.where(total == 0.0, 1.0, total)
    scaled = [
        out * per_row(weight * factor, out.shape)
        for (out, _), weight in zip(parts, weights, strict=True)
    ]
    return functools.reduce(jnp.add, scaled)
