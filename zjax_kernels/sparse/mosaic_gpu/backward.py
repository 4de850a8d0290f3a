"""The backward pass in one kernel, which computes each weight once.

A program has a tile of keys and adds up their gradients in registers. What a chunk of
queries gets from the tile is added to a sum in the GPU's memory.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from zjax_kernels.sparse.cells import HALF, TILE
from zjax_kernels.sparse.mosaic_gpu import copies, keys, launch, logits, sums
from zjax_kernels.sparse.mosaic_gpu.arithmetic import (
    COLUMNS,
    ROWS,
    Arithmetic,
    index,
)
from zjax_kernels.sparse.mosaic_gpu.splits import merge_sums
from zjax_kernels.sparse.mosaic_gpu.work import find_work
from zjax_kernels.sparse.reference import Options
from zjax_kernels.sparse.schedule import Schedule
from zjax_kernels.sparse.tuning import Tuning, choose

_KEPT = 2
"""Chunks whose gradients of scores are kept: warpgroups may be one chunk apart."""


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    d_out: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    segments: tuple[jax.Array, jax.Array] | None,
    schedule: Schedule,
    options: Options,
    *,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As `reference.backward_queries` and `reference.backward_keys`, on a Hopper GPU.

    Args:
        q: [B, S, H, D] queries, of 16 bits.
        k: [B, T, K, D] keys.
        v: [B, T, K, D] values.
        d_out: [B, S, H, D] gradient of the averages.
        lse: float32[B, H, S] as `forward` returned it.
        delta: float32[B, H, S], as in the reference.
        segments: int32[B, S] and int32[B, T].
        schedule: Tiles of keys, of which `is_fused` is true.
        options: What scores mean.
        tuning: How the kernel runs; chosen by the head size if none.
        interpret: Parameters of the interpreter, or none on a GPU.

    Returns:
        Gradients in the shapes and dtypes of `q`, `k` and `v`.

    Reference:
        Dao (arXiv:2307.08691), algorithm 2.
    """
    segmented = segments is not None
    tuning = tuning or choose("backward", q.shape[-1], segmented=segmented)
    batch, _, heads, size = k.shape
    slots, stages, chunk = schedule.num_slots, tuning.stages, schedule.chunk
    outputs = [jax.ShapeDtypeStruct(k.shape, k.dtype)] * 2
    if slots:
        part = (batch, heads, slots, TILE, size)
        outputs += [jax.ShapeDtypeStruct(part, jnp.float32)] * 2
    rows = TILE // schedule.row_unit
    lanes = chunk // schedule.column_unit
    halves, tiles = launch.NUM_HALVES, tuning.tiles

    def barrier(arrivals, number):
        return plgpu.Barrier(num_arrivals=arrivals, num_barriers=number)

    scratch = _Memory(
        k=launch.matrix((tiles, halves, HALF, size), q.dtype),
        v=launch.matrix((1, halves, HALF, size), q.dtype),
        q=launch.matrix((stages, chunk, size), q.dtype),
        d_out=launch.matrix((stages, chunk, size), q.dtype),
        d_scores=launch.matrix((_KEPT, halves, HALF, chunk), q.dtype),
        d_q=launch.matrix((halves, HALF, HALF), jnp.int32),
        stats=plgpu.SMEM((3, stages, chunk), jnp.float32),
        k_there=barrier(rows * (1 + segmented), tiles),
        v_there=barrier(rows, 1),
        q_there=barrier(lanes * (2 + segmented), stages),
        d_there=barrier(lanes * 3, stages),
        d_scores_there=barrier(halves, _KEPT),
        d_q_there=barrier(1, halves),
        k_used=barrier(halves, tiles),
        v_used=barrier(halves, 1),
        q_used=barrier(halves, stages),
        d_used=barrier(halves, stages),
        k_read=barrier(halves, 1),
        d_q_used=barrier(1, halves),
    )
    if segmented:
        scratch = scratch._replace(
            row_segments=plgpu.SMEM((tiles, halves, HALF), jnp.int32),
            column_segments=plgpu.SMEM((stages, chunk), jnp.int32),
        )
    simulated = interpret is not None
    body = functools.partial(_body, schedule, options, tuning, simulated)
    unit = sums.find_unit(k, v, d_out, delta)
    stats = logits.base_2(lse), delta, 1 / unit
    inputs = (q, k, v, d_out, *stats, *(segments or ()))
    shape = (schedule.num_programs, *q.shape) if simulated else q.shape
    total, dk, dv, *part = launch.call(
        body,
        schedule,
        inputs,
        outputs,
        scratch,
        tuning,
        interpret,
        sums=[jax.ShapeDtypeStruct(shape, jnp.int32)],
    )
    total = total.sum(axis=0) if simulated else total
    if slots:
        dk, dv = (
            merge_sums(x, y, schedule) for x, y in zip((dk, dv), part, strict=True)
        )
    unit = unit.swapaxes(1, 2)[..., None] * options.scale
    return (total * unit).astype(q.dtype), dk, dv


class _Memory(NamedTuple):
    """Tiles and chunks of a program, and what says that they are there or used."""

    k: Any
    v: Any
    q: Any
    d_out: Any
    d_scores: Any
    d_q: Any
    stats: Any
    k_there: Any
    v_there: Any
    q_there: Any
    d_there: Any
    d_scores_there: Any
    d_q_there: Any
    k_used: Any
    v_used: Any
    q_used: Any
    d_used: Any
    k_read: Any
    d_q_used: Any
    row_segments: Any = None
    column_segments: Any = None


def _body(sizes, options, tuning, simulated, schedule, inputs, outputs, memory):
    q_ref, k_ref = inputs[:2]
    group = q_ref.shape[2] // k_ref.shape[2]
    work = find_work(schedule, sizes, q_ref.shape[0], group)
    arithmetic = Arithmetic(simulated)
    total, *outputs = outputs
    launch.divide(
        lambda: _compute(work, options, tuning, arithmetic, outputs, memory),
        lambda: keys.copy(work, tuning, inputs, memory),
        lambda: sums.add(work, simulated, memory, total),
    )


def _compute(work, options, tuning, arithmetic, outputs, memory):
    """Gradients of the keys and values of each item, for a half of its tile."""
    dk_ref, dv_ref, *part_refs = outputs
    schedule, sizes = work.schedule, work.sizes
    half = lax.axis_index("warpgroup")
    read_words = functools.partial(logits.read_words, arithmetic, schedule)
    add_queries = functools.partial(_add_queries, arithmetic, memory, half)
    shape = HALF, sizes.chunk
    size = memory.k.shape[-1]

    def release(number):
        """Where keys were a result lies until it is stored."""
        copies.wait_until_stored()
        plgpu.barrier_arrive(memory.k_used.at[lax.rem(number, index(tuning.tiles))])

    def compute_item(number, item, taken):
        slot = lax.rem(number, index(tuning.tiles))
        rows = copies.read_rows(work, item, half * index(HALF), HALF)
        plgpu.barrier_wait(memory.k_there.at[slot])
        of_rows: Any = None
        if memory.row_segments is not None:
            of_rows = arithmetic.load(memory.row_segments.at[slot, half], ROWS)
            plgpu.commit_smem()  # numbers that were loaded may be copied over soon

        def chunk(nth, carry, masked):
            dk, dv, per_unit = carry
            stage = lax.rem(taken + nth, index(tuning.stages))
            words = read_words(item.first + nth, half) if masked else None
            pair = memory.k.at[slot, half], memory.q.at[stage]

            def wait():
                plgpu.barrier_wait(memory.q_there.at[stage])

            def first():
                wait()
                return arithmetic.product(*pair)[0]

            def later():
                return add_queries(slot, taken + nth - 1, per_unit, pair, wait)

            scores, slope = logits.bend(lax.cond(nth == 0, first, later), options)

            def weigh():
                lse = arithmetic.load(memory.stats.at[0, stage], COLUMNS)
                p = jnp.exp2(scores - logits.along_columns(lse, shape))
                p = logits.mask_cells(arithmetic, p, sizes, words, 0.0)
                if of_rows is None:
                    return p
                of_columns = arithmetic.load(memory.column_segments.at[stage], COLUMNS)
                return logits.mask_segments(p, of_rows, of_columns, 0.0)

            @pl.when(nth == 0)
            def _():
                if tuning.tiles > 1:
                    pl.when(number > 0)(lambda: release(number - 1))
                plgpu.barrier_wait(memory.v_there.at[0])

            plgpu.barrier_wait(memory.d_there.at[stage])
            dp, p = arithmetic.product(
                memory.v.at[0, half], memory.d_out.at[stage], weigh
            )
            delta = arithmetic.load(memory.stats.at[1, stage], COLUMNS)
            mine = _share(half, memory)[0]
            per_unit = arithmetic.load(memory.stats.at[2, stage, mine], ROWS)
            ds = p * (dp - logits.along_columns(delta, shape))
            ds = (ds if slope is None else ds * slope).astype(memory.k.dtype)
            dv, dk = arithmetic.accumulate(
                (dv, p, memory.d_out.at[stage]),
                (dk, ds, memory.q.at[stage]),
                meanwhile=lambda: _keep(ds, memory, half, taken + nth),
            )
            plgpu.barrier_arrive(memory.d_used.at[stage])
            plgpu.barrier_arrive(memory.q_used.at[stage])
            return dk, dv, per_unit

        zeros = arithmetic.full((HALF, size), 0.0, plgpu.Layout.WGMMA)
        carry = zeros, zeros, arithmetic.full((HALF,), 0.0, ROWS)
        full = functools.partial(chunk, masked=False)
        carry = lax.fori_loop(0, item.full, full, carry)
        masked = functools.partial(chunk, masked=True)
        dk, dv, per_unit = lax.fori_loop(item.full, item.count, masked, carry)
        dk *= options.scale

        def store(x, ref, buffer):
            @pl.when(item.slot < 0)
            def _():
                buffer[...] = x.astype(buffer.dtype)
                copies.store_rows(work, rows, [(buffer, copies.rows_of(ref, item))])

        store(dv, dv_ref, memory.v.at[0, half])
        add_queries(slot, taken + item.count - 1, per_unit)
        plgpu.barrier_arrive(memory.k_read.at[0])
        copies.wait_until_stored()
        plgpu.barrier_arrive(memory.v_used.at[0])
        plgpu.barrier_wait(memory.k_read.at[0])  # each half reads all keys of the tile
        store(dk, dk_ref, memory.k.at[slot, half])
        if part_refs:
            copies.store_part(item, list(zip(part_refs, (dk, dv), strict=True)))
        if tuning.tiles == 1:
            release(number)
        return taken + item.count

    work.for_each(compute_item, index(0))
    if tuning.tiles > 1:
        pl.when(work.count > 0)(lambda: release(work.count - 1))
    plgpu.barrier_wait(memory.d_q_used.at[half])


def _share(half, memory):
    """Queries of a chunk, and channels, whose gradients a warpgroup adds up."""
    mine = pl.ds(pl.multiple_of(half * index(HALF), HALF), HALF)
    every = slice(None)
    return (mine, every) if memory.q.shape[1] > HALF else (every, mine)


def _keep(ds, memory, half, number):
    """Shows both warpgroups the gradients of the scores of a half."""
    nth = lax.rem(number, index(_KEPT))
    memory.d_scores.at[nth, half][...] = ds
    plgpu.commit_smem()  # of numbers that were loaded, too: they may be copied over
    plgpu.barrier_arrive(memory.d_scores_there.at[nth])


def _add_queries(arithmetic, memory, half, slot, number, per_unit, *beside):
    """Hands on the gradients of a share of the queries of a chunk, as integers.

    No one reads an older chunk's gradients of scores once both have shown this one's.
    """
    nth = lax.rem(number, index(_KEPT))
    queries, channels = _share(half, memory)
    plgpu.barrier_wait(memory.d_scores_there.at[nth])
    pairs = [
        (memory.d_scores.at[nth, i, :, queries], memory.k.at[slot, i, :, channels])
        for i in range(launch.NUM_HALVES)
    ]

    def hand_on(d_q):
        d_q *= logits.along_rows(per_unit, d_q.shape)
        plgpu.barrier_wait(memory.d_q_used.at[half])
        memory.d_q.at[half][...] = d_q.astype(jnp.int32)
        plgpu.commit_smem()
        plgpu.barrier_arrive(memory.d_q_there.at[half])

    return arithmetic.contract(pairs, hand_on, *beside)
