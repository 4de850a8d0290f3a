"""Kernel of paged attention: programs share the keys of a row, and are merged.

A program is one warpgroup. It starts the copies of keys and values some steps ahead of
the products, and a second program of the SM computes while the first waits.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from zjax_kernels.decode.mosaic_gpu.work import STEP, TILE, Sizes, Split, find_split
from zjax_kernels.decode.reference import Cache, Options
from zjax_kernels.decode.tuning import H200, Tuning
from zjax_kernels.sparse.mosaic_gpu import arithmetic as logits
from zjax_kernels.sparse.mosaic_gpu.arithmetic import ROWS, Arithmetic, index
from zjax_kernels.warpgroups import launch


def paged_attention(
    q: Array,
    cache: Cache,
    sinks: Array | None,
    options: Options,
    *,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> Array:
    """Runs `reference.paged_attention` on a Hopper GPU, for 16-bit arrays.

    A `tuning` of None is chosen by head size; `interpret` holds the interpreter's
    parameters, None on a GPU.
    """
    size = q.shape[-1]
    sizes = Sizes.of(q, cache, tuning or H200[size])
    partial = sizes.items, sizes.splits

    def body(inputs, outputs, scratch):
        q_ref, *refs = inputs
        refs = Cache(*refs)
        place = find_split(
            sizes,
            options.window,
            refs.starts,
            refs.counts,
            lax.axis_index("program"),
        )
        memory = _Memory.of(scratch, interpret)
        program = _Program(sizes, options, place, refs, memory, Arithmetic(interpret))

        @pl.when(place.num_steps > 0)
        def _():
            program.start(q_ref)
            program.store(*program.attend(), *outputs)

        @pl.when(place.num_steps <= 0)
        def _():
            nothing = program.arithmetic.full((TILE,), -jnp.inf, ROWS)
            outputs[1].at[place.item, place.split][...] = nothing

    out, lse = launch(
        body,
        (_tiles(q, sizes), *cache),
        [
            jax.ShapeDtypeStruct((*partial, sizes.rows, size), jnp.float32),
            jax.ShapeDtypeStruct((*partial, TILE), jnp.float32),
        ],
        _Memory.allocate(sizes, size, q.dtype, interpret),
        num_programs=sizes.items * sizes.splits,
        interpret=interpret,
        approx_math=True,  # exp2 and tanh are single instructions
        reduction_scratch_bytes=0,  # rows are reduced within a warp
    )
    merged = _merge(out, lse[..., : sizes.rows], sinks, sizes)
    counted = jnp.arange(sizes.tokens)[None] < cache.counts[:, None]
    return jnp.where(counted[..., None, None], merged, 0.0).astype(q.dtype)


def _tiles(q: Array, sizes: Sizes) -> Array:
    """Arranges queries in tiles of tokens and heads of a group: [items, rows, D]."""
    size = q.shape[-1]
    q = q.reshape(sizes.chunks, sizes.tokens, sizes.num_heads, sizes.group, size)
    q = q.swapaxes(1, 2).reshape(sizes.chunks * sizes.num_heads, -1, size)
    padding = sizes.tiles * sizes.rows - q.shape[1]
    return jnp.pad(q, [(0, 0), (0, padding), (0, 0)]).reshape(-1, sizes.rows, size)


def _merge(out: Array, lse: Array, sinks: Array | None, sizes: Sizes) -> Array:
    """Merges outputs of splits, [items, splits, rows, D], into [C, T, H, D].

    `lse` are log-sum-exps, float32[items, splits, rows]; a sink joins the sum of
    exponentials here.
    """
    level = jnp.broadcast_to(lse[..., None], out.shape)
    # What a program without keys leaves in memory might be NaN.
    parts = level, jnp.ones_like(out), jnp.where(jnp.isneginf(level), 0.0, out)
    if sizes.splits == 1:
        parts = tuple(x[:, 0] for x in parts)
    else:
        # One reduction of three arrays is one kernel, where a maximum, a sum of
        # exponentials and a weighted sum would be three.
        start = tuple(jnp.float32(x) for x in (-jnp.inf, 0, 0))
        parts = lax.reduce(parts, start, _add_softmax, [1])
    level, total, out = (_tokens(x, sizes) for x in parts)
    if sinks is not None:
        scores = sinks.astype(jnp.float32).reshape(1, 1, -1, 1)
        total += jnp.exp(scores - level)
    return out / total


def _add_softmax(x, y):
    """Adds two running softmaxes: the maximum, the sum, and the weighted values."""
    level = jnp.maximum(x[0], y[0])
    # -inf minus -inf is NaN, where neither has seen a key.
    finite = jnp.where(jnp.isneginf(level), 0.0, level)
    weights = jnp.exp(x[0] - finite), jnp.exp(y[0] - finite)
    return level, *(
        a * weights[0] + b * weights[1] for a, b in zip(x[1:], y[1:], strict=True)
    )


def _tokens(x: Array, sizes: Sizes) -> Array:
    """Arranges rows of tiles, [items, rows, D], by token and head: [C, T, H, D]."""
    x = x.reshape(sizes.chunks, sizes.num_heads, -1, x.shape[-1])
    x = x[:, :, : sizes.tokens * sizes.group]
    x = x.reshape(*x.shape[:2], sizes.tokens, sizes.group, x.shape[-1]).swapaxes(1, 2)
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


class _Memory(NamedTuple):
    """Shared memory and barriers of a program.

    Args:
        q: [TILE, D] queries.
        keys: [stages, STEP, D] keys.
        out: float32[TILE, D] output, in the place of keys that nobody reads any more.
        values: [stages, STEP, D] values.
        q_ready: Barrier on which the queries arrive.
        keys_ready: Barriers per stage on which keys arrive.
        values_ready: Barriers per stage on which values arrive.
    """

    q: Any
    keys: Any
    out: Any
    values: Any
    q_ready: Any
    keys_ready: Any
    values_ready: Any

    @classmethod
    def allocate(cls, sizes: Sizes, size: int, dtype: Any, interpret: Any) -> list[Any]:
        """Returns types of shared memory and barriers, to be named by `of`."""
        stages = sizes.tuning.stages
        ring = _matrix((stages, STEP, size), dtype)
        places = ring, _matrix((TILE, size), jnp.float32)
        barrier = plgpu.Barrier(num_arrivals=sizes.copies, num_barriers=stages)
        return [
            _matrix((TILE, size), dtype),
            # The interpreter has no unions.
            places if interpret is not None else plgpu.RefUnion(*places),
            ring,
            plgpu.Barrier(),
            barrier,
            barrier,
        ]

    @classmethod
    def of(cls, refs: Any, interpret: Any) -> "_Memory":
        """Names references."""
        q, places, *others = refs
        return cls(q, *places, *others)


def _matrix(shape, dtype):
    """Allocates matrices, tiled and swizzled for tensor cores and copies."""
    width = 128 // jnp.dtype(dtype).itemsize
    tiling = plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(128)
    return plgpu.SMEM(shape, dtype, transforms=tiling)


@dataclasses.dataclass(frozen=True)
class _Program:
    """One program: a tile of queries and some of the keys of the row.

    Args:
        sizes: Static sizes.
        options: Numbers of the scores.
        place: Keys that the program reads.
        cache: References to pools and places in global memory.
        memory: Shared memory.
        arithmetic: Operations on registers.
    """

    sizes: Sizes
    options: Options
    place: Split
    cache: Cache
    memory: _Memory
    arithmetic: Arithmetic

    def start(self, q_ref: Any) -> None:
        """Starts to copy the queries, and the first keys and values."""
        steps = [index(step) for step in range(self.sizes.tuning.stages)]
        # All at once: copies between the reads would wait for one after another.
        pages = [self.read_pages(step) for step in steps]
        target = self.memory.q.at[pl.ds(0, self.sizes.rows)]
        plgpu.copy_gmem_to_smem(q_ref.at[self.place.item], target, self.memory.q_ready)
        for step, numbers in zip(steps, pages, strict=True):
            self.copy("keys", step, numbers)
            self.copy("values", step, numbers)

    def read_pages(self, step: Array) -> list[Array]:
        """Reads the pages of a step from global memory."""
        sizes = self.sizes
        first = lax.div((self.place.first + step) * STEP, index(sizes.page_size))
        # Steps run beyond the end of a row, which may be the end of the table.
        last = index(sizes.table_size - 1)
        return [
            self.cache.pages[self.place.chunk, jnp.minimum(first + nth, last)]
            for nth in range(sizes.copies)
        ]

    def copy(self, name: str, step: Array, pages: list[Array]) -> None:
        """Starts to copy the keys or the values of a step, if the step exists."""
        sizes, stage = self.sizes, self.stage(step)
        size = STEP // sizes.copies
        ready = getattr(self.memory, f"{name}_ready").at[stage]
        within = lax.rem((self.place.first + step) * STEP, index(sizes.page_size))
        # Mosaic must know that copies begin at multiples of their size.
        within = pl.multiple_of(within, size) if sizes.page_size > STEP else 0

        @pl.when(step < self.place.num_steps)
        def _():
            for nth, page in enumerate(pages):
                pool = getattr(self.cache, name)
                source = pool.at[page, self.place.head, pl.ds(within, size)]
                ring = getattr(self.memory, name)
                target = ring.at[stage, pl.ds(nth * size, size)]
                plgpu.copy_gmem_to_smem(source, target, ready)

    def stage(self, step: Array) -> Array:
        """Returns the stage of a step."""
        return lax.rem(step, index(self.sizes.tuning.stages))

    def attend(self) -> tuple[Array, Array]:
        """Returns outputs over the keys of the program, and log-sum-exps."""
        size, stages = self.memory.q.shape[-1], index(self.sizes.tuning.stages)
        positions = self.positions()

        def step(nth, carry):
            (out, row_max, row_sum), pages = carry
            stage, following = self.stage(nth), nth + stages
            after = self.read_pages(following + 1)
            plgpu.barrier_wait(self.memory.keys_ready.at[stage])
            keys = self.memory.keys.at[stage]
            scores, _ = self.arithmetic.product(self.memory.q, keys)
            # The scores are in registers: the keys may be overwritten.
            self.copy("keys", following, pages)
            scores = self.mask(scores, positions, nth)
            p, new_max, correction = logits.softmax_step(
                scores, row_max, self.factor, masked=True
            )
            row_sum = row_sum * correction + p.sum(axis=1)
            out = out * logits.per_row(correction, out.shape)
            plgpu.barrier_wait(self.memory.values_ready.at[stage])
            self.hide_values(nth)
            values = self.memory.values.at[stage]
            [out] = self.arithmetic.accumulate((out, p, values))
            self.copy("values", following, pages)
            return (out, new_max, row_sum), after

        plgpu.barrier_wait(self.memory.q_ready)
        start = (
            self.arithmetic.full((TILE, size), 0.0, plgpu.Layout.WGMMA),
            self.arithmetic.full((TILE,), -jnp.inf, ROWS),
            self.arithmetic.full((TILE,), 0.0, ROWS),
        )
        carry = start, self.read_pages(stages)
        state, _ = lax.fori_loop(0, self.place.num_steps, step, carry)
        return logits.normalize(*state)

    @property
    def factor(self) -> float:
        """Factor of scores in base 2; a cap has scaled the scores before."""
        return 1.0 if self.options.soft_cap else self.options.scale * logits.LOG2E

    def positions(self) -> Array:
        """Returns the position of the token of each row, int32[TILE, STEP]."""
        if self.sizes.tokens == 1:
            return self.arithmetic.broadcast(self.place.start, (TILE, STEP))
        rows = self.arithmetic.iota((TILE, STEP), 0) + self.place.first_row
        return lax.div(rows, index(self.sizes.group)) + self.place.start

    def mask(self, scores: Array, positions: Array, step: Array) -> Array:
        """Caps scores and hides keys that a row does not see."""
        scale, cap = self.options.scale, self.options.soft_cap
        if cap:
            scores = jnp.tanh(scores * (scale / cap)) * (cap * logits.LOG2E)
        keys = self.arithmetic.iota(scores.shape, 1)
        first = (self.place.first + step) * STEP
        after = positions - keys - self.arithmetic.broadcast(first, scores.shape)
        scores = jnp.where(after >= 0, scores, -jnp.inf)
        if self.options.window:
            scores = jnp.where(after < self.options.window, scores, -jnp.inf)
        return scores

    def hide_values(self, step: Array) -> None:
        """Puts 0 in the place of values behind the end of the row.

        What an old row has left there might be NaN, and NaN if multiplied by 0.
        """
        ref = self.memory.values.at[self.stage(step)]
        left = self.place.end - (self.place.first + step) * STEP

        @pl.when(left < STEP)
        def _():
            values = self.arithmetic.load(ref, plgpu.Layout.WGMMA)
            keys = self.arithmetic.iota(ref.shape, 0)
            beyond = keys >= self.arithmetic.broadcast(left, ref.shape)
            ref[...] = jnp.where(beyond, jnp.zeros_like(values), values)
            plgpu.commit_smem()  # tensor cores must see the writes of registers

    def store(self, out: Array, lse: Array, out_ref: Any, lse_ref: Any) -> None:
        """Stores the results of the program."""
        item, split = self.place.item, self.place.split
        lse_ref.at[item, split][...] = lse
        self.memory.out[...] = out
        plgpu.commit_smem()  # copies must see the writes of registers
        rows = self.memory.out.at[pl.ds(0, self.sizes.rows)]
        plgpu.copy_smem_to_gmem(rows, out_ref.at[item, split])
        plgpu.wait_smem_to_gmem(0)
