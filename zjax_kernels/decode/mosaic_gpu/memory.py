"""Shared memory of a program, and views of the rows of a tile."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from zjax_kernels.decode.mosaic_gpu.work import NUMBERS, STEP, TILE, Sizes
from zjax_kernels.warpgroups import CLUSTER

CHUNK = 64
"""Channels of 128 bytes, the width of the swizzle."""


class Rows(NamedTuple):
    """Two views of the rows of a tile in shared memory, some channels of each.

    Args:
        tiled: [TILE, channels], as tensor cores and registers address memory.
        boxed: [tokens, heads, channels], as rows are copied from global memory and to
            it. Behind them, rows hold what nobody stores. None in the interpreter,
            which has one order of memory.
    """

    tiled: Any
    boxed: Any

    @classmethod
    def types(cls, sizes: Sizes, channels: int, dtype: Any) -> "Rows":
        """Returns the types of the views."""
        # Rows of 16 bytes have no swizzle.
        swizzle = (plgpu.SwizzleTransform(2 * channels),) if channels > 8 else ()
        tiles = (plgpu.TilingTransform((8, channels)), *swizzle) if swizzle else ()
        box = sizes.tile_tokens, sizes.tile_heads, channels
        return cls(
            plgpu.SMEM((TILE, channels), dtype, transforms=tiles),
            plgpu.SMEM(box, dtype, transforms=swizzle),
        )


class Memory(NamedTuple):
    """Shared memory and barriers of a program.

    Args:
        q: Queries, `Rows` of each 64 channels.
        out: Merged outputs in the place of queries, `Rows` of some channels each.
        keys: [stages, STEP, D] keys, in the dtype of the pages.
        shared: float32[rows, D / splits] channels of the outputs of all programs of a
            cluster, in the place of keys that nobody reads any more. Programs have
            `Sizes.shared_rows` each, and rows behind the last complete its tile. None
            without splits.
        levels: float32[rows, NUMBERS] log-sum-exps of these rows.
        values: [stages, STEP, D] values, in the dtype of the pages.
        wide: [STEP, D] keys of a step, and values, in the dtype of the queries; None
            twice where pages have it.
        found: float32[TILE, D + NUMBERS] outputs of the program and log-sum-exps, in
            the place of values, or of `wide`; None without splits.
        q_ready: Barrier on which the queries arrive.
        keys_ready: Barriers per stage on which keys arrive.
        values_ready: Barriers per stage on which values arrive.
        all_shared: Barrier on which all programs have stored what they found.
        shared_ready: Barrier on which `shared` arrives.
    """

    q: Any
    out: Any
    keys: Any
    shared: Any
    levels: Any
    values: Any
    wide: Any
    found: Any
    q_ready: Any
    keys_ready: Any
    values_ready: Any
    all_shared: Any
    shared_ready: Any

    @classmethod
    def allocate(
        cls, sizes: Sizes, q: Any, page_dtype: Any, interpret: Any
    ) -> "Memory":
        """Returns types of shared memory and barriers, to be named by `of`."""
        size, stages, splits = q.shape[-1], sizes.tuning.stages, sizes.splits
        ring = _tiled((stages, STEP, size), page_dtype)
        is_narrow = page_dtype != q.dtype
        wide: Any = [_tiled((STEP, size), q.dtype) if is_narrow else None] * 2
        num_chunks, width = size // CHUNK, size // splits
        rows: list[Any] = [Rows.types(sizes, CHUNK, q.dtype)] * num_chunks
        num_boxes, keys, values = 1, ring, ring
        if interpret is not None:
            num_boxes = sizes.tile_tokens  # a copy for each token
            rows = [plgpu.SMEM((TILE, CHUNK), q.dtype)] * num_chunks
        elif width < CHUNK:
            first = plgpu.RefUnion(*rows[0], *Rows.types(sizes, width, q.dtype))
            rows = [first, *(plgpu.RefUnion(*each) for each in rows[1:])]
        else:
            rows = [plgpu.RefUnion(*each) for each in rows]
        if splits > 1:
            num_rows = (splits - 1) * sizes.shared_rows + TILE
            shared, levels = _sums((num_rows, width)), _sums((num_rows, NUMBERS))
            keys = plgpu.RefUnion(ring, [shared, levels])
            found = _sums((TILE, size + NUMBERS))
            if is_narrow:
                wide = plgpu.RefUnion(wide, found)
            else:
                values = plgpu.RefUnion(ring, found)
        barrier = plgpu.Barrier(num_arrivals=sizes.copies, num_barriers=stages)
        all_shared = plgpu.ClusterBarrier(collective_axes=(CLUSTER,))
        return cls(
            q=rows,
            out=None,
            keys=keys,
            shared=None,
            levels=None,
            values=values,
            wide=wide,
            found=None,
            q_ready=plgpu.Barrier(num_arrivals=num_chunks * num_boxes),
            keys_ready=barrier,
            values_ready=barrier,
            all_shared=all_shared if splits > 1 else None,
            # Channels, and log-sum-exps.
            shared_ready=plgpu.Barrier(num_arrivals=2) if splits > 1 else None,
        )

    def of(self, sizes: Sizes, interpret: Any) -> "Memory":
        """Names the views of memory."""
        if interpret is not None:
            q = [Rows(ref, None) for ref in self.q]
            return self._replace(q=q, out=q)
        q = [Rows(*views[:2]) for views in map(tuple, self.q)]
        if sizes.splits == 1:
            return self._replace(q=q, out=q)
        keys, [shared, levels] = self.keys
        if isinstance(self.wide, list):
            (values, found), wide = self.values, self.wide
        else:
            values, (wide, found) = self.values, self.wide
        width = values.shape[-1] // sizes.splits
        first = tuple(self.q[0])
        out = [Rows(*first[2:])] if width < CHUNK else q[: width // CHUNK]
        merging = {"shared": shared, "levels": levels, "wide": wide, "found": found}
        return self._replace(q=q, out=out, keys=keys, values=values, **merging)


def _sums(shape: tuple[int, int]) -> Any:
    """Allocates float32 in tiles of 8 rows of 32 bytes."""
    return _tiled(shape, jnp.float32, swizzle=32)


def _tiled(shape: tuple[int, ...], dtype: Any, swizzle: int = 128) -> Any:
    """Allocates matrices in tiles of 8 swizzled rows of up to `swizzle` bytes."""
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = min(swizzle, shape[-1] * itemsize)
    width = swizzle // itemsize
    tiling = plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(swizzle)
    return plgpu.SMEM(shape, dtype, transforms=tiling)
