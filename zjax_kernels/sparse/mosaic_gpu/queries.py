"""Kernel of the gradients of the queries, dq."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from zjax_kernels.sparse.chunks import HALF, TILE
from zjax_kernels.sparse.mosaic_gpu import arithmetic as logits
from zjax_kernels.sparse.mosaic_gpu import copies, launch
from zjax_kernels.sparse.mosaic_gpu.arithmetic import COLUMNS, ROWS, Arithmetic, index
from zjax_kernels.sparse.mosaic_gpu.launch import find_work, merge_gradients
from zjax_kernels.sparse.reference import Options
from zjax_kernels.sparse.schedule import Schedule
from zjax_kernels.sparse.tuning import Tuning, choose_tuning
from zjax_kernels.warpgroups import specialize_warpgroups


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
    """Runs `reference.backward_queries` on a Hopper GPU, for 16-bit arrays.

    A `tuning` of None is chosen by head size; `interpret` holds the interpreter's
    parameters, None on a GPU.

    Reference:
        Dao (arXiv:2307.08691), algorithm 2, its loop over keys.
    """
    segmented = segments is not None
    tuning = tuning or choose_tuning("queries", q.shape[-1], segmented=segmented)
    batch, _, heads, size = q.shape
    slots, stages, chunk = schedule.num_slots, tuning.stages, schedule.chunk
    outputs = [jax.ShapeDtypeStruct(q.shape, q.dtype)]
    if slots:
        partial = (batch, heads, slots, TILE, size)
        outputs.append(jax.ShapeDtypeStruct(partial, jnp.float32))
    rows = TILE // schedule.row_unit
    lanes = chunk // schedule.column_unit
    vectors = 1 + segmented
    tiles = tuning.tiles
    # One slot saves shared memory: d_out is needed, and copied, after q.
    d_tiles = tiles if size < 128 else 1
    halves = launch.NUM_HALVES, HALF
    scratch = _Memory(
        q=launch.smem_matrix((tiles, *halves, size), q.dtype),
        d_out=launch.smem_matrix((d_tiles, *halves, size), q.dtype),
        lse=plgpu.SMEM((tiles, *halves), jnp.float32),
        delta=plgpu.SMEM((d_tiles, *halves), jnp.float32),
        k=launch.smem_matrix((stages, chunk, size), q.dtype),
        v=launch.smem_matrix((stages, chunk, size), q.dtype),
        # Arrivals are copies: of q, lse and segments, and of d_out and delta.
        q_ready=plgpu.Barrier(num_arrivals=rows * (1 + vectors), num_barriers=tiles),
        d_ready=plgpu.Barrier(num_arrivals=rows * 2, num_barriers=d_tiles),
        k_ready=plgpu.Barrier(num_arrivals=lanes * vectors, num_barriers=stages),
        v_ready=plgpu.Barrier(num_arrivals=lanes, num_barriers=stages),
        q_free=plgpu.Barrier(num_arrivals=launch.NUM_HALVES, num_barriers=tiles),
        d_free=plgpu.Barrier(num_arrivals=launch.NUM_HALVES, num_barriers=d_tiles),
        k_free=plgpu.Barrier(num_arrivals=launch.NUM_HALVES, num_barriers=stages),
        v_free=plgpu.Barrier(num_arrivals=launch.NUM_HALVES, num_barriers=stages),
    )
    if segmented:
        scratch = scratch._replace(
            row_segments=plgpu.SMEM((tiles, *halves), jnp.int32),
            column_segments=plgpu.SMEM((stages, chunk), jnp.int32),
        )
    body = functools.partial(_body, schedule, options, tuning, interpret is not None)
    stats = logits.base_2(lse), delta
    inputs = (q, k, v, d_out, *stats, *(segments or ()))
    dq, *partial = launch.call(
        body, schedule, inputs, outputs, scratch, tuning, interpret
    )
    return merge_gradients(dq, partial[0], schedule) if slots else dq


class _Memory(NamedTuple):
    """Shared memory and barriers: `ready` when filled, `free` when consumed."""

    q: Any
    d_out: Any
    lse: Any
    delta: Any
    k: Any
    v: Any
    q_ready: Any
    d_ready: Any
    k_ready: Any
    v_ready: Any
    q_free: Any
    d_free: Any
    k_free: Any
    v_free: Any
    row_segments: Any = None
    column_segments: Any = None


def _body(sizes, options, tuning, simulated, schedule, inputs, outputs, memory):
    """Divides the work of a program between the warpgroups."""
    work = find_work(schedule, sizes, inputs[0].shape[0])
    arithmetic = Arithmetic(simulated)
    specialize_warpgroups(
        lambda: _compute(work, options, tuning, arithmetic, outputs, memory),
        lambda: _copy(work, tuning, inputs, memory),
    )


def _copy(work, tuning, inputs, memory):
    """Copies queries, keys, values and cotangents, in the warpgroup that copies."""
    q_ref, k_ref, v_ref, d_ref, lse_ref, delta_ref, *segment_refs = inputs
    group = q_ref.shape[2] // k_ref.shape[2]

    def copy_tile(item, rows, number):
        slot = lax.rem(number, index(tuning.tiles))
        moves = [
            (copies.token_rows(q_ref, item), memory.q.at[slot]),
            (copies.token_scalars(lse_ref, item), memory.lse.at[slot]),
        ]
        if segment_refs:
            ref, tile = segment_refs[0], memory.row_segments
            moves.append((lambda tokens: ref.at[item.sequence, tokens], tile.at[slot]))
        copies.wait_for_free_slot(memory.q_free, number, tuning.tiles)
        copies.copy_rows(work, rows, memory.q_ready.at[slot], moves)
        d_tiles = memory.d_out.shape[0]
        slot = lax.rem(number, index(d_tiles))
        moves = [
            (copies.token_rows(d_ref, item), memory.d_out.at[slot]),
            (copies.token_scalars(delta_ref, item), memory.delta.at[slot]),
        ]
        copies.wait_for_free_slot(memory.d_free, number, d_tiles)
        copies.copy_rows(work, rows, memory.d_ready.at[slot], moves)

    def copy_chunk(item, chunk, copied):
        columns = copies.read_columns(work, chunk)
        sequence, head = item.sequence, lax.div(item.head, index(group))
        slot = lax.rem(copied, index(tuning.stages))
        moves = [
            (lambda tokens, _: v_ref.at[sequence, tokens, head], memory.v.at[slot])
        ]
        # Values first: the slot of v is free before the slot of k, which dq reads last.
        copies.wait_for_free_slot(memory.v_free, copied, tuning.stages)
        copies.copy_columns(columns, memory.v_ready.at[slot], moves)
        moves = [
            (lambda tokens, _: k_ref.at[sequence, tokens, head], memory.k.at[slot])
        ]
        if segment_refs:
            ref, tile = segment_refs[1], memory.column_segments
            moves.append((lambda tokens, _: ref.at[sequence, tokens], tile.at[slot]))
        copies.wait_for_free_slot(memory.k_free, copied, tuning.stages)
        copies.copy_columns(columns, memory.k_ready.at[slot], moves)

    copies.produce(
        work,
        tuning,
        copy_tile,
        copy_chunk,
        [(memory.q_free, tuning.tiles), (memory.d_free, memory.d_out.shape[0])],
        [memory.k_free, memory.v_free],
    )


def _compute(work, options, tuning, arithmetic, outputs, memory):
    """Computes the gradients of half of each tile, in one of two warpgroups."""
    dq_ref, *partial_refs = outputs
    segmented = memory.row_segments is not None
    schedule, sizes = work.schedule, work.static
    half = lax.axis_index("warpgroup")
    read_words = functools.partial(logits.read_words, arithmetic, schedule)
    shape, size = (HALF, sizes.chunk), memory.q.shape[-1]
    tiles, d_tiles = tuning.tiles, memory.d_out.shape[0]

    def release(number):
        """Waits for the store of dq from the memory of q, then frees the tile."""
        copies.wait_for_stores()
        plgpu.barrier_arrive(memory.q_free.at[lax.rem(number, index(tiles))])

    def compute_item(number, item, num_consumed):
        slot, d_slot = (lax.rem(number, index(slots)) for slots in (tiles, d_tiles))
        rows = copies.read_rows(work, item, half * index(HALF), HALF)
        plgpu.barrier_wait(memory.q_ready.at[slot])
        lse = arithmetic.load(memory.lse.at[slot, half], ROWS)
        row_segments: Any = None
        if segmented:
            row_segments = arithmetic.load(memory.row_segments.at[slot, half], ROWS)
        plgpu.commit_smem()  # fence: loads finish before the producer may overwrite

        def chunk(nth, dq, masked):
            stage = lax.rem(num_consumed + nth, index(tuning.stages))
            is_last = nth == item.count - 1
            words = read_words(item.first + nth, half) if masked else None

            def wait_for_d_out_and_v():
                # The store of the last item ends while the first scores are computed.
                if tiles > 1:
                    pl.when((nth == 0) & (number > 0))(lambda: release(number - 1))
                pl.when(nth == 0)(lambda: plgpu.barrier_wait(memory.d_ready.at[d_slot]))
                plgpu.barrier_wait(memory.v_ready.at[stage])
                return memory.d_out.at[d_slot, half], memory.v.at[stage]

            def compute_weights(scores):
                scores, slope = logits.scale_and_cap(scores, options)
                p = jnp.exp2(scores - logits.per_row(lse, shape))
                # Weights are masked, not scores: there is no maximum to keep finite.
                p = logits.mask_cells(arithmetic, p, sizes, words, 0.0)
                if segmented:
                    ref = memory.column_segments.at[stage]
                    column_segments = arithmetic.load(ref, COLUMNS)
                    p = logits.mask_segments(p, row_segments, column_segments, 0.0)
                    plgpu.commit_smem()  # the producer may overwrite what was loaded
                return p, slope

            plgpu.barrier_wait(memory.k_ready.at[stage])
            pair = memory.q.at[slot, half], memory.k.at[stage]
            (p, slope), dp = arithmetic.overlapped_products(
                pair, wait_for_d_out_and_v, compute_weights
            )
            plgpu.barrier_arrive(memory.v_free.at[stage])
            delta = arithmetic.load(memory.delta.at[d_slot, half], ROWS)

            # d_out is free before q, which keeps dq until the store ends.
            @pl.when(is_last)
            def _():
                plgpu.commit_smem()
                plgpu.barrier_arrive(memory.d_free.at[d_slot])

            ds = p * (dp - logits.per_row(delta, shape))
            ds = ds if slope is None else ds * slope
            [dq] = arithmetic.accumulate((dq, ds, memory.k.at[stage]))
            plgpu.barrier_arrive(memory.k_free.at[stage])
            return dq

        dq = arithmetic.full((HALF, size), 0.0, plgpu.Layout.WGMMA)
        dq = lax.fori_loop(0, item.full, functools.partial(chunk, masked=False), dq)
        masked = functools.partial(chunk, masked=True)
        dq = lax.fori_loop(item.full, item.count, masked, dq) * options.scale

        @pl.when(item.slot < 0)
        def _():
            # dq takes the place of q, which nobody reads any more: two tiles fit.
            buffer = memory.q.at[slot, half]
            buffer[...] = dq.astype(memory.q.dtype)
            copies.store_rows(work, rows, [(buffer, copies.token_rows(dq_ref, item))])

        if partial_refs:
            copies.store_partial(item, [(partial_refs[0], dq)])
        if tiles == 1:
            release(number)
        return num_consumed + item.count

    work.for_each(compute_item, index(0))
    if tiles > 1:
        pl.when(work.count > 0)(lambda: release(work.count - 1))
