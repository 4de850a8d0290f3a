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
    """Refuses everything but a layout, such as a rule that makes layouts.

    Example:
        >>> check_layout(BlockLayout.from_dense(np.eye(2), block=16, num_heads=1))
    """
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
