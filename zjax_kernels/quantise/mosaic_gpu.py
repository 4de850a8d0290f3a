"""Kernel of block-wise int8 quantisation on a Hopper GPU: one pass over the numbers."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from zjax_kernels.device import NUM_SMS
from zjax_kernels.quantise.reference import BLOCKS_PER_STEP, MAX_INTEGER, MIN_SCALE
from zjax_kernels.warpgroups import launch, load

_PROGRAMS = 3 * NUM_SMS


def quantise_blocks(
    x: jax.Array, block: int, *, interpret: Any = None
) -> tuple[jax.Array, jax.Array]:
    """Runs `reference.quantise_blocks` for float32[N], N a multiple of 64 blocks.

    `block` is one of `SIZES`; `interpret` holds the interpreter's parameters, None on a
    GPU.
    """
    num_blocks = x.size // block
    tiles = num_blocks // BLOCKS_PER_STEP
    programs = min(tiles, _PROGRAMS)

    def body(inputs, outputs, staged):
        (x_ref,), (integers_ref, scales_ref) = inputs, outputs
        program = lax.axis_index("program")

        def step(i, _):
            rows = pl.ds((program + i * programs) * BLOCKS_PER_STEP, BLOCKS_PER_STEP)
            # Four lanes share a row of this layout: a maximum stays within a warp.
            numbers = load(
                x_ref.at[rows], plgpu.Layout.WGMMA, interpret=interpret, optimized=False
            )
            magnitudes = jnp.max(jnp.abs(numbers), axis=1)
            scales = jnp.maximum(magnitudes / MAX_INTEGER, MIN_SCALE)
            wide = lax.broadcast_in_dim(scales, numbers.shape, (0,))
            # A division, as in the reference: a factor 1 / scale would round
            # differently.
            rounded = lax.round(numbers / wide, lax.RoundingMethod.TO_NEAREST_EVEN)
            # `staged` is free once the copy of the tile before has read it.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            staged[...] = rounded.astype(jnp.int32).astype(jnp.int8)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(staged, integers_ref.at[rows])
            scales_ref[rows] = scales

        num_tiles = lax.div(tiles - 1 - program, programs) + 1
        lax.fori_loop(0, num_tiles, step, None)
        # Shared memory must outlive the last copy.
        plgpu.wait_smem_to_gmem(0)

    integers = jax.ShapeDtypeStruct((num_blocks, block), jnp.int8)
    scales = jax.ShapeDtypeStruct((num_blocks,), jnp.float32)
    return launch(
        body,
        [x.reshape(num_blocks, block)],
        [integers, scales],
        plgpu.SMEM((BLOCKS_PER_STEP, block), jnp.int8),
        num_programs=programs,
        interpret=interpret,
    )
