"""Rows of each group times its matrix.

Tiles begin at the first row of a group, wherever it is. The last tile of a group
begins earlier if the group has the rows to fill it: two tiles then write the same
numbers to the same rows, in place of a tile that must store some of its rows alone.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from zjax_kernels.grouped.mosaic_gpu.pipeline import (
    CHUNK,
    DEPTH,
    HALF,
    TILE_ROWS,
    TILED,
    Stages,
    Views,
    for_each_tile,
    num_store_buffers,
    run,
    store_chunk,
)
from zjax_kernels.grouped.tiles import make_tiles
from zjax_kernels.grouped.tuning import Tuning, choose_tuning
from zjax_kernels.warpgroups import AXIS, specialize_warpgroups


def grouped_matmul(
    x: Array,
    weights: Array,
    sizes: Array,
    *,
    transpose: bool = False,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> Array:
    """`reference.grouped_matmul` for 16-bit arrays with K and N multiples of 64.

    Args:
        x: [M, K].
        weights: [G, K, N], or [G, N, K] if `transpose`.
        sizes: int32[G].
        transpose: Whether to multiply by transposed matrices.
        tuning: How to run; None for the measured one, or the default.
        interpret: Parameters of the interpreter; None on a GPU.
    """
    kernel = "transposed" if transpose else "matmul"
    tuning = tuning or choose_tuning(kernel, *weights.shape)
    columns = weights.shape[1 if transpose else 2]
    width, simulated = tuning.width(columns), interpret is not None
    shape = _Shape(
        num_groups=len(sizes),
        steps=x.shape[1] // DEPTH,
        num_columns=columns // width,
        width=width,
        band=tuning.band,
        transpose=transpose,
    )
    stages = tuning.stages
    operand = (width, DEPTH) if transpose else (DEPTH, width)
    buffers = (2, num_store_buffers(width), HALF, CHUNK)
    scratch = _Memory(
        x=Views.allocate((stages, TILE_ROWS, DEPTH), x.dtype, simulated=simulated),
        weights=plgpu.SMEM((stages, *operand), x.dtype, transforms=TILED),
        out=Views.allocate(buffers, x.dtype, simulated=simulated),
        stages=Stages.allocate(stages, num_copies=2),
    )

    def body(inputs, out_ref, memory):
        *tiles, x_ref, weights_ref = inputs
        views = functools.partial(Views.of, simulated=simulated)
        memory = memory._replace(x=views(memory.x), out=views(memory.out))
        work = _Work(shape, *tiles)
        specialize_warpgroups(
            functools.partial(_compute, work, memory, out_ref),
            functools.partial(_copy, work, memory, x_ref, weights_ref),
        )

    output = jax.ShapeDtypeStruct((len(x), columns), x.dtype)
    return run(body, (*_cover(sizes, len(x)), x, weights), output, scratch, interpret)


def _cover(sizes: Array, num_rows: int) -> tuple[Array, ...]:
    """Group, first row and number of rows of each tile, and the number of tiles.

    Rows beyond the last group are a group of their own.
    """
    sizes = jnp.append(sizes, num_rows - sizes.sum()).astype(jnp.int32)
    tiles = make_tiles(sizes, num_rows, TILE_ROWS)
    rows = jnp.minimum(sizes[tiles.group], TILE_ROWS)
    filled = jnp.cumsum(sizes, dtype=jnp.int32)[tiles.group] - rows
    count = (-(-sizes // TILE_ROWS)).sum(keepdims=True, dtype=jnp.int32)
    return tiles.group, jnp.minimum(tiles.start, filled), rows, count


class _Shape(NamedTuple):
    num_groups: int
    steps: int
    num_columns: int
    """Tiles next to each other."""
    width: int
    band: int
    transpose: bool


class _Memory(NamedTuple):
    x: Any
    weights: Any
    out: Any
    stages: Stages


class _Tile(NamedTuple):
    group: Array
    start: Array
    rows: Array
    steps: Array
    """0 for rows without a group."""
    columns: Any


class _Work(NamedTuple):
    shape: _Shape
    group: Any
    start: Any
    rows: Any
    count: Any

    @property
    def total(self) -> Array:
        return self.count[0] * self.shape.num_columns

    def tile(self, number: Array) -> _Tile:
        """The tiles of a band of rows are computed column by column.

        So the programs that run at a time read few rows and few columns.
        """
        shape = self.shape
        per_band = jnp.int32(shape.band * shape.num_columns)
        band = lax.div(number, per_band)
        within = number - band * per_band
        height = jnp.minimum(self.count[0] - band * shape.band, shape.band)
        column = lax.div(within, height)
        row = band * shape.band + within - column * height
        group = self.group[row]
        return _Tile(
            group=group,
            start=self.start[row],
            rows=self.rows[row],
            steps=jnp.where(group < shape.num_groups, shape.steps, 0),
            columns=pl.ds(column * shape.width, shape.width),
        )


def _copy(work, memory, x_ref, weights_ref):
    def copy_tile(number, before):
        tile = work.tile(number)
        rows = pl.ds(tile.start, TILE_ROWS)

        def copy(step, stage, ready):
            deep = pl.ds(step * DEPTH, DEPTH)
            place = (
                (tile.columns, deep) if work.shape.transpose else (deep, tile.columns)
            )
            source = weights_ref.at[tile.group, *place]
            plgpu.copy_gmem_to_smem(
                x_ref.at[rows, deep], memory.x.by_rows.at[stage], ready
            )
            plgpu.copy_gmem_to_smem(source, memory.weights.at[stage], ready)

        return memory.stages.fill(before, tile.steps, copy)

    memory.stages.drain(for_each_tile(work.total, copy_tile))


def _compute(work, memory, out_ref):
    half = lax.axis_index(AXIS)

    def compute_tile(number, before):
        tile = work.tile(number)

        def multiply(total, step, stage):
            weights = memory.weights.at[stage]
            if work.shape.transpose:
                weights = weights.transpose((1, 0))
            rows = memory.x.tiled.at[stage, pl.ds(half * HALF, HALF)]
            plgpu.wgmma(total, rows, weights)

        width = work.shape.width
        result = memory.stages.contract(before, tile.steps, width, multiply)
        _store(tile, memory.out, out_ref, result.astype(out_ref.dtype))
        return before + tile.steps

    for_each_tile(work.total, compute_tile)
    plgpu.wait_smem_to_gmem(0)


def _store(tile, buffer, out_ref, result):
    half, num_buffers = lax.axis_index(AXIS), buffer.tiled.shape[1]
    first, rows = tile.start + half * HALF, tile.rows - half * HALF
    for start in range(0, result.shape[1], CHUNK):
        chunk = result[:, start : start + CHUNK]
        columns = pl.ds(tile.columns.start + start, CHUNK)

        @pl.when(rows >= HALF)
        def _(chunk=chunk, start=start, columns=columns):
            target = out_ref.at[pl.ds(first, HALF), columns]
            views = buffer.tiled, buffer.by_rows
            store_chunk(chunk, start, *views, num_buffers, target)

        @pl.when((rows > 0) & (rows < HALF))
        def _(chunk=chunk, columns=columns):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            buffer.plain[half, 0] = chunk
            plgpu.commit_smem()
            _store_rows(buffer.plain.at[half, 0], out_ref, first, rows, columns)


def _store_rows(source, out_ref, first, count, columns):
    """Stores fewer than `HALF` rows, in copies of powers of two."""
    size = HALF // 2
    while size:
        done = count & ~(2 * size - 1)

        @pl.when((count & size) != 0)
        def _(size=size, done=done):
            target = out_ref.at[pl.ds(first + done, size), columns]
            plgpu.copy_smem_to_gmem(source.at[pl.ds(done, size)], target)

        size //= 2
