"""What kernels of paged attention share: copies of pages, and what rows see."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from zjax_kernels.decode.mosaic_gpu.work import STEP, TILE, Sizes, Split
from zjax_kernels.decode.reference import Options
from zjax_kernels.sparse.mosaic_gpu.arithmetic import Arithmetic, index


@dataclasses.dataclass(frozen=True)
class Tile:
    """A tile of queries, and some of the keys of the row.

    Args:
        sizes: Static sizes.
        options: Numbers of the scores.
        place: Keys that the program reads.
        memory: Shared memory.
        arithmetic: Operations on registers.
    """

    sizes: Sizes
    options: Options
    place: Split
    memory: Any
    arithmetic: Arithmetic

    def first_key(self, step: Array) -> Array:
        """Returns the number of the first key of a step in the row."""
        return (self.place.first + step) * STEP

    def stage(self, step: Array) -> Array:
        """Returns the stage of a step."""
        return lax.rem(step, index(self.sizes.tuning.stages))

    def read_pages(self, pages: Any, step: Array) -> list[Array]:
        """Reads the pages of a step from global memory."""
        sizes = self.sizes
        first = lax.div(self.first_key(step), index(sizes.page_size))
        # Steps run beyond the end of a row, which may be the end of the table.
        last = index(sizes.table_size - 1)
        numbers = [jnp.minimum(first + nth, last) for nth in range(sizes.copies)]
        if self.options.window and sizes.page_size < STEP:
            # Pages before the window may hold NaN, and NaN if multiplied by 0.
            seen = lax.div(self.place.begin, index(sizes.page_size))
            numbers = [jnp.maximum(number, seen) for number in numbers]
        return [pages[self.place.chunk, number] for number in numbers]

    def copy_pages(
        self, pool: Any, pages: list[Array], step: Array, ring: Any, ready: Any
    ) -> None:
        """Starts to copy a step of a pool, some pages or a part of one, to a ring."""
        sizes, stage = self.sizes, self.stage(step)
        size = STEP // sizes.copies
        within = lax.rem(self.first_key(step), index(sizes.page_size))
        # Mosaic must know that copies begin at multiples of their size.
        within = pl.multiple_of(within, size) if sizes.page_size > STEP else 0
        for nth, page in enumerate(pages):
            source = pool.at[page, self.place.head, pl.ds(within, size)]
            target = ring.at[stage, pl.ds(nth * size, size)]
            plgpu.copy_gmem_to_smem(source, target, ready.at[stage])

    def positions(self) -> Array:
        """Returns the position of the token of each row, int32[TILE, STEP]."""
        if self.sizes.tokens == 1:
            return self.arithmetic.broadcast(self.place.start, (TILE, STEP))
        return self.tokens(STEP) + self.place.start

    def tokens(self, columns: int) -> Array:
        """Returns the token of each row within the chunk, int32[TILE, columns]."""
        rows = self.arithmetic.iota((TILE, columns), 0)
        token = lax.div(rows, index(self.sizes.tile_heads))
        return token + self.place.first_token

    def distances(self, positions: Array, step: Array) -> Array:
        """Returns how far tokens are behind the keys of a step, int32[TILE, STEP]."""
        keys = self.arithmetic.iota(positions.shape, 1)
        first = self.arithmetic.broadcast(self.first_key(step), positions.shape)
        return positions - keys - first

    def keep_counted(self, out: Array) -> Array:
        """Puts 0 in the rows of tokens that do not count.

        Such a token has seen the keys of the last one that does, or even some behind.
        """
        if self.sizes.tokens == 1:
            return out
        counts = self.arithmetic.broadcast(self.place.num_tokens, out.shape)
        return jnp.where(self.tokens(out.shape[1]) < counts, out, 0.0)

    def num_left(self, step: Array) -> Array:
        """Returns the number of keys up to the end of the row, from a step on."""
        return self.place.end - self.first_key(step)

    def hide_beyond(self, ref: Any, left: Array) -> None:
        """Puts 0 in the place of values behind the first `left`.

        What an old row has left there might be NaN, and NaN if multiplied by 0.
        """
        values = self.arithmetic.load(ref, plgpu.Layout.WGMMA)
        keys = self.arithmetic.iota(ref.shape, 0)
        beyond = keys >= self.arithmetic.broadcast(left, ref.shape)
        ref[...] = jnp.where(beyond, jnp.zeros_like(values), values)
