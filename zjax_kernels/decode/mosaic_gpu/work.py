"""Sizes of a call, and the keys that each program reads."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from zjax_kernels.decode.reference import Cache
from zjax_kernels.decode.tuning import Tuning
from zjax_kernels.device import NUM_SMS
from zjax_kernels.sparse.mosaic_gpu.arithmetic import index

TILE = 64
"""Rows of a tile of queries: pairs of a token and a head of the group."""
STEP = 64
"""Keys that a program reads at a time."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Static sizes of a call.

    Args:
        chunks: Number of chunks.
        tokens: Tokens of a chunk.
        num_heads: Heads of keys.
        group: Query heads per head of keys.
        page_size: Tokens per page.
        table_size: Pages of a row, at most.
        tuning: Choices that set how fast the kernel runs.
    """

    chunks: int
    tokens: int
    num_heads: int
    group: int
    page_size: int
    table_size: int
    tuning: Tuning

    @classmethod
    def of(cls, q: jax.Array, cache: Cache, tuning: Tuning) -> "Sizes":
        """Reads the sizes of arrays."""
        chunks, tokens, heads, _ = q.shape
        _, num_heads, page_size, _ = cache.keys.shape
        group, table_size = heads // num_heads, cache.pages.shape[1]
        return cls(chunks, tokens, num_heads, group, page_size, table_size, tuning)

    @property
    def tiles(self) -> int:
        """Number of tiles of a chunk and head of keys."""
        return -(-self.tokens * self.group // TILE)

    @property
    def rows(self) -> int:
        """Rows of a tile that are copied: multiples of 8 are."""
        return min(TILE, -(-self.tokens * self.group // 8) * 8)

    @property
    def items(self) -> int:
        """Number of tiles of all chunks and heads of keys."""
        return self.chunks * self.num_heads * self.tiles

    @property
    def splits(self) -> int:
        """Number of programs that share the keys of a tile."""
        steps = -(-self.table_size * self.page_size // STEP)
        most = -(-steps // self.tuning.min_steps)
        programs = self.tuning.programs_per_sm * NUM_SMS
        return max(1, min(most, programs // self.items))

    @property
    def copies(self) -> int:
        """Number of pages, or parts of one page, that a step copies."""
        return max(1, STEP // self.page_size)


class Split(NamedTuple):
    """Keys that a program reads for a tile of queries.

    Args:
        item: Index of the tile of all chunks and heads.
        chunk: Index of the chunk.
        head: Head of keys.
        split: Index of the split.
        first_row: First row of the tile, within all rows of chunk and head.
        start: Position of the first token of the chunk.
        end: Number of keys that the last token of the tile sees, from the first key of
            the row.
        first: First step.
        num_steps: Number of steps.
    """

    item: jax.Array
    chunk: jax.Array
    head: jax.Array
    split: jax.Array
    first_row: jax.Array
    start: jax.Array
    end: jax.Array
    first: jax.Array
    num_steps: jax.Array


def find_split(
    sizes: Sizes, window: int, starts: Any, counts: Any, program: jax.Array
) -> Split:
    """Returns the keys of a program; `starts` and `counts` are in global memory."""
    item, split = _divide(program, sizes.splits)
    pair, tile = _divide(item, sizes.tiles)
    chunk, head = _divide(pair, sizes.num_heads)
    start, count = starts[chunk], counts[chunk]
    first_row = tile * index(TILE)
    first_token, _ = _divide(first_row, sizes.group)
    last_token, _ = _divide(first_row + index(TILE - 1), sizes.group)
    end = start + jnp.minimum(last_token + 1, count)
    end = jnp.where(first_token < count, end, index(0))
    begin = jnp.maximum(start + first_token - window + 1, 0) if window else index(0)
    first, _ = _divide(begin, STEP)
    steps = _divide(end + index(STEP - 1), STEP)[0] - first
    per_split, _ = _divide(steps + index(sizes.splits - 1), sizes.splits)
    per_split = jnp.maximum(per_split, sizes.tuning.min_steps)
    before = split * per_split
    return Split(
        item,
        chunk,
        head,
        split,
        first_row,
        start,
        end,
        first=first + before,
        num_steps=jnp.minimum(steps - before, per_split),
    )


def _divide(x, by):
    """Returns quotient and remainder."""
    return lax.div(x, index(by)), lax.rem(x, index(by))
