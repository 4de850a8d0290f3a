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
    places, rows = _cluster(cells, sizes)
    of_rows, of_columns = _numbers(cells, places, sizes)
    keys = of_rows[cells.rows]
    keys += of_columns[cells.columns]
    bits = _bits(sizes)
    pairs, full, live = _gather(keys, bits)
    num_units = cells.num_columns // sizes.column_unit
    special = cells.cut | cells.ragged
    keys = of_rows[cells.rows[special]] + of_columns[cells.columns[special]]
    pair = np.searchsorted(pairs, keys // len(bits))
    full[pair] = False
    tiles = pairs // num_units
    at, lane, counts = _places(tiles, full, len(rows), sizes.chunk // sizes.column_unit)
    columns = np.full((counts.sum(), sizes.chunk // sizes.column_unit), -1, np.int32)
    columns[at, lane] = pairs % num_units
    columns = np.where(columns < 0, columns[:, :1], columns)  # of what the tile sees
    columns = np.maximum(columns, 0)
    shift = (lane * sizes.column_unit).astype(np.uint64)
    cut, ragged = cells.cut[special], cells.ragged[special]
    diagonal = bits[keys[cut] % len(bits)] << shift[pair[cut]]
    return Chunks(
        rows,
        counts,
        np.bincount(tiles[full], minlength=len(rows)) // columns.shape[1],
        columns,
        _words(at, live << shift, len(columns)),
        _words(at[pair[cut]], diagonal, len(columns)),
        _masks(cells, rows, counts, columns, at[pair[ragged]], sizes),
    )


def _cluster(cells, sizes):
    """Puts rows that see much side by side, so that they share tiles."""
    rows = cells.rows // sizes.row_unit
    if sizes.row_unit * sizes.column_unit > 1:
        num_units = cells.num_columns // sizes.column_unit
        keys = rows.astype(np.int64) * num_units
        keys += cells.columns // sizes.column_unit
        keys.sort(kind="stable")  # rows come in order, but for what is turned about
        rows = keys[_firsts(keys)] // num_units
    counts = np.bincount(rows, minlength=cells.num_rows // sizes.row_unit)
    few = counts <= 2 * np.median(counts)
    order = np.argsort(few, kind="stable")
    places = np.argsort(order)
    return places, order.reshape(-1, sizes.tile // sizes.row_unit)


def _numbers(cells, places, sizes):
    """What a row and a column add to the number of a cell, by which they are sorted.

    Cells are numbered tile by tile, unit by unit of columns, and row by row in those.
    """
    row = np.arange(cells.num_rows)
    row = places[row // sizes.row_unit] * sizes.row_unit + row % sizes.row_unit
    tile, row = np.divmod(row, sizes.tile)
    unit, column = np.divmod(np.arange(cells.num_columns), sizes.column_unit)
    of_rows = tile * cells.num_columns * sizes.tile + row * sizes.column_unit
    return of_rows, unit * sizes.tile * sizes.column_unit + column


def _bits(sizes):
    """The bit of each cell of a tile and a unit, of 32 for each half."""
    row, column = np.divmod(
        np.arange(sizes.tile * sizes.column_unit), sizes.column_unit
    )
    half, row = np.divmod(row, sizes.tile // 2)
    bit = half * 32 + row * sizes.chunk + column
    return np.left_shift(np.uint64(1), bit.astype(np.uint64))


def _gather(keys, bits):
    """Pairs of a tile and a unit that have cells, whether all, and their bits."""
    if not len(keys):
        return keys, np.zeros(0, bool), bits[:0]
    keys.sort(kind="stable")
    pairs = keys // len(bits)
    firsts = _firsts(pairs)
    pairs = pairs[firsts]
    keys %= len(bits)
    live = np.add.reduceat(bits[keys], firsts)
    return pairs, live == bits.sum(), live


def _firsts(keys):
    """Where each distinct one begins, of keys in order."""
    return np.flatnonzero(np.append(True, keys[1:] != keys[:-1])[: len(keys)])


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


def _words(chunk, bits, num_chunks):
    words = np.zeros(num_chunks, np.uint64)
    np.add.at(words, chunk, bits)
    halves = np.empty((num_chunks, 2), np.uint32)
    halves[:, 0] = words & np.uint64(2**32 - 1)
    words >>= np.uint64(32)
    halves[:, 1] = words
    return halves.view(np.int32)


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
