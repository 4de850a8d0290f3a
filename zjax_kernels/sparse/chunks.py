"""Live cells of an attention matrix, and chunks of live columns for the kernels."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from zjax_kernels.sparse.layout import BlockLayout, Pattern

TILE = 128
"""Rows of the matrix that a program computes together."""
HALF = 64
"""Rows of one of the two warpgroups of a program; the largest cell."""


Mask = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Function from numbers of queries and of keys, which broadcast, to visibility."""
_MASK_BATCH = 2**24
"""Pairs of tokens for which a mask is evaluated at a time, to bound memory."""


@dataclasses.dataclass(frozen=True, eq=False)
class Cells:
    """Live cells of one pattern, as coordinates.

    Args:
        diagonal: bool[cells], whether causality hides tokens of the cell.
        masked: bool[cells], whether `mask` hides tokens of the cell.
        size: Tokens per side.
        mask: Visibility of tokens within live cells; None if all are visible.
    """

    rows: np.ndarray
    columns: np.ndarray
    diagonal: np.ndarray
    masked: np.ndarray
    num_rows: int
    num_columns: int
    size: int
    mask: Mask | None = None

    @classmethod
    def of(
        cls, pattern: Pattern, layout: BlockLayout, mask: Mask | None = None
    ) -> "Cells":
        """Splits the blocks of one pattern of `layout` into cells."""
        cell = min(layout.block, HALF)
        # int32, as plans of a million tokens have many cells.
        fine = np.arange(layout.block // cell, dtype=np.int32)
        rows = pattern.rows[:, None] * np.int32(len(fine)) + fine[:, None, None]
        columns = pattern.columns[:, None] * np.int32(len(fine)) + fine
        rows, columns = (x.reshape(-1) for x in np.broadcast_arrays(rows, columns))
        seen = columns <= rows if layout.causal else np.ones(len(rows), bool)
        sizes = layout.num_rows, layout.num_columns
        # Kernels compute whole tiles; no cell lives in the padding.
        tokens = [-(-size * layout.block // TILE) * TILE for size in sizes]
        masked = np.zeros(len(rows), bool)
        if mask is not None:
            any_seen, all_seen = _evaluate(mask, rows, columns, cell)
            seen &= any_seen
            masked = ~all_seen
        rows, columns, masked = rows[seen], columns[seen], masked[seen]
        diagonal = (rows == columns) & layout.causal
        num_rows, num_columns = (n // cell for n in tokens)
        return cls(rows, columns, diagonal, masked, num_rows, num_columns, cell, mask)

    @classmethod
    def transposed(cls, heads: Sequence["Cells"]) -> "Cells":
        """Transposes heads that share keys, and concatenates queries of the heads."""
        first = heads[0]
        return cls(
            _concatenate([head.columns for head in heads]),
            _concatenate(
                # The first head, often the only one, is not copied.
                [x.rows + i * x.num_rows if i else x.rows for i, x in enumerate(heads)]
            ),
            _concatenate([head.diagonal for head in heads]),
            _concatenate([head.masked for head in heads]),
            first.num_columns,
            first.num_rows * len(heads),
            first.size,
            first.mask and _transpose(first.mask, first.num_rows * first.size),
        )


def _concatenate(parts):
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _evaluate(mask, rows, columns, cell):
    """Whether any, and whether all, pairs of tokens of each cell are visible."""
    within = np.arange(cell)
    any_seen, all_seen = np.zeros((2, len(rows)), bool)
    step = _MASK_BATCH // cell**2
    for start in range(0, len(rows), step):
        batch = slice(start, start + step)
        queries, keys = (x[batch, None, None].astype(int) for x in (rows, columns))
        queries, keys = queries * cell + within[:, None], keys * cell + within
        shape = np.broadcast_shapes(queries.shape, keys.shape)
        live = np.broadcast_to(mask(queries, keys), shape)
        any_seen[batch], all_seen[batch] = live.any(axis=(1, 2)), live.all(axis=(1, 2))
    return any_seen, all_seen


def _transpose(mask, num_queries):
    # The queries are concatenated heads, of which the mask knows one.
    return lambda keys, queries: mask(queries % num_queries, keys)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes in cells.

    Args:
        tile: Rows computed together.
        row_unit: Rows that are consecutive tokens.
        column_unit: Columns that are consecutive tokens.
        chunk: Columns computed together.
    """

    tile: int
    row_unit: int
    column_unit: int
    chunk: int


@dataclasses.dataclass(frozen=True, eq=False)
class Chunks:
    """All chunks of one pattern, ordered by tile; a tile's full chunks come first.

    Args:
        rows: int64[tiles, units], units of rows of each tile.
        counts: int64[tiles], number of chunks.
        full: int64[tiles], number of chunks without dead cells.
        columns: int32[chunks, units], units of columns of each chunk.
        live: int32[chunks, 2], one bit per live cell, for each half of a tile.
        diagonal: int32[chunks, 2], one bit per cell on the causal diagonal, per half.
        masks: int32[chunks, 2, chunk / 32, HALF], one bit per token; None without a
            mask.
    """

    rows: np.ndarray
    counts: np.ndarray
    full: np.ndarray
    columns: np.ndarray
    live: np.ndarray
    diagonal: np.ndarray
    masks: np.ndarray | None


def make_chunks(cells: Cells, sizes: Sizes) -> Chunks:
    """Groups the live columns of each tile into chunks."""
    places, rows = _cluster(cells, sizes)
    row_keys, column_keys = _cell_keys(cells, places, sizes)
    # One integer key per cell, in place: plans of a million tokens have many cells.
    keys = row_keys[cells.rows]
    keys += column_keys[cells.columns]
    bits = _bits(sizes)
    pairs, full, live = _merge_cells(keys, bits)
    num_units = cells.num_columns // sizes.column_unit
    special = cells.diagonal | cells.masked
    keys = row_keys[cells.rows[special]] + column_keys[cells.columns[special]]
    pair = np.searchsorted(pairs, keys // len(bits))
    # A cell that is masked token by token needs the code with masks.
    full[pair] = False
    tiles = pairs // num_units
    chunk, lane, counts = _chunk_positions(
        tiles, full, len(rows), sizes.chunk // sizes.column_unit
    )
    columns = np.full((counts.sum(), sizes.chunk // sizes.column_unit), -1, np.int32)
    columns[chunk, lane] = pairs % num_units
    columns = np.where(columns < 0, columns[:, :1], columns)  # padding repeats a column
    columns = np.maximum(columns, 0)  # a dead chunk has no column: any will do
    shift = (lane * sizes.column_unit).astype(np.uint64)
    on_diagonal, masked = cells.diagonal[special], cells.masked[special]
    diagonal = bits[keys[on_diagonal] % len(bits)] << shift[pair[on_diagonal]]
    return Chunks(
        rows,
        counts,
        np.bincount(tiles[full], minlength=len(rows)) // columns.shape[1],
        columns,
        _pack_bits(chunk, live << shift, len(columns)),
        _pack_bits(chunk[pair[on_diagonal]], diagonal, len(columns)),
        _masks(cells, rows, counts, columns, chunk[pair[masked]], sizes),
    )


def _cluster(cells, sizes):
    """Returns the place of each row unit, dense rows first, and units of each tile."""
    rows = cells.rows // sizes.row_unit
    if sizes.row_unit * sizes.column_unit > 1:
        num_units = cells.num_columns // sizes.column_unit
        keys = rows.astype(np.int64) * num_units
        keys += cells.columns // sizes.column_unit
        keys.sort(kind="stable")  # sorted already unless transposed
        rows = keys[_run_starts(keys)] // num_units
    counts = np.bincount(rows, minlength=cells.num_rows // sizes.row_unit)
    # Outliers alone move: all else keeps the order of tokens.
    sparse = counts <= 2 * np.median(counts)
    order = np.argsort(sparse, kind="stable")
    places = np.argsort(order)
    return places, order.reshape(-1, sizes.tile // sizes.row_unit)


def _cell_keys(cells, places, sizes):
    """Returns terms of sort keys: a cell has the term of the row plus of the column.

    Cells are sorted by tile, then unit of columns, then row, then column.
    """
    row = np.arange(cells.num_rows)
    row = places[row // sizes.row_unit] * sizes.row_unit + row % sizes.row_unit
    tile, row = np.divmod(row, sizes.tile)
    unit, column = np.divmod(np.arange(cells.num_columns), sizes.column_unit)
    row_keys = tile * cells.num_columns * sizes.tile + row * sizes.column_unit
    return row_keys, unit * sizes.tile * sizes.column_unit + column


def _bits(sizes):
    """Returns the bit of each cell of a tile and unit of columns; 32 bits per half."""
    row, column = np.divmod(
        np.arange(sizes.tile * sizes.column_unit), sizes.column_unit
    )
    half, row = np.divmod(row, sizes.tile // 2)
    bit = half * 32 + row * sizes.chunk + column
    return np.left_shift(np.uint64(1), bit.astype(np.uint64))


def _merge_cells(keys, bits):
    """Returns distinct pairs of tile and column unit, full or not, and live bits."""
    if not len(keys):
        return keys, np.zeros(0, bool), bits[:0]
    keys.sort(kind="stable")
    pairs = keys // len(bits)
    firsts = _run_starts(pairs)
    pairs = pairs[firsts]
    keys %= len(bits)
    # Bits of a pair are distinct: adding them is `or`.
    live = np.add.reduceat(bits[keys], firsts)
    return pairs, live == bits.sum(), live


def _run_starts(keys):
    """Returns the start of each run of equal keys."""
    return np.flatnonzero(np.append(True, keys[1:] != keys[:-1])[: len(keys)])


def _chunk_positions(tiles, full, num_tiles, per_chunk):
    """Returns chunk and lane of each pair of tile and column unit; chunks per tile."""
    numbers = np.bincount(tiles, minlength=num_tiles)
    # A tile that sees nothing has one dead chunk, so that its rows are stored.
    counts = np.maximum(-(-numbers // per_chunk), 1)
    # Full pairs first: kernels run full chunks without masks.
    order = np.lexsort((~full, tiles))
    rank = np.empty(len(tiles), np.int64)
    starts = np.cumsum(numbers) - numbers
    rank[order] = np.arange(len(tiles)) - starts[tiles[order]]
    return (
        (np.cumsum(counts) - counts)[tiles] + rank // per_chunk,
        rank % per_chunk,
        counts,
    )


def _pack_bits(chunk, bits, num_chunks):
    """Returns the bits of each chunk, int32[chunks, 2]."""
    words = np.zeros(num_chunks, np.uint64)
    # `add.at` counts repeated chunks, and bits are distinct: adding is `or`.
    np.add.at(words, chunk, bits)
    halves = np.empty((num_chunks, 2), np.uint32)
    halves[:, 0] = words & np.uint64(2**32 - 1)
    words >>= np.uint64(32)
    halves[:, 1] = words
    return halves.view(np.int32)


def _masks(cells, rows, counts, columns, masked, sizes):
    """Returns a bit per token of each chunk; only the chunks `masked` call the mask."""
    if cells.mask is None:
        return None
    cell = cells.size
    width = sizes.chunk * cell // 32
    words = np.full((len(columns), TILE, width), -1, np.int32)
    chunks = np.unique(masked)
    tiles = np.repeat(np.arange(len(rows)), counts)[chunks]
    row = _tokens(rows[tiles], sizes.row_unit * cell)
    column = _tokens(columns[chunks], sizes.column_unit * cell)
    for index, chunk in enumerate(chunks):
        live = cells.mask(row[index, :, None], column[index, None])
        live = np.broadcast_to(live, (TILE, sizes.chunk * cell))
        # Bit i is column i, as kernels shift words to the right.
        words[chunk] = np.packbits(live, axis=-1, bitorder="little").view("<i4")
    # Rows last: a warpgroup loads a word for each row at once.
    return words.reshape(len(columns), 2, HALF, width).swapaxes(2, 3)


def deduplicate_masks(
    chunk_lists: Sequence[Chunks],
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Returns mask numbers of half chunks, int32[chunks, 2], and masks; or None."""
    if all(part.masks is None for part in chunk_lists):
        return None, None
    width = next(part.masks.shape[2] for part in chunk_lists if part.masks is not None)
    all_ones = np.full((1, width, HALF), -1, np.int32)
    all_masks = [
        np.broadcast_to(all_ones, (2 * len(part.columns), width, HALF))
        if part.masks is None
        else part.masks.reshape(-1, width, HALF)
        for part in chunk_lists
    ]
    masks, numbers = np.unique(
        np.concatenate([all_ones, *all_masks]), axis=0, return_inverse=True
    )
    # The first number is of `all_ones`, which belongs to no half chunk.
    return numbers.reshape(-1)[1:].reshape(-1, 2), masks


def _tokens(units, size):
    tokens = units[..., None] * size + np.arange(size)
    return tokens.reshape(len(units), units.shape[1] * size)
