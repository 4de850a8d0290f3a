"""The live cells of an attention matrix: blocks, or the parts of blocks of 128."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from zjax_kernels.sparse.layout import BlockLayout, Pattern

TILE = 128
"""Rows that one program computes together."""
HALF = 64
"""Rows of one warpgroup, of which a program has two; no cell is larger."""


Mask = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Whether tokens see each other: of numbers of queries and of keys, which broadcast."""
_AT_ONCE = 2**24
"""Pairs of tokens that a mask is asked for at one time."""


@dataclasses.dataclass(frozen=True, eq=False)
class Cells:
    """Live cells of one pattern; numbers of cells are those of the padded lengths.

    Args:
        rows: int32[cells] row of each.
        columns: int32[cells] column of each.
        cut: bool[cells], whether causality cuts it token by token.
        ragged: bool[cells], whether `mask` hides some of its tokens.
        num_rows: Rows, a whole number of tiles.
        num_columns: Columns, a whole number of tiles.
        size: Tokens per side.
        mask: Says of numbers of tokens, row and column, whether they see each other;
            none where all in live cells do.
    """

    rows: np.ndarray
    columns: np.ndarray
    cut: np.ndarray
    ragged: np.ndarray
    num_rows: int
    num_columns: int
    size: int
    mask: Mask | None = None

    @classmethod
    def of(
        cls, pattern: Pattern, layout: BlockLayout, mask: Mask | None = None
    ) -> "Cells":
        """Takes the blocks of a pattern apart.

        Args:
            pattern: One of the patterns of `layout`.
            layout: Its blocks' size, and whether it is causal.
            mask: Which queries see which keys, by number, or none.

        Returns:
            The cells.
        """
        cell = min(layout.block, HALF)
        fine = np.arange(layout.block // cell, dtype=np.int32)
        rows = pattern.rows[:, None] * np.int32(len(fine)) + fine[:, None, None]
        columns = pattern.columns[:, None] * np.int32(len(fine)) + fine
        rows, columns = (x.reshape(-1) for x in np.broadcast_arrays(rows, columns))
        seen = columns <= rows if layout.causal else np.ones(len(rows), bool)
        sizes = layout.num_rows, layout.num_columns
        tokens = [-(-size * layout.block // TILE) * TILE for size in sizes]
        ragged = np.zeros(len(rows), bool)
        if mask is not None:
            some, every = _look(mask, rows, columns, cell)
            seen &= some
            ragged = ~every
        rows, columns, ragged = rows[seen], columns[seen], ragged[seen]
        cut = (rows == columns) & layout.causal
        num_rows, num_columns = (n // cell for n in tokens)
        return cls(rows, columns, cut, ragged, num_rows, num_columns, cell, mask)

    @classmethod
    def of_group(cls, heads: Sequence["Cells"]) -> "Cells":
        """Turns heads about: rows are keys, columns the queries of all heads in turn.

        Args:
            heads: Cells of the heads that share keys.

        Returns:
            The cells of the head of keys.
        """
        first = heads[0]
        return cls(
            _join([head.columns for head in heads]),
            _join(
                [x.rows + i * x.num_rows if i else x.rows for i, x in enumerate(heads)]
            ),
            _join([head.cut for head in heads]),
            _join([head.ragged for head in heads]),
            first.num_columns,
            first.num_rows * len(heads),
            first.size,
            first.mask and _turn(first.mask, first.num_rows * first.size),
        )


def _join(parts):
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _look(mask, rows, columns, cell):
    """Whether some tokens of each cell see each other, and whether all do."""
    within = np.arange(cell)
    some, every = np.zeros((2, len(rows)), bool)
    step = _AT_ONCE // cell**2
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        queries, keys = (x[part, None, None].astype(int) for x in (rows, columns))
        queries, keys = queries * cell + within[:, None], keys * cell + within
        shape = np.broadcast_shapes(queries.shape, keys.shape)
        live = np.broadcast_to(mask(queries, keys), shape)
        some[part], every[part] = live.any(axis=(1, 2)), live.all(axis=(1, 2))
    return some, every


def _turn(mask, num_queries):
    return lambda keys, queries: mask(queries % num_queries, keys)
