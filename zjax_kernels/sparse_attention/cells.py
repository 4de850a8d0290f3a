"""The live cells of an attention matrix: blocks, or the parts of blocks of 128."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from zjax_kernels.sparse_attention.layout import BlockLayout, Pattern

TILE = 128
"""Rows that one program computes together."""
HALF = 64
"""Rows of one warpgroup, of which a program has two; no cell is larger."""


@dataclasses.dataclass(frozen=True, eq=False)
class Cells:
    """Live cells of one pattern; numbers of cells are those of the padded lengths.

    Args:
        rows: int64[cells] row of each.
        columns: int64[cells] column of each.
        cut: bool[cells], whether causality cuts it token by token.
        ragged: bool[cells], whether `mask` hides some of its tokens.
        num_rows: Rows, a whole number of tiles.
        num_columns: Columns, a whole number of tiles.
        size: Tokens per side.
        mask: bool[tokens, tokens] that hides single tokens, or none; columns beyond
            its width begin anew.
    """

    rows: np.ndarray
    columns: np.ndarray
    cut: np.ndarray
    ragged: np.ndarray
    num_rows: int
    num_columns: int
    size: int
    mask: np.ndarray | None = None

    @classmethod
    def of(
        cls, pattern: Pattern, layout: BlockLayout, mask: np.ndarray | None = None
    ) -> "Cells":
        """Takes the blocks of a pattern apart.

        Args:
            pattern: One of the patterns of `layout`.
            layout: Its blocks' size, and whether it is causal.
            mask: bool[S, T] of tokens that see each other, or none.

        Returns:
            The cells.
        """
        cell = min(layout.block, HALF)
        fine = np.arange(layout.block // cell)
        rows = pattern.rows.astype(np.int64)[:, None, None] * len(fine) + fine[:, None]
        columns = pattern.columns[:, None, None] * len(fine) + fine
        rows, columns = (x.reshape(-1) for x in np.broadcast_arrays(rows, columns))
        seen = columns <= rows if layout.causal else np.ones(len(rows), bool)
        sizes = layout.num_rows, layout.num_columns
        tokens = [-(-size * layout.block // TILE) * TILE for size in sizes]
        ragged = np.zeros(len(rows), bool)
        if mask is not None:
            padding = [
                (0, n - size) for n, size in zip(tokens, mask.shape, strict=True)
            ]
            mask = np.pad(mask, padding)
            shape = (tokens[0] // cell, cell, tokens[1] // cell, cell)
            some, every = (
                f(mask.reshape(shape), axis=(1, 3)) for f in (np.any, np.all)
            )
            seen &= some[rows, columns]
            ragged = ~every[rows, columns]
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
            np.concatenate([head.columns for head in heads]),
            np.concatenate([x.rows + i * x.num_rows for i, x in enumerate(heads)]),
            np.concatenate([head.cut for head in heads]),
            np.concatenate([head.ragged for head in heads]),
            first.num_columns,
            first.num_rows * len(heads),
            first.size,
            None if first.mask is None else first.mask.T,
        )
