"""What the kernels read: which chunks of columns each tile of rows visits, in order.

A tile is `TILE` rows and a chunk some columns, both gathered from units of consecutive
tokens, so that a tile visits few dead cells however small the blocks are. Work is cut
into items, of which no one is long: a row that sees everything must not be the last to
end.
"""

import dataclasses
import heapq
from collections.abc import Sequence

import jax
import numpy as np

from zjax_kernels.sparse.cells import HALF, TILE, Cells

PROCESSORS = 132
"""Of an H100 or H200; work is cut for as many."""
NOTHING = np.array([-1, 0, 0, 0, -1], np.int32)
"""An item that is none."""
ROUNDS = 4
"""Items of a program, at least, before any item is cut to make the work even."""
WORTH_SPLITTING = 2048
"""Columns of an item from which on it may pay to cut it."""
_TO_BEGIN = 128
"""Columns that take as long as to begin an item and to end it."""


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
        order: int32[heads * items, 3]: head, its pattern and the item, in the order in
            which one program after another computes them.
        ends: int32[programs + 1]: where the items of each program end in `order`.
        elements: int32[chunks, 2]: which of `masks` holds in a half of a chunk; none
            where no layout has a mask of tokens.
        masks: int32[masks, chunk / 32, HALF]: one bit per token, by column.
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
    order: jax.Array | np.ndarray
    ends: jax.Array | np.ndarray
    elements: jax.Array | np.ndarray | None
    masks: jax.Array | np.ndarray | None
    row_unit: int = dataclasses.field(metadata={"static": True})
    column_unit: int = dataclasses.field(metadata={"static": True})
    cell: int = dataclasses.field(metadata={"static": True})
    num_rows: int = dataclasses.field(metadata={"static": True})
    num_columns: int = dataclasses.field(metadata={"static": True})
    num_slots: int = dataclasses.field(metadata={"static": True})
    causal: bool = dataclasses.field(metadata={"static": True})
    transposed: bool = dataclasses.field(metadata={"static": True})

    @property
    def num_programs(self) -> int:
        """Programs that share the work, one for each processor."""
        return self.ends.shape[0] - 1

    @property
    def chunk(self) -> int:
        """Columns per chunk."""
        return self.columns.shape[1] * self.column_unit


def make_schedule(
    patterns: Sequence[Cells],
    head_patterns: Sequence[int],
    *,
    row_unit: int,
    column_unit: int,
    chunk: int,
    transposed: bool,
) -> Schedule:
    """Cuts live cells into chunks and items.

    Args:
        patterns: Live cells of each distinct pattern.
        head_patterns: Pattern of each head.
        row_unit: Tokens of a unit of rows, a multiple of `cell`.
        column_unit: Tokens of a unit of columns, a multiple of `cell`.
        chunk: Columns per chunk, a multiple of `column_unit`.
        transposed: Whether rows are keys.

    Returns:
        The schedule, of NumPy arrays.
    """
    cell = patterns[0].size
    sizes = _Sizes(*(n // cell for n in (TILE, row_unit, column_unit, chunk)))
    parts = [_chunks(each, sizes) for each in patterns]
    work = sum(int(parts[number].counts.sum()) for number in head_patterns)
    longest = max(WORTH_SPLITTING // chunk, -(-work // (ROUNDS * PROCESSORS)))
    starts = np.cumsum([0, *(len(part.columns) for part in parts)])
    found = [_items(part, starts[i], longest) for i, part in enumerate(parts)]
    items, splits = zip(*found, strict=True)
    num_items = max(map(len, items))
    elements, masks = _number_masks(parts)
    order, ends = _share_out([each[:, 2] * chunk for each in items], head_patterns)
    return Schedule(
        items=np.maximum(_stack(items), NOTHING),
        num_items=np.array([num_items], np.int32),
        rows=np.stack([part.rows for part in parts]).astype(np.int32),
        columns=_pad(np.concatenate([part.columns for part in parts]), 0),
        live=_pad(np.concatenate([part.live for part in parts]), 0),
        diagonal=_pad(np.concatenate([part.diagonal for part in parts]), 0),
        splits=_stack(splits),
        head_patterns=np.array(head_patterns, np.int32),
        order=_pad(order, 0),
        ends=ends,
        elements=elements,
        masks=masks,
        row_unit=row_unit,
        column_unit=column_unit,
        cell=cell,
        num_rows=patterns[0].num_rows * cell,
        num_columns=patterns[0].num_columns * cell,
        num_slots=_bucket(int(max(each[:, 4].max() for each in items)) + 1),
        causal=any(each.cut.any() for each in patterns),
        transposed=transposed,
    )


def deal_out(heads: int, items: int) -> tuple[np.ndarray, np.ndarray]:
    """Who computes which item where nobody knows yet how long any is.

    Long items come first, so that every other round turns the order about.

    Args:
        heads: Each of a pattern of its own.
        items: Of each head.

    Returns:
        `order` and `ends` of a schedule.
    """
    nth, place = np.divmod(np.arange(heads * items), PROCESSORS)
    program = np.where(nth % 2 == 0, place, PROCESSORS - 1 - place)
    order = np.argsort(program, kind="stable")
    ends = np.searchsorted(program[order], np.arange(PROCESSORS + 1))
    head, item = np.divmod(order, items)
    return np.stack([head, head, item], axis=1).astype(np.int32), ends.astype(np.int32)


def stack_schedules(schedules: Sequence[Schedule]) -> Schedule:
    """Schedules of devices that run one program.

    Args:
        schedules: Of layouts of one shape, without masks of tokens.

    Returns:
        Their arrays, stacked; those that differ in length are padded with nothing.
    """

    def stack(name, value):
        arrays = [np.asarray(getattr(each, name)) for each in schedules]
        shape = np.max([x.shape for x in arrays], axis=0)
        return np.stack(
            [
                np.pad(
                    x,
                    [(0, n - size) for n, size in zip(shape, x.shape, strict=True)],
                    constant_values=value,
                )
                for x in arrays
            ]
        )

    padding: dict[str, int] = {"items": -1, "splits": -1}
    names = ("num_items", "rows", "columns", "live", "diagonal")
    padding |= dict.fromkeys((*names, "head_patterns", "order", "ends"), 0)
    stacked = {name: stack(name, value) for name, value in padding.items()}
    stacked["items"] = np.maximum(stacked["items"], NOTHING)
    return dataclasses.replace(
        schedules[0],
        **stacked,
        num_slots=max(each.num_slots for each in schedules),
        causal=any(each.causal for each in schedules),
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
    masks: np.ndarray | None
    """int32[chunks, 2, chunk / 32, HALF], where the pattern has a mask of tokens."""


def _chunks(cells: Cells, sizes: _Sizes) -> _Chunks:
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
    return _Chunks(
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


def _number_masks(parts):
    """Which mask each half of a chunk has, and the distinct ones."""
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
    return _pad(numbers.reshape(-1)[1:].reshape(-1, 2), 0), masks


def _tokens(units, size):
    tokens = units[..., None] * size + np.arange(size)
    return tokens.reshape(len(units), units.shape[1] * size)


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


def _share_out(columns, head_patterns):
    """Gives each item to the program that would be free first, head after head.

    The keys and values of one head then stay in the cache until all have read them.
    """
    free = [(0, program) for program in range(PROCESSORS)]
    shares: list[list[tuple[int, int, int]]] = [[] for _ in free]
    for head, pattern in enumerate(head_patterns):
        for item, length in enumerate(columns[pattern]):
            busy, program = free[0]
            shares[program].append((head, pattern, item))
            heapq.heapreplace(free, (busy + int(length) + _TO_BEGIN, program))
    ends = np.cumsum([0, *map(len, shares)], dtype=np.int32)
    return np.array([each for share in shares for each in share]), ends


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
