"""Windows, global blocks and random blocks, of which patterns are built.

`visible[r]` counts the blocks that row r may see, from block 0 on.
"""

from collections.abc import Sequence

import numpy as np

from zjax_kernels.sparse.layout import Pattern

Spans = tuple[np.ndarray, np.ndarray]
"""First block of each row, and one past the last block."""


def windows(num_blocks: int, sizes: Sequence[int]) -> Spans:
    """Returns adjacent windows of the given sizes in blocks; the last size repeats.

    Example:
        >>> starts, stops = windows(6, [1, 2])
        >>> starts.tolist(), stops.tolist()
        ([0, 1, 1, 3, 3, 5], [1, 3, 3, 5, 5, 7])
    """
    remaining = max(num_blocks - sum(sizes), 0)
    repeats = -(-remaining // sizes[-1])
    edges = np.cumsum([0, *sizes, *[sizes[-1]] * repeats])
    number = np.searchsorted(edges, np.arange(num_blocks), side="right")
    return edges[number - 1], edges[number]


def sliding_window(num_blocks: int, width: int) -> Spans:
    """Returns a window around each row, `width // 2` blocks to either side."""
    rows = np.arange(num_blocks)
    # Ends beyond the sequence are cut where `visible` is known.
    return np.maximum(rows - width // 2, 0), rows + width // 2 + 1


def global_blocks(
    indices: Sequence[int], ends: Sequence[int] | None, num_blocks: int
) -> np.ndarray:
    """Returns the listed blocks, or all blocks of ranges up to `ends`, ascending.

    Example:
        >>> global_blocks([6, 0], [9, 2], 8).tolist()
        [0, 1, 6, 7]
    """
    ends = [index + 1 for index in indices] if ends is None else ends
    listed = np.zeros(num_blocks, bool)
    for start, end in zip(indices, ends, strict=True):
        listed[start:end] = True
    return np.flatnonzero(listed)


def span_pattern(spans: Spans, visible: np.ndarray) -> Pattern:
    """Builds the pattern of one span per row, cut at `visible`."""
    starts, stops = spans
    lengths = np.minimum(stops, visible) - starts
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    shifts = np.repeat(starts - bounds[:-1], lengths)
    return Pattern(bounds, (shifts + np.arange(len(shifts))).astype(np.int32))


def global_pattern(
    spans: Spans, columns: np.ndarray, visible: np.ndarray, *, horizontal: bool
) -> Pattern:
    """Builds the pattern of one span per row and of blocks that all rows see.

    `horizontal` lets the rows of global blocks see all blocks.
    """
    if horizontal:
        # Copied: patterns of several heads are made from these spans.
        starts, stops = (side.copy() for side in spans)
        starts[columns], stops[columns] = 0, len(visible)
        spans = starts, stops
    seen = np.searchsorted(columns, visible)
    seen_blocks = span_pattern((np.zeros_like(seen), seen), seen)
    seen_by_all = Pattern(
        seen_blocks.starts, columns[seen_blocks.columns].astype(np.int32)
    )
    return union(span_pattern(spans, visible), seen_by_all)


def random_pattern(
    visible: np.ndarray, count: int, generator: np.random.Generator
) -> Pattern:
    """Draws `count` distinct visible blocks per row, or all if fewer are visible.

    Reference:
        Bentley and Floyd, "A sample of brilliance", Communications of the ACM 30 (9),
        1987: a block drawn twice is replaced by the last one in reach.
    """
    num_blocks = len(visible)
    drawn = np.full((count, num_blocks), -1)
    for step in range(count):
        last = visible - count + step
        picks = generator.integers(0, np.maximum(last, 0) + 1)
        taken = (drawn[:step] == picks).any(axis=0)
        # Rows with fewer visible blocks skip early steps, and draw every block.
        drawn[step] = np.where(last < 0, -1, np.where(taken, last, picks))
    steps, rows = np.nonzero(drawn >= 0)
    return Pattern.from_entries(rows, drawn[steps, rows], num_blocks, num_blocks)


def union(first: Pattern, second: Pattern) -> Pattern:
    """Returns the blocks that live in either of two square patterns of one size."""
    num_blocks = len(first.starts) - 1
    rows = np.concatenate([first.rows, second.rows])
    columns = np.concatenate([first.columns, second.columns])
    return Pattern.from_entries(rows, columns, num_blocks, num_blocks)
