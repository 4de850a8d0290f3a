"""Which chunks of columns each tile of rows visits, before anybody computes them."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from zjax_kernels.sparse.cells import HALF, TILE, Cells


@dataclasses.dataclass(frozen=True)
class Sizes:
    """In cells.

    Args:
        tile: Rows that are computed together.
        row_unit: Rows that lie side by side.
        column_unit: Columns that lie side by side.
        chunk: Columns that are computed together.
    """

    tile: int
    row_unit: int
    column_unit: int
    chunk: int


@dataclasses.dataclass(frozen=True, eq=False)
class Chunks:
    """All chunks of one pattern, tile by tile, full ones first.

    Args:
        rows: [tiles, units]: which units of rows make up each tile.
        counts: [tiles]: chunks of each tile.
        full: [tiles]: how many of them have no dead cell.
        columns: [chunks, units]: which units of columns make up each chunk.
        live: int32[chunks, 2]: one bit per cell, for each half of a tile.
        diagonal: int32[chunks, 2]: the same, for cells that causality cuts.
        masks: int32[chunks, 2, chunk / 32, HALF], where the pattern has a mask of
            tokens.
    """

    rows: np.ndarray
    counts: np.ndarray
    full: np.ndarray
    columns: np.ndarray
    live: np.ndarray
    diagonal: np.ndarray
    masks: np.ndarray | None


def cut_chunks(cells: Cells, sizes: Sizes) -> Chunks:
    """Gathers live columns of each tile.

    Args:
        cells: Live cells.
        sizes: Of what they are gathered into.

    Returns:
        The chunks.
    """
    num_units = cells.num_columns // sizes.column_unit
    units = cells.columns // sizes.column_unit
    places, rows = _cluster(cells, units, num_units, sizes)
    row = places[cells.rows // sizes.row_unit] * sizes.row_unit
    row += cells.rows % sizes.row_unit
    pairs, pair, live = np.unique(
        row // sizes.tile * num_units + units, return_inverse=True, return_counts=True
    )
    full = live == sizes.tile * sizes.column_unit
    full[pair[cells.cut | cells.ragged]] = False
    tiles = pairs // num_units
    at, lane, counts = _places(tiles, full, len(rows), sizes.chunk // sizes.column_unit)
    columns = np.full((counts.sum(), sizes.chunk // sizes.column_unit), -1, np.int32)
    columns[at, lane] = pairs % num_units
    columns = np.where(columns < 0, columns[:, :1], columns)  # of what the tile sees
    columns = np.maximum(columns, 0)
    half = sizes.tile // 2
    word = at[pair] * 2 + row % sizes.tile // half
    column = lane[pair] * sizes.column_unit + cells.columns % sizes.column_unit
    bit = row % half * sizes.chunk + column
    return Chunks(
        rows,
        counts,
        np.bincount(tiles[full], minlength=len(rows)) // columns.shape[1],
        columns,
        _words(word, bit, len(columns)),
        _words(word[cells.cut], bit[cells.cut], len(columns)),
        _masks(cells, rows, counts, columns, at[pair[cells.ragged]], sizes),
    )


def _cluster(cells, units, num_units, sizes):
    """Puts rows that see much side by side, so that they share tiles."""
    seen = np.unique(cells.rows // sizes.row_unit * num_units + units) // num_units
    counts = np.bincount(seen, minlength=cells.num_rows // sizes.row_unit)
    few = counts <= 2 * np.median(counts)
    order = np.argsort(few, kind="stable")
    places = np.argsort(order)
    return places, order.reshape(-1, sizes.tile // sizes.row_unit)


def _places(tiles, full, num_tiles, per_chunk):
    """Chunk and lane of each pair of tile and unit, and how many chunks a tile has."""
    numbers = np.bincount(tiles, minlength=num_tiles)
    counts = np.maximum(-(-numbers // per_chunk), 1)  # all dead where nothing is seen
    order = np.lexsort((~full, tiles))
    nth = np.empty(len(tiles), np.int64)
    starts = np.cumsum(numbers) - numbers
    nth[order] = np.arange(len(tiles)) - starts[tiles[order]]
    return (
        (np.cumsum(counts) - counts)[tiles] + nth // per_chunk,
        nth % per_chunk,
        counts,
    )


def _words(word, bit, num_chunks):
    values = np.bincount(word, np.exp2(bit), minlength=2 * num_chunks)
    return values.astype(np.uint32).view(np.int32).reshape(num_chunks, 2)


def _masks(cells, rows, counts, columns, ragged, sizes):
    """One bit per token of each half of each chunk; all are 1 where nothing is hidden.

    The mask is asked for the chunks `ragged` alone.
    """
    if cells.mask is None:
        return None
    cell = cells.size
    width = sizes.chunk * cell // 32
    words = np.full((len(columns), TILE, width), -1, np.int32)
    chunks = np.unique(ragged)
    tiles = np.repeat(np.arange(len(rows)), counts)[chunks]
    row = _tokens(rows[tiles], sizes.row_unit * cell)
    column = _tokens(columns[chunks], sizes.column_unit * cell)
    for number, chunk in enumerate(chunks):
        live = cells.mask(row[number, :, None], column[number, None])
        live = np.broadcast_to(live, (TILE, sizes.chunk * cell))
        words[chunk] = np.packbits(live, axis=-1, bitorder="little").view("<i4")
    return words.reshape(len(columns), 2, HALF, width).swapaxes(2, 3)


def number_masks(
    parts: Sequence[Chunks],
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Which mask of tokens each half of a chunk has.

    Args:
        parts: The chunks of each pattern.

    Returns:
        int32[chunks, 2] numbers, and the distinct masks; none where there are none.
    """
    if all(part.masks is None for part in parts):
        return None, None
    width = next(part.masks.shape[2] for part in parts if part.masks is not None)
    none = np.full((1, width, HALF), -1, np.int32)
    of_parts = [
        np.broadcast_to(none, (2 * len(part.columns), width, HALF))
        if part.masks is None
        else part.masks.reshape(-1, width, HALF)
        for part in parts
    ]
    masks, numbers = np.unique(
        np.concatenate([none, *of_parts]), axis=0, return_inverse=True
    )
    return numbers.reshape(-1)[1:].reshape(-1, 2), masks


def _tokens(units, size):
    tokens = units[..., None] * size + np.arange(size)
    return tokens.reshape(len(units), units.shape[1] * size)
