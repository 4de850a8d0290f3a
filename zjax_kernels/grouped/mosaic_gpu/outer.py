"""Kernels of `x` transposed times `y` per group (a gradient of weights); row sums."""

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
    for_each_tile,
    num_store_buffers,
    run,
    store_chunk,
)
from zjax_kernels.grouped.tuning import Tuning, choose_tuning
from zjax_kernels.warpgroups import AXIS, NUM_COMPUTE, load, specialize_warpgroups

_ALIGNMENT = 8
"""Rows of a swizzled tile: copies begin at multiples."""


def grouped_outer(
    x: Array,
    y: Array,
    sizes: Array,
    *,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> Array:
    """Runs `reference.grouped_outer` for 16 bits, K a multiple of 128 and N of 64."""
    tuning = tuning or choose_tuning("outer", len(sizes), x.shape[1], y.shape[1])
    # Copies move whole tiles of 8 rows.
    padding = (0, -len(x) % _ALIGNMENT), (0, 0)
    x, y = jnp.pad(x, padding), jnp.pad(y, padding)
    width, stages = tuning.width(y.shape[1]), tuning.stages
    shape = _Shape(len(sizes), x.shape[1] // TILE_ROWS, y.shape[1] // width, width)
    buffers = (2, num_store_buffers(width // CHUNK), HALF, CHUNK)
    smem = functools.partial(plgpu.SMEM, dtype=x.dtype, transforms=TILED)
    scratch = _Memory(
        x=smem((stages, NUM_COMPUTE, DEPTH, HALF)),
        y=smem((stages, DEPTH, width)),
        out=smem(buffers),
        stages=Stages.allocate(stages, num_copies=NUM_COMPUTE + 1),
    )

    def body(inputs, outputs, memory):
        bounds, x_ref, y_ref = inputs
        tile = functools.partial(_tile, shape, bounds)
        specialize_warpgroups(
            functools.partial(
                _compute, shape, tile, memory, *outputs, interpret=interpret
            ),
            functools.partial(_copy, shape, tile, memory, x_ref, y_ref),
        )

    output = jax.ShapeDtypeStruct((len(sizes), x.shape[1], y.shape[1]), x.dtype)
    bounds = jnp.append(jnp.int32(0), jnp.cumsum(sizes, dtype=jnp.int32))
    return run(body, (bounds, x, y), [output], scratch, interpret)[0]


def grouped_sum(
    x: Array, sizes: Array, scale: Array | None = None, *, interpret: Any = None
) -> Array:
    """Runs `reference.grouped_sum` as a product with equal columns of factors."""
    scale = jnp.ones(len(x)) if scale is None else scale
    # 128 columns, the fewest that the kernel takes, of which one is used: a scatter
    # would add rows in any order.
    columns = jnp.broadcast_to(scale.astype(x.dtype)[:, None], (len(x), TILE_ROWS))
    return grouped_outer(columns, x, sizes, interpret=interpret)[:, 0]


class _Shape(NamedTuple):
    """Numbers of groups and of tiles per matrix, and columns of a tile."""

    num_groups: int
    num_rows: int
    """Tiles of a matrix above one another."""
    num_columns: int
    width: int

    @property
    def total(self) -> Array:
        return jnp.int32(self.num_groups * self.num_rows * self.num_columns)


class _Memory(NamedTuple):
    """Shared memory: stages of both operands, and buffers of results."""

    x: Any
    y: Any
    out: Any
    stages: Stages


class _Tile(NamedTuple):
    """A tile of a matrix, and the rows [start, end) that it sums over."""

    group: Array
    row: Array
    columns: Any
    start: Array
    end: Array

    @property
    def first(self) -> Array:
        """First row that is copied: `start`, rounded down to the alignment."""
        return self.start & ~(_ALIGNMENT - 1)

    @property
    def steps(self) -> Array:
        steps = lax.div(self.end - self.first + (DEPTH - 1), jnp.int32(DEPTH))
        # An empty group takes no steps, also where `first` is before `start`.
        return jnp.where(self.end > self.start, steps, 0)


def _tile(shape: _Shape, bounds: Any, number: Array) -> _Tile:
    """Returns the tile of a number: by group, then by column, then by row."""
    per_group = shape.num_rows * shape.num_columns
    group = lax.div(number, jnp.int32(per_group))
    within = number - group * per_group
    column = lax.div(within, jnp.int32(shape.num_rows))
    return _Tile(
        group=group,
        row=within - column * shape.num_rows,
        columns=pl.ds(column * shape.width, shape.width),
        start=bounds[group],
        end=bounds[group + 1],
    )


def _copy(shape, get_tile, memory, x_ref, y_ref):
    """Copies the operands of each step, in the warpgroup that copies."""

    def copy_tile(number, before):
        tile = get_tile(number)

        def copy(step, stage, ready):
            # Mosaic must know that copies begin at whole tiles.
            first = pl.multiple_of(tile.first + step * DEPTH, _ALIGNMENT)
            rows = pl.ds(first, DEPTH)
            # One buffer per warpgroup, which sets rows of other groups to 0.
            for half in range(NUM_COMPUTE):
                place = pl.ds(tile.row * TILE_ROWS + half * HALF, HALF)
                plgpu.copy_gmem_to_smem(
                    x_ref.at[rows, place], memory.x.at[stage, half], ready
                )
            plgpu.copy_gmem_to_smem(
                y_ref.at[rows, tile.columns], memory.y.at[stage], ready
            )

        return memory.stages.fill(before, tile.steps, copy)

    memory.stages.drain(for_each_tile(shape.total, copy_tile))


def _compute(shape, get_tile, memory, out_ref, *, interpret):
    """Computes half of each tile, in one of two warpgroups."""
    half = lax.axis_index(AXIS)

    def compute_tile(number, before):
        tile = get_tile(number)

        def multiply(totals, step, stage):
            x = memory.x.at[stage, half]
            row = tile.first + step * DEPTH
            low, high = tile.start - row, tile.end - row
            # Only the first and the last step of a group hold rows of other groups.
            is_shared = (low > 0) | (high < DEPTH)
            pl.when(is_shared)(lambda: _clear_outside(x, low, high, interpret))
            plgpu.wgmma(totals[0], x.transpose((1, 0)), memory.y.at[stage])

        (result,) = memory.stages.contract(before, tile.steps, shape.width, multiply)
        _store(tile, memory.out, out_ref, result.astype(out_ref.dtype))
        return before + tile.steps

    for_each_tile(shape.total, compute_tile)
    # Shared memory must outlive the stores.
    plgpu.wait_smem_to_gmem(0)


def _clear_outside(ref, low, high, interpret):
    """Sets the rows of a step outside [low, high) to 0."""
    layout = plgpu.Layout.WGMMA
    values = load(ref, layout, interpret=interpret, optimized=False)
    if interpret is None:
        rows = plgpu.broadcasted_iota(jnp.int32, ref.shape, 0, layout=layout)
    else:
        rows = lax.broadcasted_iota(jnp.int32, ref.shape, 0)
    is_inside = (rows >= low) & (rows < high)
    # Of x alone: 0 times a number in y that is not finite reaches another group.
    ref[...] = jnp.where(is_inside, values, 0).astype(ref.dtype)
    plgpu.commit_smem()  # tensor cores must see the writes


def _store(tile, buffer, out_ref, result):
    """Stores half of a tile, chunk by chunk."""
    half, num_buffers = lax.axis_index(AXIS), buffer.shape[1]
    rows = pl.ds(tile.row * TILE_ROWS + half * HALF, HALF)
    for start in range(0, result.shape[1], CHUNK):
        columns = pl.ds(tile.columns.start + start, CHUNK)
        target = out_ref.at[tile.group, rows, columns]
        chunk = result[:, start : start + CHUNK]
        store_chunk(chunk, start // CHUNK, buffer, buffer, num_buffers, target)
