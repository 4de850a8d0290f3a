"""The backward pass of the queries."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from zjax_kernels.sparse.cells import HALF, TILE
from zjax_kernels.sparse.mosaic_gpu import copies, launch, logits
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


def backward_queries(
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
) -> jax.Array:
    """As `reference.backward_queries`, on a Hopper GPU.

    Args:
        q: [B, S, H, D] queries, of 16 bits.
        k: [B, T, K, D] keys.
        v: [B, T, K, D] values.
        d_out: [B, S, H, D] gradient of the averages.
        lse: float32[B, H, S] as `forward` returned it.
        delta: float32[B, H, S], as in the reference.
        segments: int32[B, S] and int32[B, T].
        schedule: Tiles of queries.
        options: What scores mean.
        tuning: How the kernel runs; chosen by the head size if none.
        interpret: Parameters of the interpreter, or none on a GPU.

    Returns:
        [B, S, H, D] in the dtype of `q`.

    Reference:
        Dao (arXiv:2307.08691), algorithm 2, of which this is the loop over keys.
    """
    segmented = segments is not None
    tuning = tuning or choose("queries", q.shape[-1], segmented=segmented)
    batch, _, heads, size = q.shape
    slots, stages, chunk = schedule.num_slots, tuning.stages, schedule.chunk
    outputs = [jax.ShapeDtypeStruct(q.shape, q.dtype)]
    if slots:
        part = (batch, heads, slots, TILE, size)
        outputs.append(jax.ShapeDtypeStruct(part, jnp.float32))
    rows = TILE // schedule.row_unit
    lanes = chunk // schedule.column_unit
    vectors = 1 + segmented
    tiles = tuning.tiles
    d_tiles = tiles if size < 128 else 1  # of its gradients come once it is under way
    halves = launch.NUM_HALVES, HALF
    scratch = _Memory(
        q=launch.matrix((tiles, *halves, size), q.dtype),
        d_out=launch.matrix((d_tiles, *halves, size), q.dtype),
        lse=plgpu.SMEM((tiles, *halves), jnp.float32),
        delta=plgpu.SMEM((d_tiles, *halves), jnp.float32),
        k=launch.matrix((stages, chunk, size), q.dtype),
        v=launch.matrix((stages, chunk, size), q.dtype),
        q_there=plgpu.Barrier(num_arrivals=rows * (1 + vectors), num_barriers=tiles),
        d_there=plgpu.Barrier(num_arrivals=rows * 2, num_barriers=d_tiles),
        k_there=plgpu.Barrier(num_arrivals=lanes * vectors, num_barriers=stages),
        v_there=plgpu.Barrier(num_arrivals=lanes, num_barriers=stages),
        q_used=plgpu.Barrier(num_arrivals=launch.NUM_HALVES, num_barriers=tiles),
        d_used=plgpu.Barrier(num_arrivals=launch.NUM_HALVES, num_barriers=d_tiles),
        k_used=plgpu.Barrier(num_arrivals=launch.NUM_HALVES, num_barriers=stages),
        v_used=plgpu.Barrier(num_arrivals=launch.NUM_HALVES, num_barriers=stages),
    )
    if segmented:
        scratch = scratch._replace(
            row_segments=plgpu.SMEM((tiles, *halves), jnp.int32),
            column_segments=plgpu.SMEM((stages, chunk), jnp.int32),
        )
    body = functools.partial(_body, schedule, options, tuning, interpret is not None)
    stats = logits.base_2(lse), delta
    inputs = (q, k, v, d_out, *stats, *(segments or ()))
    dq, *part = launch.call(body, schedule, inputs, outputs, scratch, tuning, interpret)
    return merge_sums(dq, part[0], schedule) if slots else dq


class _Memory(NamedTuple):
    """Tiles and chunks of a program, and what says that they are there or used."""

    q: Any
    d_out: Any
    lse: Any
    delta: Any
    k: Any
    v: Any
    q_there: Any
    d_there: Any
    k_there: Any
    v_there: Any
    q_used: Any
    d_used: Any
    k_used: Any
    v_used: Any
    row_segments: Any = None
    column_segments: Any = None


def _body(sizes, options, tuning, simulated, schedule, inputs, outputs, memory):
    work = find_work(schedule, sizes, inputs[0].shape[0])
    arithmetic = Arithmetic(simulated)
    launch.divide(
        lambda: _compute(work, options, tuning, arithmetic, outputs, memory),
        lambda: _copy(work, tuning, inputs, memory),
    )


def _copy(work, tuning, inputs, memory):
    """Fills shared memory with what each item needs."""
    q_ref, k_ref, v_ref, d_ref, lse_ref, delta_ref, *segment_refs = inputs
    group = q_ref.shape[2] // k_ref.shape[2]

    def copy_tile(item, rows, number):
        slot = lax.rem(number, index(tuning.tiles))
        moves = [
            (copies.rows_of(q_ref, item), memory.q.at[slot]),
            (copies.numbers_of(lse_ref, item), memory.lse.at[slot]),
        ]
        if segment_refs:
            ref, tile = segment_refs[0], memory.row_segments
            moves.append((lambda tokens: ref.at[item.sequence, tokens], tile.at[slot]))
        copies.wait_for_room(memory.q_used, number, tuning.tiles)
        copies.copy_rows(work, rows, memory.q_there.at[slot], moves)
        d_tiles = memory.d_out.shape[0]
        slot = lax.rem(number, index(d_tiles))
        moves = [
            (copies.rows_of(d_ref, item), memory.d_out.at[slot]),
            (copies.numbers_of(delta_ref, item), memory.delta.at[slot]),
        ]
        copies.wait_for_room(memory.d_used, number, d_tiles)
        copies.copy_rows(work, rows, memory.d_there.at[slot], moves)

    def copy_chunk(item, chunk, copied):
        columns = copies.read_columns(work, chunk)
        sequence, head = item.sequence, lax.div(item.head, index(group))
        slot = lax.rem(copied, index(tuning.stages))
        moves = [
            (lambda tokens, _: v_ref.at[sequence, tokens, head], memory.v.at[slot])
        ]
        copies.wait_for_room(memory.v_used, copied, tuning.stages)
        copies.copy_columns(columns, memory.v_there.at[slot], moves)
        moves = [
            (lambda tokens, _: k_ref.at[sequence, tokens, head], memory.k.at[slot])
        ]
        if segment_refs:
            ref, tile = segment_refs[1], memory.column_segments
            moves.append((lambda tokens, _: ref.at[sequence, tokens], tile.at[slot]))
        copies.wait_for_room(memory.k_used, copied, tuning.stages)
        copies.copy_columns(columns, memory.k_there.at[slot], moves)

    copies.copy_all(
        work,
        tuning,
        copy_tile,
        copy_chunk,
        [(memory.q_used, tuning.tiles), (memory.d_used, memory.d_out.shape[0])],
        [memory.k_used, memory.v_used],
    )


def _compute(work, options, tuning, arithmetic, outputs, memory):
    """Gradients of the queries of each item, for a half of its tile."""
    dq_ref, *part_refs = outputs
    segmented = memory.row_segments is not None
    schedule, sizes = work.schedule, work.sizes
    half = lax.axis_index("warpgroup")
    read_words = functools.partial(logits.read_words, arithmetic, schedule)
    shape, size = (HALF, sizes.chunk), memory.q.shape[-1]
    tiles, d_tiles = tuning.tiles, memory.d_out.shape[0]

    def release(number):
        """A result lies where its queries were until it is stored."""
        copies.wait_until_stored()
        plgpu.barrier_arrive(memory.q_used.at[lax.rem(number, index(tiles))])

    def compute_item(number, item, taken):
        slot, d_slot = (lax.rem(number, index(slots)) for slots in (tiles, d_tiles))
        rows = copies.read_rows(work, item, half * index(HALF), HALF)
        plgpu.barrier_wait(memory.q_there.at[slot])
        lse = arithmetic.load(memory.lse.at[slot, half], ROWS)
        of_rows: Any = None
        if segmented:
            of_rows = arithmetic.load(memory.row_segments.at[slot, half], ROWS)
        plgpu.commit_smem()  # numbers that were loaded may be copied over soon

        def chunk(nth, dq, masked):
            stage = lax.rem(taken + nth, index(tuning.stages))
            is_last = nth == item.count - 1
            words = read_words(item.first + nth, half) if masked else None

            def get_values():
                if tiles > 1:
                    pl.when((nth == 0) & (number > 0))(lambda: release(number - 1))
                pl.when(nth == 0)(lambda: plgpu.barrier_wait(memory.d_there.at[d_slot]))
                plgpu.barrier_wait(memory.v_there.at[stage])
                return memory.d_out.at[d_slot, half], memory.v.at[stage]

            def weigh(scores):
                scores, slope = logits.bend(scores, options)
                p = jnp.exp2(scores - logits.along_rows(lse, shape))
                p = logits.mask_cells(arithmetic, p, sizes, words, 0.0)
                if segmented:
                    ref = memory.column_segments.at[stage]
                    of_columns = arithmetic.load(ref, COLUMNS)
                    p = logits.mask_segments(p, of_rows, of_columns, 0.0)
                    plgpu.commit_smem()
                return p, slope

            plgpu.barrier_wait(memory.k_there.at[stage])
            pair = memory.q.at[slot, half], memory.k.at[stage]
            (p, slope), dp = arithmetic.products(pair, get_values, weigh)
            plgpu.barrier_arrive(memory.v_used.at[stage])
            delta = arithmetic.load(memory.delta.at[d_slot, half], ROWS)

            @pl.when(is_last)
            def _():
                plgpu.commit_smem()
                plgpu.barrier_arrive(memory.d_used.at[d_slot])

            ds = p * (dp - logits.along_rows(delta, shape))
            ds = ds if slope is None else ds * slope
            [dq] = arithmetic.accumulate((dq, ds, memory.k.at[stage]))
            plgpu.barrier_arrive(memory.k_used.at[stage])
            return dq

        dq = arithmetic.full((HALF, size), 0.0, plgpu.Layout.WGMMA)
        dq = lax.fori_loop(0, item.full, functools.partial(chunk, masked=False), dq)
        masked = functools.partial(chunk, masked=True)
        dq = lax.fori_loop(item.full, item.count, masked, dq) * options.scale

        @pl.when(item.slot < 0)
        def _():
            buffer = memory.q.at[slot, half]
            buffer[...] = dq.astype(memory.q.dtype)
            copies.store_rows(work, rows, [(buffer, copies.rows_of(dq_ref, item))])

        if part_refs:
            copies.store_part(item, [(part_refs[0], dq)])
        if tiles == 1:
            release(number)
        return taken + item.count

    work.for_each(compute_item, index(0))
    if tiles > 1:
        pl.when(work.count > 0)(lambda: release(work.count - 1))
