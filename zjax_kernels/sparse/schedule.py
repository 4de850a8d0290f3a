"""What the kernels read: which chunks of columns each tile of rows visits, in order.

A tile is `TILE` rows and a chunk some columns, both gathered from units of consecutive
tokens, so that a tile visits few dead cells however small the blocks are. Work is cut
into items, and these are ordered, so that no program ends long after the others: a row
that sees everything must not be the last to begin.
"""

import dataclasses
import heapq
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from zjax_kernels.sparse.cells import TILE, Cells
from zjax_kernels.sparse.chunks import Chunks, Sizes, cut_chunks, number_masks

PROCESSORS = 132
"""Of an H100 or H200; work is cut for as many."""
NOTHING = np.array([-1, 0, 0, 0, -1], np.int32)
"""An item that is none."""
LONGEST_SHARE = 1.0
"""Of the work of a program, that one item may be."""
WORTH_SPLITTING = 2048
"""Columns of an item from which on it may pay to cut it."""
_TO_BEGIN = 128
"""Columns that take as long as to begin an item and to end it."""
_TO_MERGE = 1024
"""Columns that take as long as to put together what was cut."""
_WORTH_CHANGING = 0.01
"""Of the time of all programs, by which they must end earlier for it to pay."""


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
        head_patterns: int32[num_heads]: pattern of each head.
        order: int32[heads * items, 3]: head, its pattern and the item, in the order in
            which one program after another computes them.
        ends: int32[programs + 1]: where the items of each program end in `order`.
        elements: int32[chunks, 2]: which of `masks` holds in a half of a chunk; none
            where no layout has a mask of tokens.
        masks: int32[masks, chunk / 32, HALF]: one bit per token, by column.
        num_heads: Heads that `order` has work for.
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
    num_heads: int = dataclasses.field(metadata={"static": True})
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
    sizes = Sizes(*(n // cell for n in (TILE, row_unit, column_unit, chunk)))
    parts = [cut_chunks(each, sizes) for each in patterns]
    items, splits, order, ends = _cut_evenly(parts, chunk, head_patterns)
    elements, masks = number_masks(parts)
    return Schedule(
        items=np.maximum(_stack(items), NOTHING),
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
        schedules: Of layouts of one shape, and of as many heads.

    Returns:
        Their arrays, stacked; those that differ in length are padded with nothing.
    """
    masked = _masked_alike(schedules)

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
        padding |= {"elements": 0, "masks": -1}
    stacked = {name: stack(name, value) for name, value in padding.items()}
    stacked["items"] = np.maximum(stacked["items"], NOTHING)
    return dataclasses.replace(
        schedules[0],
        **stacked,
        num_slots=max(each.num_slots for each in schedules),
        causal=any(each.causal for each in schedules),
    )


def _masked_alike(schedules: Sequence[Schedule]) -> Sequence[Schedule]:
    """All with masks of tokens, if any has one: those without get one of nothing."""
    masks = next((x.masks for x in schedules if x.masks is not None), None)
    if masks is None:
        return schedules
    nothing = np.full((1, *masks.shape[1:]), -1, np.int32)
    return [
        x
        if x.masks is not None
        else dataclasses.replace(x, masks=nothing, elements=np.zeros_like(x.live))
        for x in schedules
    ]


def _cut_evenly(parts: Sequence[Chunks], chunk: int, head_patterns: Sequence[int]):
    """Items and splits of each pattern, and who computes which: `order` and `ends`.

    An item that is longer than what is left of all work keeps others waiting. Such
    items may come first, or be cut further; and where all are as long, a few tiles of
    each head may be cut to fill the last round.
    """
    heads = [parts[pattern].counts * chunk + _TO_BEGIN for pattern in head_patterns]
    share = sum(int(times.sum()) for times in heads) / PROCESSORS
    last_round = -(-(sum(map(len, heads)) % PROCESSORS) // len(heads))
    starts = np.cumsum([0, *(len(part.columns) for part in parts)])
    best: tuple[float, Any] = math.inf, None
    for most, num_cut in ((1, 0), (1, last_round), (1 / 4, 0)):
        longest = max(WORTH_SPLITTING, most * LONGEST_SHARE * share)
        pieces = [_pieces(part.counts * chunk, longest, num_cut) for part in parts]
        cut = zip(parts, starts[:-1], pieces, strict=True)
        items, splits = zip(*(_items(*each) for each in cut), strict=True)
        times = [each[:, 2] * chunk + _TO_BEGIN for each in items]
        for late in (math.inf, *(n * share / len(heads) for n in (1, 2, 4))):
            if best[0] <= (1 + _WORTH_CHANGING) * share:
                continue
            end, *shares = _share_out(times, head_patterns, late)
            end += _TO_MERGE * any(map(len, splits))
            if end < (1 - _WORTH_CHANGING) * best[0]:
                best = end, (items, splits, *shares)
    return best[1]


def _pieces(columns: np.ndarray, longest: float, num_cut: int) -> np.ndarray:
    """Into how many items each tile is cut, the shortest tiles further than others."""
    pieces = np.maximum(np.ceil(columns / longest), 1)
    shortest = np.argsort(-columns, kind="stable")[len(columns) - num_cut :]
    pieces[shortest] = np.maximum(
        pieces[shortest], np.ceil(columns[shortest] / WORTH_SPLITTING)
    )
    return pieces.astype(int)


def _items(
    chunks: Chunks, start: int, parts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The items of a pattern, longest first, and its tiles whose work is split."""
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


def _share_out(times, head_patterns, late):
    """Gives each item to the program that would be free first, head after head.

    The keys and values of one head then stay in the cache until all have read them.
    Items that take longer than `late` come before those of all heads.

    Returns:
        When the last program ends, `order` and `ends`.
    """
    free = [(0, program) for program in range(PROCESSORS)]
    shares: list[list[tuple[int, int, int]]] = [[] for _ in free]
    for is_early in (True, False):
        for head, pattern in enumerate(head_patterns):
            for item, length in enumerate(times[pattern].tolist()):
                if (length > late) == is_early:
                    busy, program = free[0]
                    shares[program].append((head, pattern, item))
                    heapq.heapreplace(free, (busy + length, program))
    ends = np.cumsum([0, *map(len, shares)], dtype=np.int32)
    order = np.array([each for share in shares for each in share])
    return max(free)[0], order, ends


def _stack(parts: Sequence[np.ndarray]) -> np.ndarray:
    width = max(part.shape[1] for part in parts)
    parts = [_pad(part, -1, max(map(len, parts)), width) for part in parts]
    return np.stack(parts)


def _pad(x, value, length=None, width=None):
    """Lengths of a few sizes, so that another random layout needs no other program."""
    rows = _bucket(max(length or len(x), 1)) - len(x)
    columns = (width or x.shape[1]) - x.shape[1]
    x = np.pad(x, ((0, rows), (0, columns)), constant_values=value)
    return x.astype(np.int32, copy=False)


def _bucket(number: int) -> int:
    """The next eighth of a power of two."""
    step = 2 ** max(int(number - 1).bit_length() - 4, 0) if number > 1 else 1
    return -(-number // step) * step
