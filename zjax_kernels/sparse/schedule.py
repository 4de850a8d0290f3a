"""Schedules: the chunks of columns that each tile of rows visits, and the order.

A tile is `TILE` rows and a chunk some columns, both gathered from units of consecutive
tokens, so that a tile visits few dead cells even if blocks are small. Work is split
into items, ordered so that all programs end together: a row that sees everything must
not start last.
"""

import dataclasses
import heapq
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from zjax_kernels.device import NUM_SMS
from zjax_kernels.sparse.chunks import (
    TILE,
    Cells,
    Chunks,
    Sizes,
    deduplicate_masks,
    make_chunks,
)

EMPTY_ITEM = np.array([-1, 0, 0, 0, -1], np.int32)
"""Padding of items: no tile, no chunks, no slot."""
MAX_ITEM_FRACTION = 1.0
"""Largest item, relative to the mean work of a program."""
MIN_SPLIT = 2048
"""Smallest item, in columns, that may be split."""
_ITEM_COST = 128
"""Overhead of an item, in columns."""
_MERGE_COST = 1024
"""Time to merge split items, in columns."""
_MIN_GAIN = 0.01
"""Smallest relative gain for which a costlier assignment is taken."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Schedule:
    """The work of one direction: tiles of queries over keys, or of keys over queries.

    Args:
        items: int32[patterns, items, 5]: tile, first chunk, number of chunks, number of
            full chunks, and slot of the partial result (-1 if the item is a whole
            tile).
        num_items: int32[1]: items per pattern; further items are padding.
        rows: int32[patterns, tiles, units]: units of tokens of each tile.
        columns: int32[chunks, units]: units of tokens of each chunk.
        live: int32[chunks, 2]: one bit per cell of the chunk, for each half of a tile.
        diagonal: int32[chunks, 2]: one bit per cell on the causal diagonal, per half.
        splits: int32[patterns, split tiles, 1 + pieces]: a split tile, and the slots of
            the partial results; -1 is padding.
        head_patterns: int32[num_heads]: pattern of each head.
        order: int32[heads * items, 3]: head, pattern and item, by program and time.
        ends: int32[programs + 1]: boundaries of the programs in `order`.
        elements: int32[chunks, 2]: index into `masks` of each half of a chunk; None
            without a token mask.
        masks: int32[masks, chunk / 32, HALF]: one bit per token, by column.
        num_heads: Heads in `order`.
        row_unit: Tokens of a unit of rows.
        column_unit: Tokens of a unit of columns.
        cell: Tokens per side of a cell.
        num_rows: Tokens along the rows, a multiple of `TILE`.
        num_columns: Tokens along the columns, a multiple of `TILE`.
        num_slots: Partial results per head.
        causal: Whether cells on the diagonal are masked token by token.
        transposed: Whether rows are keys.
        edges: int32[chunks, 2, 2]: for each half of a chunk, one bit per cell that the
            end of the window crosses: `window // cell` cells before the query, and one
            cell more; None without a window.
        edge_offset: int32[1]: tokens of the window beyond whole cells.
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
    num_heads: int = dataclasses.field(metadata={"static": True})
    row_unit: int = dataclasses.field(metadata={"static": True})
    column_unit: int = dataclasses.field(metadata={"static": True})
    cell: int = dataclasses.field(metadata={"static": True})
    num_rows: int = dataclasses.field(metadata={"static": True})
    num_columns: int = dataclasses.field(metadata={"static": True})
    num_slots: int = dataclasses.field(metadata={"static": True})
    causal: bool = dataclasses.field(metadata={"static": True})
    transposed: bool = dataclasses.field(metadata={"static": True})
    edges: jax.Array | None = None
    edge_offset: jax.Array | None = None

    @property
    def num_programs(self) -> int:
        """Number of programs, one per SM."""
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
    """Groups the live cells of each pattern into chunks and items, as NumPy arrays.

    Units and chunks are sizes in tokens; see `Schedule`.
    """
    cell = patterns[0].size
    sizes = Sizes(*(n // cell for n in (TILE, row_unit, column_unit, chunk)))
    parts = [make_chunks(each, sizes) for each in patterns]
    items, splits, order, ends = _balance(parts, chunk, head_patterns)
    elements, masks = deduplicate_masks(parts)
    return Schedule(
        # Padding of -1 becomes an item of 0 chunks.
        items=np.maximum(_stack(items), EMPTY_ITEM),
        num_items=np.array([max(map(len, items))], np.int32),
        rows=np.stack([part.rows for part in parts]).astype(np.int32),
        columns=_pad(np.concatenate([part.columns for part in parts]), 0),
        live=_pad(np.concatenate([part.live for part in parts]), 0),
        diagonal=_pad(np.concatenate([part.diagonal for part in parts]), 0),
        splits=_stack(splits),
        head_patterns=np.array(head_patterns, np.int32),
        order=_pad(order, 0),
        ends=ends,
        elements=None if elements is None else _pad(elements, 0),
        masks=masks,
        num_heads=len(head_patterns),
        row_unit=row_unit,
        column_unit=column_unit,
        cell=cell,
        num_rows=patterns[0].num_rows * cell,
        num_columns=patterns[0].num_columns * cell,
        num_slots=_bucket(int(max(each[:, 4].max() for each in items)) + 1),
        # Without cells on the diagonal, kernels compare no tokens.
        causal=any(each.diagonal.any() for each in patterns),
        transposed=transposed,
    )


def assign_round_robin(heads: int, items: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns `order` and `ends` for items of unknown length, sorted longest first.

    Every second round is reversed, to balance the lengths.
    """
    nth, place = np.divmod(np.arange(heads * items), NUM_SMS)
    program = np.where(nth % 2 == 0, place, NUM_SMS - 1 - place)
    order = np.argsort(program, kind="stable")
    ends = np.searchsorted(program[order], np.arange(NUM_SMS + 1))
    head, item = np.divmod(order, items)
    return np.stack([head, head, item], axis=1).astype(np.int32), ends.astype(np.int32)


def stack_schedules(schedules: Sequence[Schedule]) -> Schedule:
    """Stacks and pads schedules of devices that run one program."""
    masked = _with_equal_masks(schedules)

    def stack(name, value):
        arrays = [np.asarray(getattr(each, name)) for each in masked]
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
    if masked[0].masks is not None:
        # Padding of masks, all ones, hides nothing.
        padding |= {"elements": 0, "masks": -1}
    stacked = {name: stack(name, value) for name, value in padding.items()}
    stacked["items"] = np.maximum(stacked["items"], EMPTY_ITEM)
    return dataclasses.replace(
        schedules[0],
        **stacked,
        num_slots=max(each.num_slots for each in schedules),
        causal=any(each.causal for each in schedules),
    )


def _with_equal_masks(schedules: Sequence[Schedule]) -> Sequence[Schedule]:
    """Gives every schedule token masks if any schedule has some."""
    masks = next((x.masks for x in schedules if x.masks is not None), None)
    if masks is None:
        return schedules
    # Devices run one program, which reads masks or reads none.
    no_mask = np.full((1, *masks.shape[1:]), -1, np.int32)
    return [
        x
        if x.masks is not None
        else dataclasses.replace(x, masks=no_mask, elements=np.zeros_like(x.live))
        for x in schedules
    ]


def _balance(parts: Sequence[Chunks], chunk: int, head_patterns: Sequence[int]):
    """Returns items, splits, `order` and `ends` of the assignment that ends first.

    An item longer than the remaining work delays the end. Candidates start long items
    first, split long items further, or split a few tiles of each head to fill the last
    round.
    """
    heads = [parts[pattern].counts * chunk + _ITEM_COST for pattern in head_patterns]
    mean_work = sum(int(times.sum()) for times in heads) / NUM_SMS
    # Tiles of each head in a last round that leaves programs idle.
    last_round = -(-(sum(map(len, heads)) % NUM_SMS) // len(heads))
    starts = np.cumsum([0, *(len(part.columns) for part in parts)])
    best: tuple[float, Any] = math.inf, None
    # Simplest first: a later candidate must end sooner by `_MIN_GAIN`.
    for most, num_split in ((1, 0), (1, last_round), (1 / 4, 0)):
        longest = max(MIN_SPLIT, most * MAX_ITEM_FRACTION * mean_work)
        pieces = [
            _num_splits(part.counts * chunk, longest, num_split) for part in parts
        ]
        split = zip(parts, starts[:-1], pieces, strict=True)
        items, splits = zip(*(_items(*each) for each in split), strict=True)
        times = [each[:, 2] * chunk + _ITEM_COST for each in items]
        for late in (math.inf, *(n * mean_work / len(heads) for n in (1, 2, 4))):
            # Nothing ends before the mean work: further candidates gain too little.
            if best[0] <= (1 + _MIN_GAIN) * mean_work:
                continue
            end, *assignment = _assign_items(times, head_patterns, late)
            # Split items are merged by operations after the kernel.
            end += _MERGE_COST * any(map(len, splits))
            if end < (1 - _MIN_GAIN) * best[0]:
                best = end, (items, splits, *assignment)
    return best[1]


def _num_splits(columns: np.ndarray, longest: float, num_split: int) -> np.ndarray:
    """Returns the items per tile; the `num_split` shortest tiles are split further."""
    pieces = np.maximum(np.ceil(columns / longest), 1)
    shortest = np.argsort(-columns, kind="stable")[len(columns) - num_split :]
    pieces[shortest] = np.maximum(
        pieces[shortest], np.ceil(columns[shortest] / MIN_SPLIT)
    )
    return pieces.astype(int)


def _items(
    chunks: Chunks, start: int, pieces: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the items of a pattern, longest first, and the split tiles."""
    tile = np.repeat(np.arange(len(pieces)), pieces)
    piece = np.arange(len(tile)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    before = chunks.counts[tile] * piece // pieces[tile]
    count = chunks.counts[tile] * (piece + 1) // pieces[tile] - before
    first = (np.cumsum(chunks.counts) - chunks.counts)[tile] + before
    full = np.clip(chunks.full[tile] - before, 0, count)
    # Only items of split tiles store partial results, and need slots.
    split = pieces[tile] > 1
    slot = np.where(split, np.cumsum(split) - 1, -1)
    items = np.stack([tile, first + start, count, full, slot], axis=1)
    splits = np.full((np.count_nonzero(pieces > 1), 1 + pieces.max()), -1)
    splits[:, 0] = np.flatnonzero(pieces > 1)
    splits[np.searchsorted(splits[:, 0], tile[split]), 1 + piece[split]] = slot[split]
    return items[np.argsort(-count, kind="stable")], splits


def _assign_items(times, head_patterns, late):
    """Assigns each item to the program that is free first, head after head.

    Keys and values of a head then stay in the cache until all programs have read the
    head. Items longer than `late` come first. Returns the time of the last program,
    `order` and `ends`.
    """
    # A heap of end and number: ties have one order, so that plans are equal anywhere.
    free = [(0, program) for program in range(NUM_SMS)]
    assigned: list[list[tuple[int, int, int]]] = [[] for _ in free]
    for is_early in (True, False):
        for head, pattern in enumerate(head_patterns):
            for item, length in enumerate(times[pattern].tolist()):
                if (length > late) == is_early:
                    busy, program = free[0]
                    assigned[program].append((head, pattern, item))
                    heapq.heapreplace(free, (busy + length, program))
    ends = np.cumsum([0, *map(len, assigned)], dtype=np.int32)
    order = np.array([each for items in assigned for each in items])
    return max(free)[0], order, ends


def _stack(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Stacks arrays of patterns, padded with -1."""
    width = max(part.shape[1] for part in parts)
    parts = [_pad(part, -1, max(map(len, parts)), width) for part in parts]
    return np.stack(parts)


def _pad(x, value, length=None, width=None):
    """Pads to one of few lengths, so that other random layouts reuse the program."""
    rows = _bucket(max(length or len(x), 1)) - len(x)
    columns = (width or x.shape[1]) - x.shape[1]
    x = np.pad(x, ((0, rows), (0, columns)), constant_values=value)
    return x.astype(np.int32, copy=False)


def _bucket(number: int) -> int:
    """Rounds up to an eighth of a power of two."""
    step = 2 ** max(int(number - 1).bit_length() - 4, 0) if number > 1 else 1
    return -(-number // step) * step
