"""Block-wise int8 quantisation in jax.numpy, and the blocks that the kernel takes."""

import jax.numpy as jnp
from jax import Array

BLOCKS_PER_STEP = 64
"""Blocks that a warpgroup quantises at once; the kernel takes a multiple."""
SIZES = (64, 128, 256)
"""Numbers per block that the kernel takes."""
MAX_INTEGER = 127
"""Largest magnitude of a code; -128 is not used."""
MIN_SCALE = 1e-12
"""Smallest scale, so that a block of zeros does not divide 0 by 0."""


def quantise_blocks(x: Array, block: int) -> tuple[Array, Array]:
    """Quantises [N] floats to int8[N / block, block] and float32[N / block] scales."""
    blocks = x.astype(jnp.float32).reshape(-1, block)
    scales = jnp.maximum(jnp.abs(blocks).max(axis=1) / MAX_INTEGER, MIN_SCALE)
    return jnp.round(blocks / scales[:, None]).astype(jnp.int8), scales
