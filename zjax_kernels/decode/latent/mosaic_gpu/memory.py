"""Shared memory of a program: queries, stages of latents, and weights."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from zjax_kernels.decode.mosaic_gpu.work import STEP, TILE, Sizes
from zjax_kernels.warpgroups import NUM_COMPUTE

_SWIZZLE = 128
"""Bytes of a row of a tile, the widest swizzle."""


class Memory(NamedTuple):
    """Shared memory and barriers of a program.

    Args:
        q: [TILE, D] queries.
        ring: [stages, STEP, D] latents.
        out: [2, TILE, Dv / 2] halves of the outputs, in the place of latents that
            nobody reads any more.
        weights: [TILE, STEP] weights of the keys of a step, in the dtype of `q`.
        factors: float32[TILE] corrections of a step; in the end the sums of weights.
        q_ready: Barrier on which the queries arrive.
        keys_ready: Barriers per stage on which latents arrive.
        keys_free: Barriers per stage on which both warpgroups arrive after a read.
        weights_ready: Barrier on which the warpgroup arrives that computes weights.
        weights_free: Barrier on which the warpgroup arrives that reads weights.
        all_read: Barrier on which both warpgroups arrive after the last read of
            latents.
    """

    q: Any
    ring: Any
    out: Any
    weights: Any
    factors: Any
    q_ready: Any
    keys_ready: Any
    keys_free: Any
    weights_ready: Any
    weights_free: Any
    all_read: Any

    @classmethod
    def allocate(cls, sizes: Sizes, q: Any, out_shape: Any, interpret: Any) -> "Memory":
        """Returns types of shared memory and barriers, to be named by `of`.

        `out_shape` has the dtype of the outputs; the last dim has the channels.
        """
        stages, size = sizes.tuning.stages, q.shape[-1]
        ring = _tiled((stages, STEP, size), q.dtype)
        # Copies read contiguous memory: each half is apart.
        half = TILE, out_shape.shape[-1] // NUM_COMPUTE
        out = _tiled((NUM_COMPUTE, *half), out_shape.dtype)
        if interpret is None:
            ring, out = plgpu.RefUnion(ring, out), None
        return cls(
            q=_tiled((TILE, size), q.dtype),
            ring=ring,
            out=out,
            weights=_tiled((TILE, STEP), q.dtype),
            factors=plgpu.SMEM((TILE,), jnp.float32),
            # A copy for each token.
            q_ready=plgpu.Barrier(num_arrivals=sizes.tile_tokens),
            keys_ready=plgpu.Barrier(num_arrivals=sizes.copies, num_barriers=stages),
            keys_free=plgpu.Barrier(num_arrivals=NUM_COMPUTE, num_barriers=stages),
            weights_ready=plgpu.Barrier(),
            weights_free=plgpu.Barrier(),
            all_read=plgpu.Barrier(num_arrivals=NUM_COMPUTE),
        )

    def of(self, interpret: Any) -> "Memory":
        """Names the views of memory; the interpreter has no views of one memory."""
        if interpret is not None:
            return self
        ring, out = self.ring
        return self._replace(ring=ring, out=out)


def _tiled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Allocates matrices in tiles of 8 swizzled rows."""
    width = _SWIZZLE // jnp.dtype(dtype).itemsize
    tiling = plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(_SWIZZLE)
    return plgpu.SMEM(shape, dtype, transforms=tiling)
