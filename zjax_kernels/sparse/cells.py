"""Live cells of an attention matrix: blocks, or 64 x 64 quarters of blocks of 128."""

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
        rows: int32[cells], row of the cell.
        columns: int32[cells], column of the cell.
        diagonal: bool[cells], whether causality hides tokens of the cell.
        masked: bool[cells], whether `mask` hides tokens of the cell.
        num_rows: Number of rows of cells, a multiple of a tile.
        num_columns: Number of columns of cells, a multiple of a tile.
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
