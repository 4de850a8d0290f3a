"""Kernel of paged attention over latents, which are read once for keys and values.

Two warpgroups compute, and one copies latents some steps ahead. The first computes
scores and weights, and shares the weights; each adds half the channels of the values.

Reference: DeepSeek-AI, FlashMLA (2025), github.com/deepseek-ai/FlashMLA.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from zjax_kernels import warpgroups
from zjax_kernels.decode.latent.mosaic_gpu.memory import Memory
from zjax_kernels.decode.latent.mosaic_gpu.merge import by_head, merge_splits
from zjax_kernels.decode.latent.mosaic_gpu.work import H200, LatentSizes
from zjax_kernels.decode.mosaic_gpu.tile import Tile
from zjax_kernels.decode.mosaic_gpu.work import STEP, TILE, find_split
from zjax_kernels.decode.reference import Cache, Options
from zjax_kernels.decode.tuning import Tuning
from zjax_kernels.sparse.mosaic_gpu import arithmetic as logits
from zjax_kernels.sparse.mosaic_gpu.arithmetic import ROWS, Arithmetic, index
from zjax_kernels.warpgroups import AXIS, NUM_COMPUTE, launch

_CHUNK = 64
"""Channels of values that are hidden at a time."""


def paged_attention(
    q: Array,
    cache: Cache,
    sinks: Array | None,
    options: Options,
    *,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> Array:
    """Runs `reference.paged_attention` on a Hopper GPU, for 16-bit latents.

    The values of the cache are the keys. A `tuning` of None is the tuning for an H200;
    `interpret` holds the interpreter's parameters, None on a GPU.
    """
    assert sinks is None  # see latent.shapes
    sizes = LatentSizes.of(q, cache, tuning or H200)
    splits, items = sizes.splits, sizes.items
    dtype = q.dtype if splits == 1 else jnp.float32
    shape = splits, *q.shape[:3], options.value_size
    results = [jax.ShapeDtypeStruct(shape, dtype)]
    if splits > 1:
        results.append(jax.ShapeDtypeStruct((splits, items, TILE), jnp.float32))

    def body(inputs, outputs, scratch):
        q_ref, latents, pages, starts, counts = inputs
        # The interpreter runs one kernel after another.
        if options.early and interpret is None:
            warpgroups.start_next()
            warpgroups.wait_for_last()
        number = lax.axis_index("program")
        # Neighbours share keys, which the second reads from the cache of the GPU.
        item, split = lax.rem(number, index(items)), lax.div(number, index(items))
        place = find_split(sizes, 0, starts, counts, item, split)
        memory, arithmetic = scratch.of(interpret), Arithmetic(interpret)
        program = _Program(sizes, options, place, memory, arithmetic)
        warpgroups.specialize_warpgroups(
            lambda: program.compute(outputs, item),
            lambda: program.copy(q_ref, latents, pages),
        )

    found = launch(
        body,
        (q, cache.keys, cache.pages, cache.starts, cache.counts),
        results,
        Memory.allocate(sizes, q, results[0], interpret),
        num_programs=items * splits,
        num_warpgroups=NUM_COMPUTE + 1,
        interpret=interpret,
        approx_math=True,  # exp2 is a single instruction
        reduction_scratch_bytes=0,  # rows are reduced within a warp
    )
    if splits == 1:
        return found[0][0]
    out, lse = found
    merged = merge_splits(out, by_head(lse, sizes))
    counted = jnp.arange(sizes.tokens)[None] < cache.counts[:, None]
    return jnp.where(counted[..., None, None], merged, 0.0).astype(q.dtype)


@dataclasses.dataclass(frozen=True)
class _Program(Tile):
    """One program, on a tile of queries and some of the keys of the row."""

    memory: Memory

    def copy(self, q_ref: Any, latents: Any, pages: Any) -> None:
        """Copies queries and latents, in the warpgroup that does not compute."""
        for nth, rows in self.tokens_of_tile():
            source = q_ref.at[self.place.chunk, self.place.first_token + nth]
            target = self.memory.q.at[rows]
            plgpu.copy_gmem_to_smem(
                source.at[self.heads()], target, self.memory.q_ready
            )
        stages, num_steps = index(self.sizes.tuning.stages), self.place.num_steps

        @pl.loop(0, num_steps)
        def _(step):
            # Before the wait, in which the numbers of the pages arrive.
            numbers = self.read_pages(pages, step)

            # Stages are free at first: nobody arrives for the first round.
            @pl.when(step >= stages)
            def _():
                plgpu.barrier_wait(self.memory.keys_free.at[self.stage(step)])

            memory = self.memory
            self.copy_pages(latents, numbers, step, memory.ring, memory.keys_ready)

        # A kernel must observe every arrival.
        @pl.loop(jnp.maximum(num_steps - stages, 0), num_steps)
        def _(step):
            plgpu.barrier_wait(self.memory.keys_free.at[self.stage(step)])

    def tokens_of_tile(self) -> list[tuple[int, Any]]:
        """Returns the number of each token of the tile, and the rows of the token."""
        heads = self.sizes.tile_heads
        numbers = range(self.sizes.tile_tokens)
        return [(nth, pl.ds(nth * heads, heads)) for nth in numbers]

    def heads(self) -> Any:
        """Returns the query heads of the tile."""
        # Mosaic must know that copies begin at multiples of the rows of a tile.
        first = pl.multiple_of(self.place.first_head, 8)
        return pl.ds(first, self.sizes.tile_heads)

    def compute(self, outputs: Any, item: Array) -> None:
        """Computes half of the channels of the outputs, in either warpgroup."""
        out_ref, *lse_refs = outputs
        warpgroup = lax.axis_index(AXIS)

        @pl.when(warpgroup == 0)
        def _():
            out, row_max, row_sum = self.attend()
            out, lse = logits.normalize(out, row_max, row_sum)
            for ref in lse_refs:
                ref.at[self.place.split, item][...] = lse
            self.store(out, out_ref, half=0)

        @pl.when(warpgroup == 1)
        def _():
            out, row_sum = self.follow()
            # The first warpgroup stores the log-sum-exps.
            out, _ = logits.normalize(out, row_sum, row_sum)
            self.store(out, out_ref, half=1)

    def attend(self) -> tuple[Array, Array, Array]:
        """Computes weights, shares the weights, and adds the first half of channels.

        Returns outputs, float32[TILE, Dv / 2], maxima of scores in base 2, and sums of
        weights.
        """
        memory, positions = self.memory, self.positions()

        def step(nth, state):
            out, row_max, row_sum = state
            stage = self.stage(nth)
            plgpu.barrier_wait(memory.keys_ready.at[stage])
            scores = self.arithmetic.product(memory.q, memory.ring.at[stage])[0]
            scores = self.mask(scores, positions, nth)
            factor = self.options.scale * logits.LOG2E
            p, new_max, correction = logits.softmax_step(
                scores, row_max, factor, masked=True
            )
            row_sum = row_sum * correction + p.sum(axis=1)
            p = p.astype(memory.weights.dtype)
            pl.when(nth > 0)(lambda: plgpu.barrier_wait(memory.weights_free))
            memory.weights[...] = p
            memory.factors[...] = correction
            plgpu.barrier_arrive(memory.weights_ready)
            return self.add(out, p, correction, nth, half=0), new_max, row_sum

        plgpu.barrier_wait(memory.q_ready)
        row_max = self.arithmetic.full((TILE,), -jnp.inf, ROWS)
        row_sum = self.arithmetic.full((TILE,), 0.0, ROWS)
        start = self.zeros(), row_max, row_sum
        num_steps = self.place.num_steps
        out, row_max, row_sum = lax.fori_loop(0, num_steps, step, start)
        pl.when(num_steps > 0)(lambda: plgpu.barrier_wait(memory.weights_free))
        memory.factors[...] = row_sum
        plgpu.barrier_arrive(memory.weights_ready)
        return out, row_max, row_sum

    def follow(self) -> tuple[Array, Array]:
        """Adds the second half of channels, with the weights of the first warpgroup.

        Returns outputs, float32[TILE, Dv / 2], and sums of weights.
        """
        memory = self.memory

        def step(nth, out):
            plgpu.barrier_wait(memory.keys_ready.at[self.stage(nth)])
            plgpu.barrier_wait(memory.weights_ready)
            p = self.arithmetic.load(memory.weights, plgpu.Layout.WGMMA)
            correction = self.arithmetic.load(memory.factors, ROWS)
            plgpu.barrier_arrive(memory.weights_free)
            return self.add(out, p, correction, nth, half=1)

        out = lax.fori_loop(0, self.place.num_steps, step, self.zeros())
        plgpu.barrier_wait(memory.weights_ready)
        return out, self.arithmetic.load(memory.factors, ROWS)

    def add(
        self, out: Array, p: Array, correction: Array, step: Array, half: int
    ) -> Array:
        """Adds half the channels of the values of a step to corrected outputs."""
        stage = self.stage(step)
        values = self.memory.ring.at[stage].at[:, self.channels(half)]
        out = out * logits.per_row(correction, out.shape)
        self.hide_values(values, step)
        [out] = self.arithmetic.accumulate((out, p, values))
        plgpu.barrier_arrive(self.memory.keys_free.at[stage])
        return out

    def channels(self, half: int) -> Any:
        """Returns half the channels of the values."""
        width = self.options.value_size // NUM_COMPUTE
        return pl.ds(half * width, width)

    def zeros(self) -> Array:
        """Returns outputs of half the channels without any key."""
        shape = TILE, self.options.value_size // NUM_COMPUTE
        return self.arithmetic.full(shape, 0.0, plgpu.Layout.WGMMA)

    def mask(self, scores: Array, positions: Array, step: Array) -> Array:
        """Hides keys that a row does not see."""
        return jnp.where(self.distances(positions, step) >= 0, scores, -jnp.inf)

    def hide_values(self, values: Any, step: Array) -> None:
        """Puts 0 in the place of values behind the end of the row."""
        left = self.num_left(step)

        @pl.when(left < STEP)
        def _():
            for first in range(0, values.shape[1], _CHUNK):
                self.hide_beyond(values.at[:, pl.ds(first, _CHUNK)], left)
            plgpu.commit_smem()  # tensor cores must see the writes of registers

    def store(self, out: Array, out_ref: Any, half: int) -> None:
        """Stores half the channels of the outputs.

        Tokens that do not count get 0, in the merge if there is one.
        """
        if self.sizes.splits == 1:
            out = self.keep_counted(out)
        memory, buffer = self.memory, self.memory.out.at[half]
        # Outputs take the place of latents: both warpgroups have read all.
        plgpu.barrier_arrive(memory.all_read)
        plgpu.barrier_wait(memory.all_read)
        buffer[...] = out.astype(buffer.dtype)
        plgpu.commit_smem()  # copies must see the writes of registers
        for nth, rows in self.tokens_of_tile():
            token = self.place.first_token + nth
            target = out_ref.at[self.place.split, self.place.chunk, token]
            target = target.at[self.heads(), self.channels(half)]
            plgpu.copy_smem_to_gmem(buffer.at[rows], target)
        plgpu.wait_smem_to_gmem(0)
