"""Shared memory of a program, and views of the rows of a tile."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from zjax_kernels.decode.mosaic_gpu.work import STEP, TILE, Sizes
from zjax_kernels.warpgroups import CLUSTER

CHUNK = 64
"""Channels of 128 bytes, the width of the swizzle."""


_LANES = 128
"""Lanes of a program."""


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
        keys: [stages, STEP, D] keys.
        sums: float32[rows, D / splits + numbers] channels of the outputs of all
            programs, and behind them some times the log-sum-exps, in the place of keys
            that nobody reads any more. Splits have `Sizes.sent_rows` each, and rows
            behind the last complete its tile. None without splits.
        values: [stages, STEP, D] values.
        sent: float32[TILE, D + numbers] outputs of the program and log-sum-exps, in the
            place of values; None without splits.
        q_ready: Barrier on which the queries arrive.
        keys_ready: Barriers per stage on which keys arrive.
        values_ready: Barriers per stage on which values arrive.
        all_read: Barrier on which all programs have read the keys.
        sums_ready: Barrier on which `sums` arrive.
    """

    q: Any
    out: Any
    keys: Any
    sums: Any
    values: Any
    sent: Any
    q_ready: Any
    keys_ready: Any
    values_ready: Any
    all_read: Any
    sums_ready: Any

    @classmethod
    def allocate(cls, sizes: Sizes, q: Any, interpret: Any) -> "Memory":
        """Returns types of shared memory and barriers, to be named by `of`."""
        size, stages, splits = q.shape[-1], sizes.tuning.stages, sizes.splits
        ring = _tiled((stages, STEP, size), q.dtype)
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
            numbers, num_rows = cls.sent_numbers(sizes), (splits - 1) * sizes.sent_rows
            shapes = (num_rows + TILE, width + numbers), (TILE, size + numbers)
            sums, sent = (_tiled(each, jnp.float32, swizzle=32) for each in shapes)
            keys, values = plgpu.RefUnion(ring, sums), plgpu.RefUnion(ring, sent)
        barrier = plgpu.Barrier(num_arrivals=sizes.copies, num_barriers=stages)
        all_read = plgpu.ClusterBarrier(collective_axes=(CLUSTER,))
        return cls(
            q=rows,
            out=None,
            keys=keys,
            sums=None,
            values=values,
            sent=None,
            q_ready=plgpu.Barrier(num_arrivals=num_chunks * num_boxes),
            keys_ready=barrier,
            values_ready=barrier,
            all_read=all_read if splits > 1 else None,
            # Each program sends channels, and log-sum-exps.
            sums_ready=plgpu.Barrier(num_arrivals=2 * splits) if splits > 1 else None,
        )

    def of(self, sizes: Sizes, interpret: Any) -> "Memory":
        """Names the views of memory."""
        if interpret is not None:
            q = [Rows(ref, None) for ref in self.q]
            return self._replace(q=q, out=q)
        q = [Rows(*views[:2]) for views in map(tuple, self.q)]
        if sizes.splits == 1:
            return self._replace(q=q, out=q)
        (keys, sums), (values, sent) = tuple(self.keys), tuple(self.values)
        width = values.shape[-1] // sizes.splits
        first = tuple(self.q[0])
        out = [Rows(*first[2:])] if width < CHUNK else q[: width // CHUNK]
        return self._replace(
            q=q, out=out, keys=keys, sums=sums, values=values, sent=sent
        )

    @staticmethod
    def sent_numbers(sizes: Sizes) -> int:
        """Returns how often a log-sum-exp is sent: once at least by each lane."""
        return max(8, _LANES // sizes.sent_rows)


def rows_layout(columns: int) -> Any:
    """Returns a layout of some rows in registers, without copies of numbers."""
    width = min(columns, 32)
    vector = 2 if width == 32 else 1
    num_rows = 32 * vector // width
    tiling = plgpu.Tiling(((4 * num_rows, width), (num_rows, width), (vector,)))
    return plgpu.Layout.TILED(
        tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
    )


def _tiled(shape: tuple[int, ...], dtype: Any, swizzle: int = 128) -> Any:
    """Allocates matrices in tiles of 8 swizzled rows of `swizzle` bytes."""
    width = swizzle // jnp.dtype(dtype).itemsize
    tiling = plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(swizzle)
    return plgpu.SMEM(shape, dtype, transforms=tiling)
