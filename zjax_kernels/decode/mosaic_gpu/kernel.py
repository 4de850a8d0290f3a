"""Kernel of paged attention: programs share the keys of a row, and merge the outputs.

A program is one warpgroup. It starts the copies of keys and values some steps ahead of
the products, and a second program of the SM computes while the first waits. Programs
that share a row are a cluster: each merges the outputs of all for some channels.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from zjax_kernels import warpgroups
from zjax_kernels.decode.mosaic_gpu.memory import CHUNK, Memory, Rows
from zjax_kernels.decode.mosaic_gpu.merge import Merged
from zjax_kernels.decode.mosaic_gpu.tile import Tile
from zjax_kernels.decode.mosaic_gpu.work import (
    NUMBERS,
    STEP,
    TILE,
    Sizes,
    find_split,
)
from zjax_kernels.decode.reference import Cache, Options
from zjax_kernels.decode.tuning import H200, Tuning
from zjax_kernels.sparse.mosaic_gpu import arithmetic as logits
from zjax_kernels.sparse.mosaic_gpu.arithmetic import ROWS, Arithmetic, index, widen
from zjax_kernels.warpgroups import CLUSTER, launch


def paged_attention(
    q: Array,
    cache: Cache,
    sinks: Array | None,
    options: Options,
    *,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> Array:
    """Runs `reference.paged_attention` on a Hopper GPU, for queries of 16 bits.

    Keys and values have the dtype of the queries, or float8. A `tuning` of None is
    chosen by head size; `interpret` holds the interpreter's parameters, None on a GPU.
    """
    sizes = Sizes.of(q, cache, tuning or H200[q.shape[-1]])

    def body(inputs, outputs, scratch):
        q_ref, sinks_ref, *refs = inputs
        out_ref, *shared = outputs
        # The interpreter runs one kernel after another.
        early = options.early and interpret is None
        if early:
            warpgroups.start_next()
        refs, memory = Cache(*refs), scratch.of(sizes, interpret)
        split = index(lax.axis_index(CLUSTER) if sizes.splits > 1 else 0)
        item = lax.axis_index("program")
        place = find_split(sizes, options.window, refs.starts, refs.counts, item, split)
        program = Program(sizes, options, place, memory, Arithmetic(interpret), refs)
        program.start_settled()
        if early:
            warpgroups.wait_for_last()
        program.start(q_ref)
        (out,), lse = program.attend()
        merged = program.exchange(out, lse, *shared)
        program.store(program.finish(merged, sinks_ref), out_ref)

    shared = jax.ShapeDtypeStruct(sizes.shared_shape, jnp.float32)
    out, *_ = launch(
        body,
        (q, sinks, *cache),
        [jax.ShapeDtypeStruct(q.shape, q.dtype), *[shared] * (sizes.splits > 1)],
        Memory.allocate(sizes, q, cache.keys.dtype, interpret),
        num_programs=sizes.items,
        cluster_size=sizes.splits,
        interpret=interpret,
        approx_math=True,  # exp2 and tanh are single instructions
        reduction_scratch_bytes=0,  # rows are reduced within a warp
    )
    return out


@dataclasses.dataclass(frozen=True)
class Program(Tile):
    """One program, on a tile of queries and some of the keys of the row.

    Args:
        cache: References to pools and places in global memory.
    """

    memory: Memory
    cache: Cache

    def start_settled(self) -> None:
        """Starts to copy the first keys and values that older kernels have written."""
        steps = [index(step) for step in range(self.sizes.tuning.stages)]
        # All at once: copies between the reads would wait for one after another.
        pages = [self.read_pages(self.cache.pages, step) for step in steps]
        for step, numbers in zip(steps, pages, strict=True):
            self.copy_both(step, numbers, self.place.num_settled)

    def start(self, q_ref: Any) -> None:
        """Starts to copy the queries, and the first steps that are not settled."""
        for number, rows in enumerate(self.memory.q):
            for place, target in self.boxes(rows, number * CHUNK):
                plgpu.copy_gmem_to_smem(q_ref.at[place], target, self.memory.q_ready)
        stages = index(self.sizes.tuning.stages)

        # Seldom any: a loop keeps the instructions short that all programs read.
        def copy(step, _):
            self.copy_both(
                step, self.read_pages(self.cache.pages, step), self.place.num_steps
            )

        lax.fori_loop(jnp.minimum(self.place.num_settled, stages), stages, copy, None)

    def boxes(self, rows: Rows, first: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
        """Yields places of the tile in all queries or outputs, and in shared memory.

        `first` is the first of the channels that `rows` have.
        """
        sizes, chunk, token = self.sizes, self.place.chunk, self.place.first_token
        heads = pl.ds(self.place.first_head, sizes.tile_heads)
        channels = pl.ds(first, rows.tiled.shape[1])
        if rows.boxed is not None:
            yield (chunk, pl.ds(token, sizes.tile_tokens), heads, channels), rows.boxed
            return
        for nth in range(sizes.tile_tokens):
            some = rows.tiled.at[pl.ds(nth * sizes.tile_heads, sizes.tile_heads)]
            yield (chunk, token + nth, heads, channels), some

    def copy_both(self, step: Array, pages: list[Array], end: Array) -> None:
        """Starts to copy the keys and the values of a step before `end`."""
        for name in ("keys", "values"):
            self.copy(name, step, pages, end)

    def copy(self, name: str, step: Array, pages: list[Array], end: Array) -> None:
        """Starts to copy the keys or the values of a step, if it is before `end`."""
        pool, ring = getattr(self.cache, name), getattr(self.memory, name)
        ready = getattr(self.memory, f"{name}_ready")
        pl.when(step < end)(lambda: self.copy_pages(pool, pages, step, ring, ready))

    def attend(self) -> tuple[list[Array], Array]:
        """Returns outputs over the keys of the program, and log-sum-exps.

        Outputs are in pieces of channels, of `values_of_step`.
        """
        stages, positions = index(self.sizes.tuning.stages), self.positions()

        def step(nth, carry):
            (outs, row_max, row_sum), pages = carry
            stage, following = self.stage(nth), nth + stages
            after = self.read_pages(self.cache.pages, following + 1)
            plgpu.barrier_wait(self.memory.keys_ready.at[stage])
            scores = self.scores(stage)
            # The scores are in registers: the keys may be overwritten.
            self.copy("keys", following, pages, self.place.num_steps)
            scores = self.mask(scores, positions, nth)
            p, new_max, correction = logits.softmax_step(
                scores, row_max, self.factor, masked=True
            )
            row_sum = row_sum * correction + p.sum(axis=1)
            outs = [out * logits.per_row(correction, out.shape) for out in outs]
            plgpu.barrier_wait(self.memory.values_ready.at[stage])
            pairs = zip(outs, self.values_of_step(stage, nth), strict=True)
            sums = [(out, p, values) for out, values in pairs]
            outs = self.arithmetic.accumulate(*sums)
            self.copy("values", following, pages, self.place.num_steps)
            return ([*outs], new_max, row_sum), after

        plgpu.barrier_wait(self.memory.q_ready)
        shape, full = (TILE, self.piece_channels), self.arithmetic.full
        pieces = self.sizes.channels // self.piece_channels
        start = (
            [full(shape, 0.0, plgpu.Layout.WGMMA) for _ in range(pieces)],
            full((TILE,), -jnp.inf, ROWS),
            full((TILE,), 0.0, ROWS),
        )
        carry = start, self.read_pages(self.cache.pages, stages)
        state, _ = lax.fori_loop(0, self.place.num_steps, step, carry)
        outs, *sums = state
        found = [logits.normalize(out, *sums) for out in outs]
        return [out for out, _ in found], found[0][1]

    @property
    def piece_channels(self) -> int:
        """Channels of a piece of the outputs: all."""
        return self.sizes.channels

    def scores(self, stage: Array) -> Array:
        """Multiplies the queries by the keys of a stage, float32[TILE, STEP]."""
        keys = self.widened(self.memory.keys.at[stage], self.memory.wide[0])
        q = [rows.tiled for rows in self.memory.q]
        return self.arithmetic.product_of_chunks(q, keys)

    def values_of_step(self, stage: Array, step: Array) -> list[Any]:
        """Returns the values of a step in shared memory, in pieces of channels."""
        values = self.widened(self.memory.values.at[stage], self.memory.wide[1])
        self.hide_values([values], step)
        return [values]

    @property
    def factor(self) -> float:
        """Factor of scores in base 2; a cap has scaled the scores before."""
        return 1.0 if self.options.soft_cap else self.options.scale * logits.LOG2E

    def mask(self, scores: Array, positions: Array, step: Array) -> Array:
        """Caps scores and hides keys that a row does not see."""
        scale, cap = self.options.scale, self.options.soft_cap
        if cap:
            scores = jnp.tanh(scores * (scale / cap)) * (cap * logits.LOG2E)
        after = self.distances(positions, step)
        scores = jnp.where(after >= 0, scores, -jnp.inf)
        if self.options.window:
            scores = jnp.where(after < self.options.window, scores, -jnp.inf)
        return scores

    def widened(self, ref: Any, wide: Any) -> Any:
        """Returns keys or values of a step in the dtype of the queries.

        Tensor cores read both operands in one dtype, and the second in shared memory.
        The warps wait for one another between keys and values, so that nobody reads
        what the next step writes.
        """
        if wide is None:
            return ref
        numbers = self.arithmetic.load(
            ref, plgpu.Layout.WGMMA_UPCAST_2X, optimized=False
        )
        wide[...] = widen(numbers, wide.dtype)
        plgpu.commit_smem()  # tensor cores must see the writes of registers
        return wide

    def hide_values(self, refs: Sequence[Any], step: Array) -> None:
        """Puts 0 in the place of values of a step behind the end of the row."""
        left = self.num_left(step)

        @pl.when(left < STEP)
        def _():
            for ref in refs:
                self.hide_beyond(ref, left)
            plgpu.commit_smem()  # tensor cores must see the writes of registers

    def exchange(self, out: Array, lse: Array, shared_ref: Any = None) -> Merged:
        """Merges what the programs of the cluster found, through global memory.

        Returns attention over all keys for the channels that this program stores,
        float32[TILE, D / splits]; rows of the tile without queries hold anything.
        """
        splits, memory = self.sizes.splits, self.memory
        if splits == 1:
            return Merged.of(out, lse)
        plgpu.commit_smem()  # all warps have read the keys and the values
        size, width = out.shape[1], out.shape[1] // splits
        numbers, own = pl.ds(size, NUMBERS), pl.ds(self.place.split * width, width)
        memory.found.at[:, pl.ds(0, size)][...] = out
        memory.found.at[:, numbers][...] = logits.per_row(lse, (TILE, NUMBERS))
        plgpu.commit_smem()  # copies must see the writes of registers
        rows = pl.ds(0, self.sizes.shared_rows)
        plgpu.copy_smem_to_gmem(memory.found.at[rows], shared_ref.at[self.rows(1)])
        plgpu.wait_smem_to_gmem(0)
        # Behind the copies. Stores to the memory of other programs take longer: each
        # lane that stores also arrives at a barrier there, one after another.
        warpgroups.meet_cluster(memory.all_shared)
        rows = pl.ds(0, splits * self.sizes.shared_rows)
        for columns, target in (own, memory.shared), (numbers, memory.levels):
            source = shared_ref.at[self.rows(splits), columns]
            plgpu.copy_gmem_to_smem(source, target.at[rows], memory.shared_ready)
        plgpu.barrier_wait(memory.shared_ready)
        return self.receive(width)

    def rows(self, splits: int) -> Any:
        """Returns the rows of all programs of the cluster, or of this one alone."""
        number = self.sizes.shared_rows
        first = self.place.item * (self.sizes.splits * number)
        if splits == 1:
            first += self.place.split * number
        return pl.ds(pl.multiple_of(first, 8), splits * number)

    def receive(self, width: int) -> Merged:
        """Merges what all programs of the cluster have found."""

        # A loop: programs are short, and would wait for many instructions.
        def add(split, merged):
            first = pl.multiple_of(split * self.sizes.shared_rows, 8)
            rows = pl.ds(first, TILE)
            lse = self.load(self.memory.levels.at[rows]).max(axis=1)
            return merged.add(self.load(self.memory.shared.at[rows]), lse)

        empty = Merged(
            self.arithmetic.full((TILE, width), 0.0, plgpu.Layout.WGMMA),
            self.arithmetic.full((TILE,), -jnp.inf, ROWS),
            self.arithmetic.full((TILE,), 0.0, ROWS),
        )
        return lax.fori_loop(0, self.sizes.splits, add, empty)

    def load(self, ref: Any) -> Array:
        """Loads numbers from shared memory, in the layout of outputs."""
        return self.arithmetic.load(ref, plgpu.Layout.WGMMA, optimized=False)

    def finish(self, merged: Merged, sinks_ref: Any) -> Array:
        """Returns the outputs over all keys; tokens that do not count get 0."""
        sinks = None if sinks_ref is None else self.sinks(sinks_ref)
        return self.keep_counted(merged.finish(sinks))

    def sinks(self, ref: Any) -> Array:
        """Returns the sink of the query head of each row, float32[TILE]."""
        # Scalars of each head: vectors would begin at any head, and run beyond the end.
        heads = self.sizes.tile_heads
        shape = TILE, 8
        head = lax.rem(self.arithmetic.iota(shape, 0), index(heads))
        found = self.arithmetic.full(shape, 0.0, plgpu.Layout.WGMMA)
        for number in range(heads):
            sink = ref[self.place.first_head + number].astype(jnp.float32)
            sink = self.arithmetic.broadcast(sink, shape)
            found = jnp.where(head == index(number), sink, found)
        return found.max(axis=1)

    def store(self, out: Array, out_ref: Any) -> None:
        """Stores the merged channels of the program."""
        rank_start = self.place.split * index(out.shape[1])
        width = out.shape[1] // len(self.memory.out)
        for number, rows in enumerate(self.memory.out):
            some = out[:, number * width : (number + 1) * width]
            rows.tiled[...] = some.astype(rows.tiled.dtype)
        plgpu.commit_smem()  # copies must see the writes of registers
        for number, rows in enumerate(self.memory.out):
            for place, source in self.boxes(rows, rank_start + number * width):
                plgpu.copy_smem_to_gmem(source, out_ref.at[place])
        plgpu.wait_smem_to_gmem(0)
