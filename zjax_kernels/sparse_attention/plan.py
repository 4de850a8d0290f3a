"""What the kernels read: which chunks of columns each tile of rows visits, in order.

A tile is `TILE` rows and a chunk some columns, both gathered from units of consecutive
tokens, so that a tile visits few dead cells however small the blocks are. Work is cut
into items, of which no one is long: a row that sees everything must not be the last to
end.
"""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from zjax_kernels.errors import invalid
from zjax_kernels.sparse_attention.layout import BlockLayout, Pattern

TILE = 128
"""Rows that one program computes together."""
HALF = 64
"""Rows of one warpgroup, of which a program has two."""
COPY = 32
"""Fewest 4-byte numbers that one copy into shared memory can move."""
PROCESSORS = 132
"""Of an H100 or H200; work is cut for as many."""
WORTH_SPLITTING = 2048
"""Columns of an item from which on it may pay to cut it."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Schedule:
    """The work of one direction: tiles of queries over keys, or of keys over queries.

    Args:
        items: int32[patterns, items, 5]: tile, first chunk, number of chunks, how many
            of those are full, and slot of the partial result (-1: it is the whole).
        num_items: int32[1]: items per pattern; later ones are padding.
        rows: int32[patterns, tiles, units]: which units of tokens make up each tile.
        columns: int32[chunks, units]: which units of tokens make up each chunk.
        live: int32[chunks, 2]: one bit per cell of the chunk, for each half of a tile.
        diagonal: int32[chunks, 2]: the same, for cells that causality cuts.
        splits: int32[patterns, split tiles, 1 + parts]: a tile whose work is split, and
            the slots of its partial results; -1 is padding.
        head_patterns: int32[heads]: pattern of each head.
        row_unit: Tokens of a unit of rows.
        column_unit: Tokens of a unit of columns.
        cell: Tokens per side of what a bit of `live` stands for.
        num_rows: Tokens along the rows, a multiple of `TILE`.
        num_columns: Tokens along the columns, a multiple of `TILE`.
        num_slots: Partial results per head.
        causal: Whether cells on the diagonal are cut token by token.
        transposed: Whether rows are keys.
    """

    items: jax.Array | np.ndarray
    num_items: jax.Array | np.ndarray
    rows: jax.Array | np.ndarray
    columns: jax.Array | np.ndarray
    live: jax.Array | np.ndarray
    diagonal: jax.Array | np.ndarray
    splits: jax.Array | np.ndarray
    head_patterns: jax.Array | np.ndarray
    row_unit: int = dataclasses.field(metadata={"static": True})
    column_unit: int = dataclasses.field(metadata={"static": True})
    cell: int = dataclasses.field(metadata={"static": True})
    num_rows: int = dataclasses.field(metadata={"static": True})
    num_columns: int = dataclasses.field(metadata={"static": True})
    num_slots: int = dataclasses.field(metadata={"static": True})
    causal: bool = dataclasses.field(metadata={"static": True})
    transposed: bool = dataclasses.field(metadata={"static": True})

    @property
    def chunk(self) -> int:
        """Columns per chunk."""
        return self.columns.shape[1] * self.column_unit


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
    """A layout made ready for the kernels: arrays, to be passed through `jax.jit`.

    Args:
        queries: Tiles of queries over keys, for the forward pass and dq.
        keys: Tiles of keys over queries, for dk and dv; the columns of a head of keys
            are the queries of all heads of its group, one head after another.
        num_queries: Tokens that ask.
        num_keys: Tokens that are asked.
    """

    queries: Schedule
    keys: Schedule
    num_queries: int = dataclasses.field(metadata={"static": True})
    num_keys: int = dataclasses.field(metadata={"static": True})


def make_plan(
    layout: BlockLayout,
    *,
    num_kv_heads: int | None = None,
    head_size: int = 128,
    segments: bool = False,
) -> Plan:
    """Prepares a layout for attention; done once, on the host.

    Args:
        layout: The live blocks of each head of the queries.
        num_kv_heads: Heads of keys and values; divides the heads of the layout.
        head_size: Channels per head, which sets the size of chunks.
        segments: Whether segments or a mask of keys will be given: blocks of 16 are
            then gathered in pairs.

    Returns:
        The plan.

    Raises:
        ValueError: The heads do not divide.

    Example:
        >>> live = np.tri(8, dtype=bool)
        >>> layout = BlockLayout.from_dense(live, block=32, num_heads=4, causal=True)
        >>> plan = make_plan(layout, num_kv_heads=2)
        >>> plan.queries.columns.shape, plan.keys.head_patterns.shape
        ((3, 4), (2,))
    """
    heads = layout.num_heads
    num_kv_heads = heads if num_kv_heads is None else num_kv_heads
    if num_kv_heads < 1 or heads % num_kv_heads:
        raise invalid(
            "num_kv_heads",
            num_kv_heads,
            f"does not divide the {heads} heads of the layout",
            "give a divisor, or a layout with other heads",
        )
    group = heads // num_kv_heads
    cell = min(layout.block, HALF)
    cells = [_Cells.of(pattern, layout, cell) for pattern in layout.patterns]
    groups = [
        tuple(layout.head_patterns[first : first + group])
        for first in range(0, heads, group)
    ]
    distinct = list(dict.fromkeys(groups))
    narrow = 64 if head_size > 128 else 128
    tokens = layout.num_rows * layout.block, layout.num_columns * layout.block
    return Plan(
        queries=_schedule(
            cells,
            layout.head_patterns,
            cell=cell,
            row_unit=max(cell, COPY),
            column_unit=max(min(layout.block, narrow), COPY if segments else 0),
            chunk=narrow,
            transposed=False,
        ),
        keys=_schedule(
            [_Cells.of_group([cells[number] for number in each]) for each in distinct],
            [distinct.index(each) for each in groups],
            cell=cell,
            row_unit=max(cell, COPY if segments else 0),
            column_unit=max(cell, COPY),
            chunk=HALF,
            transposed=True,
        ),
        num_queries=tokens[0],
        num_keys=tokens[1],
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _Cells:
    """Live cells of one pattern; numbers of cells are those of the padded lengths."""

    rows: np.ndarray
    columns: np.ndarray
    cut: np.ndarray
    num_rows: int
    num_columns: int

    @classmethod
    def of(cls, pattern: Pattern, layout: BlockLayout, cell: int) -> "_Cells":
        fine = np.arange(layout.block // cell)
        rows = pattern.rows.astype(np.int64)[:, None, None] * len(fine) + fine[:, None]
        columns = pattern.columns[:, None, None] * len(fine) + fine
        rows, columns = (x.reshape(-1) for x in np.broadcast_arrays(rows, columns))
        if layout.causal:
            seen = columns <= rows
            rows, columns = rows[seen], columns[seen]
        cut = (rows == columns) & layout.causal
        tiles = (
            -(-n * layout.block // TILE) for n in (layout.num_rows, layout.num_columns)
        )
        return cls(rows, columns, cut, *(n * TILE // cell for n in tiles))

    @classmethod
    def of_group(cls, heads: Sequence["_Cells"]) -> "_Cells":
        """Rows are keys; columns are the queries of one head after another."""
        shift = heads[0].num_rows
        return cls(
            np.concatenate([head.columns for head in heads]),
            np.concatenate([head.rows + i * shift for i, head in enumerate(heads)]),
            np.concatenate([head.cut for head in heads]),
            heads[0].num_columns,
            shift * len(heads),
        )


def _schedule(
    patterns: Sequence[_Cells],
    head_patterns: Sequence[int],
    *,
    cell: int,
    row_unit: int,
    column_unit: int,
    chunk: int,
    transposed: bool,
) -> Schedule:
    sizes = _Sizes(*(n // cell for n in (TILE, row_unit, column_unit, chunk)))
    parts = [_chunks(each, sizes) for each in patterns]
    work = sum(int(parts[number].counts.sum()) for number in head_patterns)
    longest = max(WORTH_SPLITTING // chunk, -(-work // (4 * PROCESSORS)))
    starts = np.cumsum([0, *(len(part.columns) for part in parts)])
    found = [_items(part, starts[i], longest) for i, part in enumerate(parts)]
    items, splits = zip(*found, strict=True)
    num_items = max(map(len, items))
    return Schedule(
        items=_stack(items),
        num_items=np.array([num_items], np.int32),
        rows=np.stack([part.rows for part in parts]).astype(np.int32),
        columns=_pad(np.concatenate([part.columns for part in parts]), 0),
        live=_pad(np.concatenate([part.live for part in parts]), 0),
        diagonal=_pad(np.concatenate([part.diagonal for part in parts]), 0),
        splits=_stack(splits),
        head_patterns=np.array(head_patterns, np.int32),
        row_unit=row_unit,
        column_unit=column_unit,
        cell=cell,
        num_rows=patterns[0].num_rows * cell,
        num_columns=patterns[0].num_columns * cell,
        num_slots=_bucket(int(max(each[:, 4].max() for each in items)) + 1),
        causal=any(each.cut.any() for each in patterns),
        transposed=transposed,
    )


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """In cells."""

    tile: int
    row_unit: int
    column_unit: int
    chunk: int


@dataclasses.dataclass(frozen=True, eq=False)
class _Chunks:
    """All chunks of one pattern, tile by tile, full ones first."""

    rows: np.ndarray
    counts: np.ndarray
    full: np.ndarray
    columns: np.ndarray
    live: np.ndarray
    diagonal: np.ndarray


def _chunks(cells: _Cells, sizes: _Sizes) -> _Chunks:
    num_units = cells.num_columns // sizes.column_unit
    units = cells.columns // sizes.column_unit
    places, rows = _cluster(cells, units, num_units, sizes)
    row = places[cells.rows // sizes.row_unit] * sizes.row_unit
    row += cells.rows % sizes.row_unit
    pairs, pair, live = np.unique(
        row // sizes.tile * num_units + units, return_inverse=True, return_counts=True
    )
    full = live == sizes.tile * sizes.column_unit
    full[pair[cells.cut]] = False
    tiles = pairs // num_units
    at, lane, counts = _places(tiles, full, len(rows), sizes.chunk // sizes.column_unit)
    columns = np.zeros((counts.sum(), sizes.chunk // sizes.column_unit), np.int32)
    columns[at, lane] = pairs % num_units
    half = sizes.tile // 2
    word = at[pair] * 2 + row % sizes.tile // half
    column = lane[pair] * sizes.column_unit + cells.columns % sizes.column_unit
    bit = row % half * sizes.chunk + column
    return _Chunks(
        rows,
        counts,
        np.bincount(tiles[full], minlength=len(rows)) // columns.shape[1],
        columns,
        _words(word, bit, len(columns)),
        _words(word[cells.cut], bit[cells.cut], len(columns)),
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
    counts = -(-numbers // per_chunk)
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


def _items(chunks: _Chunks, start: int, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """The items of a pattern, longest first, and its tiles whose work is split."""
    parts = np.maximum(-(-chunks.counts // longest), 1)
    tile = np.repeat(np.arange(len(parts)), parts)
    part = np.arange(len(tile)) - np.repeat(np.cumsum(parts) - parts, parts)
    before = chunks.counts[tile] * part // parts[tile]
    count = chunks.counts[tile] * (part + 1) // parts[tile] - before
    first = (np.cumsum(chunks.counts) - chunks.counts)[tile] + before
    full = np.clip(chunks.full[tile] - before, 0, count)
    split = parts[tile] > 1
    slot = np.where(split, np.cumsum(split) - 1, -1)
    items = np.stack([tile, first + start, count, full, slot], axis=1)
    splits = np.full((np.count_nonzero(parts > 1), 1 + parts.max()), -1)
    splits[:, 0] = np.flatnonzero(parts > 1)
    splits[np.searchsorted(splits[:, 0], tile[split]), 1 + part[split]] = slot[split]
    return items[np.argsort(-count, kind="stable")], splits


def _stack(parts: Sequence[np.ndarray]) -> np.ndarray:
    width = max(part.shape[1] for part in parts)
    parts = [_pad(part, -1, max(map(len, parts)), width) for part in parts]
    return np.stack(parts)


def _pad(x, value, length=None, width=None):
    """Lengths of a few sizes, so that another random layout needs no other program."""
    rows = _bucket(max(length or len(x), 1)) - len(x)
    columns = (width or x.shape[1]) - x.shape[1]
    return np.pad(x, ((0, rows), (0, columns)), constant_values=value).astype(np.int32)


def _bucket(number: int) -> int:
    """The next eighth of a power of two."""
    step = 2 ** max(int(number - 1).bit_length() - 4, 0) if number > 1 else 1
    return -(-number // step) * step
