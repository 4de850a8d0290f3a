"""Kernel of grouped products, with an epilogue that stores each tile.

Tiles begin at the first row of a group, wherever it is. The last tile of a group begins
earlier if the group has the rows to fill the tile: two tiles then write equal numbers
to shared rows, where a partial tile would have to store single rows.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
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
from zjax_kernels.grouped.reference import make_tiles
from zjax_kernels.grouped.tuning import Tuning
from zjax_kernels.warpgroups import AXIS, load, specialize_warpgroups

_ROWS = plgpu.Layout.WGMMA.reduce(1)
"""Layout of one number per row of a matrix in registers."""
_TILE = 8
"""Rows of a tile that a copy takes."""
_COLUMNS = plgpu.Layout.WGMMA.reduce(0)
"""Layout of one number per column of a matrix in registers."""


class Epilogue(NamedTuple):
    """Function that stores each tile of a product, with inputs and outputs.

    Args:
        store: Function of the `HalfTile` of a warpgroup.
        outputs: Shapes and dtypes of the results.
        num_stores: Chunks that `store` stores for every chunk of columns of a tile.
        inputs: Arrays that `store` reads.
        num_parts: Equal blocks of columns in each matrix; a tile has columns of all.
        num_reads: Equal blocks of columns in the first of `inputs`, [M, ...]; the rows
            and columns of a tile in each block are copied during the products.
        sums_rows: Whether `store` calls `HalfTile.store_rows`.
    """

    store: Callable[["HalfTile"], None]
    outputs: Sequence[jax.ShapeDtypeStruct]
    num_stores: int
    inputs: Sequence[Array] = ()
    num_parts: int = 1
    num_reads: int = 0
    sums_rows: bool = False


def multiply(
    x: Array,
    weights: Array,
    sizes: Array,
    epilogue: Epilogue,
    *,
    transpose: bool,
    tuning: Tuning,
    interpret: Any,
) -> tuple[Array, ...]:
    """Multiplies rows by the matrix of the group; returns the outputs of `epilogue`."""
    return multiply_tiles(
        *(x, weights, _cover(sizes, len(x)), epilogue),
        columns=weights.shape[1 if transpose else 2] // epilogue.num_parts,
        transpose=transpose,
        tuning=tuning,
        interpret=interpret,
    )


def multiply_tiles(
    x: Array,
    weights: Array,
    tiles: Sequence[Any],
    epilogue: Epilogue,
    *,
    columns: int,
    transpose: bool,
    tuning: Tuning,
    interpret: Any,
) -> tuple[Array, ...]:
    """Multiplies tiles of rows by matrices of groups.

    `tiles` are group, first row and number of rows of each tile, and the number of
    tiles. A part has `columns`, which may go beyond a transposed matrix: products are 0
    there.
    """
    width = tuning.width(columns, epilogue.num_parts)
    shape = _Shape(
        num_groups=len(weights),
        steps=x.shape[1] // DEPTH,
        columns=columns,
        width=width,
        band=tuning.band,
        transpose=transpose,
        copies_tiles=not (transpose and weights.shape[1] % _TILE),
    )
    scratch = _allocate(shape, epilogue, tuning.stages, x.dtype, interpret is not None)
    inputs = (*tiles, x, weights, *epilogue.inputs)

    def body(inputs, outputs, memory):
        *tiles, x_ref, weights_ref = inputs[:6]
        views = functools.partial(Views.of, simulated=interpret is not None)
        memory = memory._replace(x=views(memory.x), out=views(memory.out))
        if shape.copies_tiles:
            memory = memory._replace(weights=Views(*[memory.weights] * 3))
        else:
            memory = memory._replace(weights=views(memory.weights))
        work, refs = _Work(shape, *tiles), _Refs(inputs[6:], outputs, interpret)
        specialize_warpgroups(
            functools.partial(_compute, work, memory, epilogue, refs),
            functools.partial(
                _copy, work, memory, epilogue, x_ref, weights_ref, refs.inputs
            ),
        )

    return run(body, inputs, epilogue.outputs, scratch, interpret)


def tile_columns(tuning: Tuning, columns: int, num_parts: int) -> int:
    """Returns the number of tiles side by side, in results of `columns`."""
    return columns // tuning.width(columns, num_parts)


def num_tiles(num_rows: int, num_groups: int) -> int:
    """Returns the most tiles above one another, a dim of `HalfTile.store_rows`."""
    # As many as `make_tiles` makes with one more group, of rows without a group.
    return -(-num_rows // TILE_ROWS) + num_groups + 1


def values_of_rows(values: Array, sizes: Array, num_rows: int) -> Array:
    """Moves values from rows of tiles, [tiles, TILE_ROWS], to rows: [num_rows]."""
    _, start, rows, count = _cover(sizes, num_rows)
    offset = jnp.arange(TILE_ROWS)[None]
    exists = (jnp.arange(len(rows)) < count)[:, None] & (offset < rows[:, None])
    place = jnp.where(exists, start[:, None] + offset, num_rows)
    # Where tiles overlap, both values of a row are equal: any may win.
    return jnp.zeros(num_rows, values.dtype).at[place].set(values, mode="drop")


def _allocate(shape, epilogue, stages, dtype, simulated):
    """Returns the shared memory and barriers of a program."""
    operand = (shape.width, DEPTH) if shape.transpose else (DEPTH, shape.width)
    stored = epilogue.outputs[0].dtype
    chunk = CHUNK * 2 // stored.itemsize
    num_buffers = num_store_buffers(epilogue.num_stores * shape.width // chunk)
    views = functools.partial(Views.allocate, simulated=simulated)
    parts = epilogue.num_parts
    weights = plgpu.SMEM((stages, parts, *operand), dtype, transforms=TILED)
    if not shape.copies_tiles:
        weights = views((stages, parts, *operand), dtype)
    return _Memory(
        x=views((stages, TILE_ROWS, DEPTH), dtype),
        weights=weights,
        out=views((2, num_buffers, HALF, chunk), stored),
        rows=plgpu.SMEM((2, HALF), jnp.float32) if epilogue.sums_rows else None,
        stages=Stages.allocate(stages, num_copies=1 + parts),
    )


def _cover(sizes: Array, num_rows: int) -> tuple[Array, ...]:
    """Returns group, first row and rows of each tile, and the number of tiles.

    Rows beyond the last group form one more group, which is stored as zeros.
    """
    sizes = jnp.append(sizes, num_rows - sizes.sum()).astype(jnp.int32)
    tiles = make_tiles(sizes, num_rows, TILE_ROWS)
    rows = jnp.minimum(sizes[tiles.group], TILE_ROWS)
    # First row of a last tile that is shifted back until it is full.
    filled = jnp.cumsum(sizes, dtype=jnp.int32)[tiles.group] - rows
    count = (-(-sizes // TILE_ROWS)).sum(keepdims=True, dtype=jnp.int32)
    return tiles.group, jnp.minimum(tiles.start, filled), rows, count


class _Shape(NamedTuple):
    """Sizes of a product; `steps` are of K, `columns` and `width` of a part."""

    num_groups: int
    steps: int
    columns: int
    width: int
    band: int
    transpose: bool
    copies_tiles: bool
    """Whether copies of matrices are of tiles, which must divide a matrix."""

    @property
    def num_columns(self) -> int:
        """Number of tiles side by side."""
        return self.columns // self.width


class _Memory(NamedTuple):
    """Shared memory and barriers of a program."""

    x: Any
    weights: Any
    out: Any
    rows: Any
    stages: Stages


class _Refs(NamedTuple):
    """References to the arrays of an epilogue."""

    inputs: Sequence[Any]
    outputs: Sequence[Any]
    interpret: Any


class _Tile(NamedTuple):
    """Position of a tile, and steps of the product."""

    number: Array
    """Index among the tiles above one another."""
    group: Array
    start: Array
    rows: Array
    steps: Array
    """0 for rows without a group."""
    column: Array
    """Index among the tiles side by side."""
    width: int

    def columns(self, first: int = 0) -> Any:
        """Returns the columns of the tile in a block that begins at column `first`."""
        return pl.ds(first + self.column * self.width, self.width)


class _Work(NamedTuple):
    """The tiles of all programs, by references to global memory."""

    shape: _Shape
    group: Any
    start: Any
    rows: Any
    count: Any

    @property
    def total(self) -> Array:
        return self.count[0] * self.shape.num_columns

    def tile(self, number: Array) -> _Tile:
        """Returns the tile of a number: a band of rows is computed column by column.

        Programs that run at a time then read few rows and few columns.
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
            number=row,
            group=group,
            start=self.start[row],
            rows=self.rows[row],
            # Rows without a group have no matrix, which a step would copy.
            steps=jnp.where(group < shape.num_groups, shape.steps, 0),
            column=column,
            width=shape.width,
        )


def _num_reads(shape: _Shape, epilogue: Epilogue) -> int:
    """Returns the chunks that the epilogue of a tile reads."""
    return epilogue.num_reads * shape.width // CHUNK


def _copy(work, memory, epilogue, x_ref, weights_ref, inputs):
    """Copies the operands and reads of each tile, in the warpgroup that copies."""
    shape = work.shape
    num_reads = _num_reads(shape, epilogue)

    def copy_tile(number, before):
        tile = work.tile(number)

        def copy(step, stage, ready):
            deep = pl.ds(step * DEPTH, DEPTH)
            plgpu.copy_gmem_to_smem(
                x_ref.at[pl.ds(tile.start, TILE_ROWS), deep],
                memory.x.by_rows.at[stage],
                ready,
            )
            for part in range(epilogue.num_parts):
                wide = tile.columns(part * shape.columns)
                place = (wide, deep) if shape.transpose else (deep, wide)
                plgpu.copy_gmem_to_smem(
                    weights_ref.at[tile.group, *place],
                    memory.weights.by_rows.at[stage, part],
                    ready,
                )

        def copy_read(number, stage, ready):
            chunk = lax.div(number, jnp.int32(epilogue.num_reads))
            part = number - chunk * epilogue.num_reads
            first = part * shape.columns + tile.column * shape.width + chunk * CHUNK
            # Two copies, as many as of a step with one matrix: `ready` counts copies.
            for half in range(2):
                rows = pl.ds(tile.start + half * HALF, HALF)
                plgpu.copy_gmem_to_smem(
                    inputs[0].at[rows, pl.ds(first, CHUNK)],
                    memory.x.by_rows.at[stage, pl.ds(half * HALF, HALF)],
                    ready,
                )

        # Reads pass through the stages of x, as further steps of the tile.
        before = memory.stages.fill(before, tile.steps, copy)
        return memory.stages.fill(before, num_reads, copy_read) if num_reads else before

    memory.stages.drain(for_each_tile(work.total, copy_tile))


def _compute(work, memory, epilogue, refs):
    """Computes half of each tile and runs the epilogue, in one of two warpgroups."""
    half = lax.axis_index(AXIS)
    num_reads = _num_reads(work.shape, epilogue)

    def compute_tile(number, before):
        tile = work.tile(number)

        def multiply(totals, step, stage):
            rows = memory.x.tiled.at[stage, pl.ds(half * HALF, HALF)]
            for part, total in enumerate(totals):
                weights = memory.weights.tiled.at[stage, part]
                if work.shape.transpose:
                    weights = weights.transpose((1, 0))
                plgpu.wgmma(total, rows, weights)

        sums = memory.stages.contract(
            before, tile.steps, work.shape.width, multiply, epilogue.num_parts
        )
        before = before + tile.steps
        epilogue.store(HalfTile(work.shape, tile, sums, refs, memory, before))
        return before + num_reads

    for_each_tile(work.total, compute_tile)
    # Shared memory must outlive the stores.
    plgpu.wait_smem_to_gmem(0)


@dataclasses.dataclass
class HalfTile:
    """A warpgroup's half of a tile, while a kernel is traced.

    Args:
        sums: float32[HALF, width] for each part.
        before: int32, steps before the reads of the tile.
        num_stored: Chunks stored so far.
    """

    shape: _Shape
    tile: _Tile
    sums: Sequence[Array]
    refs: _Refs
    memory: _Memory
    before: Array
    num_stored: int = 0

    @property
    def starts(self) -> range:
        """First columns of the chunks of the tile."""
        return range(0, self.shape.width, CHUNK)

    def load_columns(self, matrix: Any, part: int) -> Array:
        """Loads row `group` of a matrix [G + 1, N], repeated: float32[HALF, width]."""
        columns = self.tile.columns(part * self.shape.columns)
        source = matrix.at[self.tile.group, columns]
        values = self._load(source, _COLUMNS).astype(jnp.float32)
        return lax.broadcast_in_dim(values, (HALF, self.shape.width), (1,))

    def load_rows(self, vector: Any) -> Array:
        """Loads the values of the rows from float32[M + TILE_ROWS]: [HALF, CHUNK]."""
        values = self._load(vector.at[pl.ds(self._first, HALF)], _ROWS)
        return lax.broadcast_in_dim(values, (HALF, CHUNK), (0,))

    def read(self, number: int) -> Array:
        """Reads chunk `number` of the first input, [HALF, CHUNK], in rising order."""
        place = pl.ds(lax.axis_index(AXIS) * HALF, HALF)

        def use(stage):
            source = self.memory.x.tiled.at[stage, place]
            return self._load(source, plgpu.Layout.WGMMA, optimized=True)

        return self.memory.stages.read(self.before + number, use)

    def store(self, output: Any, column: int, chunk: Array) -> None:
        """Stores a chunk of 128 bytes a row, from `column` of the tile's columns."""
        half, buffer = lax.axis_index(AXIS), self.memory.out
        num_buffers, number = buffer.tiled.shape[1], self.num_stored
        # Counted while the kernel is traced: chunks take buffers in turn.
        self.num_stored += 1
        rows = self.tile.rows - half * HALF
        columns = pl.ds(self.tile.columns(column).start, chunk.shape[1])

        @pl.when(rows >= HALF)
        def _():
            target = output.at[pl.ds(self._first, HALF), columns]
            views = buffer.tiled, buffer.by_rows
            store_chunk(chunk, number, *views, num_buffers, target)

        # A full copy would overwrite rows of the next group.
        @pl.when((rows > 0) & (rows < HALF))
        def _():
            # The last buffer, as the next tile begins with the first.
            plain = buffer.plain.at[half, num_buffers - 1]
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plain[...] = chunk
            plgpu.commit_smem()
            _store_rows(plain, output, self._first, rows, columns)

    def store_rows(self, output: Any, values: Array) -> None:
        """Stores a value per row in [tiles side by side, tiles, TILE_ROWS].

        Stores of chunks of the next tile wait until the values are read.
        """
        half = lax.axis_index(AXIS)
        self.memory.rows[half] = values
        plgpu.commit_smem()
        place = self.tile.column, self.tile.number, pl.ds(half * HALF, HALF)
        plgpu.copy_smem_to_gmem(self.memory.rows.at[half], output.at[place])

    @property
    def _first(self) -> Array:
        return self.tile.start + lax.axis_index(AXIS) * HALF

    def _load(self, ref: Any, layout: Any, *, optimized: bool = False) -> Array:
        interpret = self.refs.interpret
        return load(ref, layout, interpret=interpret, optimized=optimized)


def _store_rows(source, output, first, count, columns):
    """Stores fewer than `HALF` rows by copies of powers of two: sizes are static."""
    size = HALF // 2
    while size:
        done = count & ~(2 * size - 1)

        @pl.when((count & size) != 0)
        def _(size=size, done=done):
            target = output.at[pl.ds(first + done, size), columns]
            plgpu.copy_smem_to_gmem(source.at[pl.ds(done, size)], target)

        size //= 2
