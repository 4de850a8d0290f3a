"""Layouts: live blocks of the attention matrix in compressed sparse rows."""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from zjax_kernels.device import invalid, refuse
from zjax_kernels.sparse.arguments import integer_problems

BLOCKS = (16, 32, 64, 128)
"""Block sizes of the kernels, in tokens per side."""


# Patterns hash by identity, as keys of dictionaries.
@dataclasses.dataclass(frozen=True, eq=False)
class Pattern:
    """Live blocks of one attention matrix in compressed sparse rows.

    Args:
        starts: int64[rows + 1]; row r holds entries `starts[r]` to `starts[r + 1]`.
        columns: int32[entries], ascending within a row.
    """

    starts: np.ndarray
    columns: np.ndarray

    @classmethod
    def from_entries(
        cls, rows: np.ndarray, columns: np.ndarray, num_rows: int, num_columns: int
    ) -> "Pattern":
        """Builds a pattern from coordinates of live blocks, in any order, with repeats.

        Raises:
            ValueError: A block lies outside.
        """
        for name, found, limit in (
            ("rows", rows, num_rows),
            ("columns", columns, num_columns),
        ):
            if len(found) and not 0 <= found.min() <= found.max() < limit:
                ends = int(found.min()), int(found.max())
                problem = f"is not from 0 to {limit - 1}"
                raise invalid(name, ends, problem, "number blocks from 0")
        keys = rows.astype(np.int64) * num_columns + columns
        keys.sort(kind="stable")  # merges sorted runs in linear time
        keys = keys[np.diff(keys, prepend=-1) != 0]
        starts = np.searchsorted(keys, np.arange(num_rows + 1) * num_columns)
        return cls(starts, (keys % num_columns).astype(np.int32))

    @property
    def rows(self) -> np.ndarray:
        """Block row of each entry, int32[entries]."""
        numbers = np.arange(len(self.starts) - 1, dtype=np.int32)
        return np.repeat(numbers, np.diff(self.starts))


@dataclasses.dataclass(frozen=True, eq=False)
class BlockLayout:
    """Live blocks of every head; equal heads share a pattern.

    Args:
        block: Tokens per side of a block: 16, 32, 64 or 128.
        num_rows: Block rows: queries over `block`.
        num_columns: Block columns: keys over `block`.
        patterns: Distinct patterns.
        head_patterns: Index of each head's pattern.
        causal: Whether a token sees no later one: blocks above the diagonal are dead,
            and blocks on the diagonal are masked token by token.

    Raises:
        ValueError: Patterns of another shape, heads without a pattern, or another block
            size.

    Example:
        >>> live = np.tri(4, dtype=bool)
        >>> layout = BlockLayout.from_dense(live, block=16, num_heads=2)
        >>> layout.num_heads, len(layout.patterns), layout.density
        (2, 1, 0.625)
    """

    block: int
    num_rows: int
    num_columns: int
    patterns: tuple[Pattern, ...]
    head_patterns: tuple[int, ...]
    causal: bool = False

    def __post_init__(self):
        if self.block not in BLOCKS:
            problem, remedy = "is not a block size", "use 16, 32, 64 or 128"
            raise invalid("block", self.block, problem, remedy)
        _check("patterns", self.patterns, self.num_columns)
        num_rows = len(self.patterns[0].starts) - 1
        if self.num_rows != num_rows:
            problem = "is not that of the patterns"
            raise invalid("num_rows", self.num_rows, problem, f"use {num_rows}")
        numbers = range(len(self.patterns))
        if not self.head_patterns or not set(self.head_patterns) <= set(numbers):
            problem = f"is not from 0 to {numbers[-1]} for each head"
            remedy = "number the patterns from 0"
            raise invalid("head_patterns", self.head_patterns, problem, remedy)

    @classmethod
    def from_heads(
        cls,
        heads: Sequence[Pattern],
        *,
        block: int,
        num_columns: int,
        causal: bool = False,
    ) -> "BlockLayout":
        """Builds a layout from one pattern per head, storing equal patterns once.

        `causal` drops blocks above the diagonal.

        Raises:
            ValueError: Patterns of different shapes, or another block size.
        """
        _check("heads", heads, num_columns)
        numbers: dict[Pattern, int] = {}
        distinct: dict[tuple[bytes, bytes], int] = {}
        patterns: list[Pattern] = []
        # Heads often share the object: bytes are compared once per object.
        for pattern in dict.fromkeys(heads):
            lower = _lower(pattern, num_columns) if causal else pattern
            key = lower.starts.tobytes(), lower.columns.tobytes()
            if key not in distinct:
                distinct[key] = len(patterns)
                patterns.append(lower)
            numbers[pattern] = distinct[key]
        head_patterns = tuple(numbers[pattern] for pattern in heads)
        num_rows = len(patterns[0].starts) - 1
        return cls(block, num_rows, num_columns, tuple(patterns), head_patterns, causal)

    @classmethod
    def from_dense(
        cls,
        live: np.ndarray,
        *,
        block: int,
        num_heads: int | None = None,
        causal: bool = False,
    ) -> "BlockLayout":
        """Builds a layout from an array.

        Args:
            live: bool[rows, columns] for all heads, or bool[heads, rows, columns];
                numbers other than 0 are live.
            block: Tokens per side of a block: 16, 32, 64 or 128.
            num_heads: Number of heads; required for [rows, columns].
            causal: Whether a token sees no later one; drops blocks above the diagonal.

        Raises:
            ValueError: The array has another shape or holds no numbers.
        """
        live = np.asarray(live)
        refuse([] if num_heads is None else integer_problems("num_heads", num_heads, 1))
        if not np.can_cast(live.dtype, float):
            problem, remedy = "is not bool", "give True where a block lives"
            raise invalid("live.dtype", live.dtype, problem, remedy)
        # NaN, which differs from itself, would count as live.
        if (live != live).any():
            problem, remedy = "is neither True nor False", "give True or False"
            raise invalid("live", "nan", problem, remedy)
        if live.ndim == 2 and num_heads is not None:
            live = np.broadcast_to(live, (num_heads, *live.shape))
        if live.ndim != 3 or num_heads not in (None, live.shape[0]) or 0 in live.shape:
            problem = "is not a layout"
            remedy = "give [heads, rows, columns], or [rows, columns] and num_heads"
            if num_heads is not None:
                problem = f"is not a layout of {num_heads} heads"
            raise invalid("live.shape", live.shape, problem, remedy)
        _, num_rows, num_columns = live.shape
        # Equal heads are converted once.
        same = all(np.array_equal(head, live[0]) for head in live[1:])
        heads = []
        for head in live[:1] if same else live:
            rows, columns = np.nonzero(head)
            heads.append(Pattern.from_entries(rows, columns, num_rows, num_columns))
        heads *= len(live) // len(heads)
        return cls.from_heads(
            heads, block=block, num_columns=num_columns, causal=causal
        )

    @property
    def num_heads(self) -> int:
        """Number of heads."""
        return len(self.head_patterns)

    @functools.cached_property
    def density(self) -> float:
        """Fraction of live blocks, over all heads."""
        live = sum(len(self.patterns[number].columns) for number in self.head_patterns)
        return live / (self.num_heads * self.num_rows * self.num_columns)

    def split_heads(self, num_shards: int) -> "list[BlockLayout]":
        """Splits the layout into `num_shards` layouts of consecutive heads.

        Returns:
            One layout per device; equal layouts are one object.

        Raises:
            ValueError: `num_shards` does not divide the heads.

        Example:
            >>> live = np.ones((4, 2, 2), bool)
            >>> layout = BlockLayout.from_dense(live, block=64)
            >>> [part.num_heads for part in layout.split_heads(2)]
            [2, 2]
        """
        refuse(integer_problems("head_shards", num_shards, 1))
        if self.num_heads % num_shards:
            problem = f"does not divide the {self.num_heads} heads of the layout"
            raise invalid("head_shards", num_shards, problem, "use a divisor")
        size = self.num_heads // num_shards
        starts = range(0, self.num_heads, size)
        parts = [self.head_patterns[start : start + size] for start in starts]
        found = {numbers: self._with_heads(numbers) for numbers in dict.fromkeys(parts)}
        return [found[numbers] for numbers in parts]

    def _with_heads(self, numbers):
        """Returns the layout of heads with these pattern numbers."""
        used = list(dict.fromkeys(numbers))
        return dataclasses.replace(
            self,
            patterns=tuple(self.patterns[number] for number in used),
            head_patterns=tuple(used.index(number) for number in numbers),
        )

    def to_dense(self) -> np.ndarray:
        """Returns the layout as bool[heads, rows, columns]."""
        live = np.zeros((len(self.patterns), self.num_rows, self.num_columns), bool)
        for number, pattern in enumerate(self.patterns):
            live[number, pattern.rows, pattern.columns] = True
        return live[list(self.head_patterns)]


def check_layout(layout: object) -> None:
    """Refuses everything but a layout, such as a rule that makes layouts."""
    if not isinstance(layout, BlockLayout):
        remedy = "give rule.layout(seq_len), or BlockLayout.from_dense(live, ...)"
        raise invalid("layout", type(layout).__name__, "is not a layout", remedy)


def _check(name, patterns, num_columns):
    """Refuses patterns that are missing, of different shapes, or too wide."""
    if not patterns:
        raise invalid(name, "[]", "is empty", "give one pattern per head")
    rows = sorted({len(pattern.starts) - 1 for pattern in patterns})
    if len(rows) > 1:
        problem, remedy = "have different numbers of rows", "give patterns of one shape"
        raise invalid(name, rows, problem, remedy)
    last = max(int(pattern.columns.max(initial=-1)) for pattern in set(patterns))
    if last >= num_columns:
        problem = f"has a block in column {last}"
        raise invalid("num_columns", num_columns, problem, f"use {last + 1} or more")


def _lower(pattern: Pattern, num_columns: int) -> Pattern:
    """Drops the blocks above the diagonal."""
    rows = pattern.rows
    lower = pattern.columns <= rows
    # As given, so that heads that share the pattern go on sharing.
    if lower.all():
        return pattern
    num_rows = len(pattern.starts) - 1
    return Pattern.from_entries(
        rows[lower], pattern.columns[lower], num_rows, num_columns
    )


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
