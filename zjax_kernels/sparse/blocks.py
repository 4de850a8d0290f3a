"""Lists of live blocks for the parts of a rule: windows, global and random blocks.

`visible` says how far each row may look: row r sees the blocks before `visible[r]`.
"""

from collections.abc import Sequence

import numpy as np

from zjax_kernels.sparse.layout import Pattern

Spans = tuple[np.ndarray, np.ndarray]
"""First block of each row, and the one after its last."""


def windows(num_blocks: int, sizes: Sequence[int]) -> Spans:
    """Windows side by side, in which all see all; the last size repeats.

    Args:
        num_blocks: Blocks of the sequence.
        sizes: Blocks of the first windows.

    Returns:
        The window of each row.

    Example:
        >>> starts, stops = windows(6, [1, 2])
        >>> starts.tolist(), stops.tolist()
        ([0, 1, 1, 3, 3, 5], [1, 3, 3, 5, 5, 7])
    """
    rest = max(num_blocks - sum(sizes), 0)
    repeats = -(-rest // sizes[-1])
    edges = np.cumsum([0, *sizes, *[sizes[-1]] * repeats])
    number = np.searchsorted(edges, np.arange(num_blocks), side="right")
    return edges[number - 1], edges[number]


def sliding_window(num_blocks: int, width: int) -> Spans:
    """A window about each row, `width // 2` blocks to either side.

    Args:
        num_blocks: Blocks of the sequence.
        width: Blocks of the window; an even one holds one more.

    Returns:
        The window of each row.
    """
    rows = np.arange(num_blocks)
    return np.maximum(rows - width // 2, 0), rows + width // 2 + 1


def global_blocks(
    indices: Sequence[int], ends: Sequence[int] | None, num_blocks: int
) -> np.ndarray:
    """The blocks that are listed and exist.

    Args:
        indices: Each block, or the first of each range.
        ends: Block after the last of each range; None for ranges of one block.
        num_blocks: Blocks of the sequence.

    Returns:
        Their numbers, ascending.

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
    """The blocks of one span per row.

    Args:
        spans: The span of each row.
        visible: How far each row may look.

    Returns:
        The pattern.
    """
    starts, stops = spans
    lengths = np.minimum(stops, visible) - starts
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    shifts = np.repeat(starts - bounds[:-1], lengths)
    return Pattern(bounds, (shifts + np.arange(len(shifts))).astype(np.int32))


def global_pattern(
    spans: Spans, columns: np.ndarray, visible: np.ndarray, *, horizontal: bool
) -> Pattern:
    """One span per row, and blocks that all rows see.

    Args:
        spans: The span of each row.
        columns: The global blocks, ascending.
        visible: How far each row may look.
        horizontal: Whether the global blocks see all in turn.

    Returns:
        The pattern.
    """
    if horizontal:
        starts, stops = (side.copy() for side in spans)
        starts[columns], stops[columns] = 0, len(visible)
        spans = starts, stops
    seen = np.searchsorted(columns, visible)
    picks = span_pattern((np.zeros_like(seen), seen), seen)
    everywhere = Pattern(picks.starts, columns[picks.columns].astype(np.int32))
    return union(span_pattern(spans, visible), everywhere)


def random_pattern(
    visible: np.ndarray, count: int, generator: np.random.Generator
) -> Pattern:
    """Draws distinct blocks for each row, each set as likely as any other.

    Args:
        visible: How far each row may look.
        count: Blocks per row; a row that sees fewer takes them all.
        generator: Source of chance.

    Returns:
        The pattern.

    Reference:
        Bentley and Floyd, "A sample of brilliance", Communications of the ACM 30 (9),
        1987: a block that was drawn before gives way to the last one in reach.
    """
    num_blocks = len(visible)
    drawn = np.full((count, num_blocks), -1)
    for step in range(count):
        last = visible - count + step
        picks = generator.integers(0, np.maximum(last, 0) + 1)
        taken = (drawn[:step] == picks).any(axis=0)
        drawn[step] = np.where(last < 0, -1, np.where(taken, last, picks))
    steps, rows = np.nonzero(drawn >= 0)
    return Pattern.from_entries(rows, drawn[steps, rows], num_blocks, num_blocks)


def random_heads(
    base: Pattern, visible: np.ndarray, count: int, *, seed: int, num_patterns: int
) -> list[Pattern]:
    """Adds random blocks to a pattern, others for each head.

    Args:
        base: Blocks that all heads have.
        visible: How far each row may look.
        count: Random blocks per row.
        seed: Says with the number of the head which ones are drawn.
        num_patterns: Number of heads to draw for.

    Returns:
        The pattern of each head.
    """
    if not count:
        return [base] * num_patterns
    generators = [np.random.default_rng((seed, head)) for head in range(num_patterns)]
    return [union(base, random_pattern(visible, count, rng)) for rng in generators]


def union(first: Pattern, second: Pattern) -> Pattern:
    """The blocks that live in either of two patterns.

    Args:
        first: A square pattern.
        second: Another one of its size.

    Returns:
        The pattern of both.
    """
    num_blocks = len(first.starts) - 1
    rows = np.concatenate([first.rows, second.rows])
    columns = np.concatenate([first.columns, second.columns])
    return Pattern.from_entries(rows, columns, num_blocks, num_blocks)
