"""Blocks of 8-bit integers by any backend's compiler."""

import jax.numpy as jnp
from jax import Array

MOST = 127
"""Of an integer, either way: -128 is not used."""
LEAST_SCALE = 1e-12
"""Of a block of zeros."""


def quantise_blocks(x: Array, block: int) -> tuple[Array, Array]:
    """Rounds each block to whole multiples of its largest magnitude over 127.

    Args:
        x: [N] floats, N a multiple of `block`.
        block: Numbers that share a scale.

    Returns:
        int8[N / block, block], and float32[N / block] scales.
    """
    blocks = x.astype(jnp.float32).reshape(-1, block)
    scales = jnp.maximum(jnp.abs(blocks).max(axis=1) / MOST, LEAST_SCALE)
    return jnp.round(blocks / scales[:, None]).astype(jnp.int8), scales
