"""Sizes of a call, and the keys that each program reads."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from zjax_kernels.decode.reference import Cache
from zjax_kernels.decode.tuning import SPLITS, Tuning
from zjax_kernels.device import NUM_SMS
from zjax_kernels.sparse.mosaic_gpu.arithmetic import index

TILE = 64
"""Rows of a tile of queries: pairs of a token and a head of the group."""
STEP = 64
"""Keys that a program reads at a time."""
NUMBERS = 8
"""Times that a log-sum-exp is stored: copies take 32 bytes."""


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
        channels: Channels of a head.
        tuning: Choices that set how fast the kernel runs.
    """

    chunks: int
    tokens: int
    num_heads: int
    group: int
    page_size: int
    table_size: int
    channels: int
    tuning: Tuning

    @classmethod
    def of(cls, q: jax.Array, cache: Cache, tuning: Tuning) -> "Sizes":
        """Reads the sizes of arrays."""
        chunks, tokens, heads, channels = q.shape
        _, num_heads, page_size, _ = cache.keys.shape
        group, table_size = heads // num_heads, cache.pages.shape[1]
        return cls(
            chunks,
            tokens,
            num_heads,
            group,
            page_size,
            table_size,
            channels,
            tuning,
        )

    @property
    def head_tiles(self) -> int:
        """Number of tiles of a token and head of keys; 1 for groups up to `TILE`."""
        return -(-self.group // TILE)

    @property
    def tile_heads(self) -> int:
        """Query heads of a tile; the last tile of a large group overlaps another."""
        return -(-self.group // self.head_tiles)

    @property
    def tile_tokens(self) -> int:
        """Tokens of a tile, a divisor of the tokens: copies of tiles are boxes."""
        most = TILE // self.tile_heads
        return max(n for n in range(1, most + 1) if self.tokens % n == 0)

    @property
    def rows(self) -> int:
        """Rows of a tile that hold queries."""
        return self.tile_tokens * self.tile_heads

    @property
    def shared_rows(self) -> int:
        """Rows of a tile that programs of a cluster share, a multiple of 8."""
        return -(-self.rows // 8) * 8

    @property
    def shared_shape(self) -> tuple[int, int]:
        """Shape of outputs and log-sum-exps of all programs."""
        return self.items * self.splits * self.shared_rows, self.channels + NUMBERS

    @property
    def items(self) -> int:
        """Number of tiles of all chunks and heads of keys."""
        tiles = self.tokens // self.tile_tokens * self.head_tiles
        return self.chunks * self.num_heads * tiles

    @property
    def most_splits(self) -> int:
        """Number of programs that may share the keys of a tile, 1 or more."""
        steps = -(-self.table_size * self.page_size // STEP)
        programs = self.tuning.programs_per_sm * NUM_SMS
        useful = -(-steps // self.tuning.min_steps)
        return max(1, min(useful, programs // self.items))

    @property
    def splits(self) -> int:
        """Number of programs that share the keys of a tile: a cluster."""
        return max(number for number in SPLITS if number <= self.most_splits)

    @property
    def copies(self) -> int:
        """Number of pages, or parts of one page, that a step copies."""
        return max(1, STEP // self.page_size)


class Split(NamedTuple):
    """Keys that a program reads for a tile of queries.

    Args:
        item: Index of the tile among all tiles.
        chunk: Index of the chunk.
        head: Head of keys.
        split: Index of the split.
        first_token: First token of the tile, within the chunk.
        first_head: First query head of the tile.
        start: Position of the first token of the chunk.
        num_tokens: Tokens of the chunk that count.
        end: Number of keys that the last token of the tile sees, from the first key of
            the row; 0 if no token of the tile counts.
        begin: First key that the first token of the tile sees.
        first: First step.
        num_steps: Number of steps, 0 or less for none.
        num_settled: Number of first steps whose keys older calls have written; 0 for
            chunks of several tokens, whose row may have written other chunks just now.
    """

    item: jax.Array
    chunk: jax.Array
    head: jax.Array
    split: jax.Array
    first_token: jax.Array
    first_head: jax.Array
    start: jax.Array
    num_tokens: jax.Array
    end: jax.Array
    begin: jax.Array
    first: jax.Array
    num_steps: jax.Array
    num_settled: jax.Array


def find_split(
    sizes: Sizes,
    window: int,
    starts: Any,
    counts: Any,
    item: jax.Array,
    split: jax.Array,
) -> Split:
    """Returns the keys of a program; `starts` and `counts` are in global memory."""
    pair, tile = _divide(item, sizes.items // (sizes.chunks * sizes.num_heads))
    chunk, head = _divide(pair, sizes.num_heads)
    token_tile, head_tile = _divide(tile, sizes.head_tiles)
    first_token = token_tile * index(sizes.tile_tokens)
    last_head = index(sizes.group - sizes.tile_heads)
    first_head = jnp.minimum(head_tile * index(sizes.tile_heads), last_head)
    start, count = starts[chunk], counts[chunk]
    end = start + jnp.minimum(first_token + sizes.tile_tokens, count)
    end = jnp.where(first_token < count, end, index(0))
    begin = jnp.maximum(start + first_token - window + 1, 0) if window else index(0)
    first, _ = _divide(begin, STEP)
    steps = jnp.maximum(_divide(end + index(STEP - 1), STEP)[0] - first, 0)
    per_split, _ = _divide(steps + index(sizes.splits - 1), sizes.splits)
    before = split * per_split
    num_steps = jnp.minimum(steps - before, per_split)
    is_token = sizes.tokens == 1
    num_old = _divide(start, STEP)[0] - (first + before) if is_token else index(0)
    return Split(
        item,
        chunk,
        head,
        split,
        first_token,
        head * index(sizes.group) + first_head,
        start,
        count,
        end,
        begin,
        first=first + before,
        num_steps=num_steps,
        num_settled=jnp.minimum(jnp.maximum(num_old, 0), num_steps),
    )


def _divide(x, by):
    """Returns quotient and remainder."""
    return lax.div(x, index(by)), lax.rem(x, index(by))
