"""Kernel of the gradients of keys and values, dk and dv."""

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


def backward_keys(
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
) -> tuple[jax.Array, jax.Array]:
    """Runs `reference.backward_keys` on a Hopper GPU, for 16-bit arrays.

    A `tuning` of None is chosen by head size; `interpret` holds the interpreter's
    parameters, None on a GPU.

    Reference:
        Dao (arXiv:2307.08691), algorithm 2, its loop over queries.
    """
    segmented = segments is not None
    tuning = tuning or choose_tuning("keys", q.shape[-1], segmented=segmented)
    stats = logits.base_2(lse), delta
    inputs = (q, k, v, d_out, *stats, *(segments or ()))
    run = functools.partial(
        _run_channels, inputs, schedule, options, tuning=tuning, interpret=interpret
    )
    size = k.shape[-1]
    # dk and dv of 256 channels would take 256 registers: one launch per slice.
    slices = launch.channel_slices(size, segmented=segmented and size > 128)
    gradients = [run(channels) for channels in slices]
    dk, dv = (jnp.concatenate(x, axis=-1) for x in zip(*gradients, strict=True))
    return dk, dv


def _run_channels(inputs, schedule, options, channels, *, tuning, interpret):
    """Computes some channels of dk and dv."""
    q, k = inputs[:2]
    batch, length, heads, size = k.shape
    slots, stages, chunk = schedule.num_slots, tuning.stages, schedule.chunk
    width = channels.stop - channels.start
    outputs = [jax.ShapeDtypeStruct((batch, length, heads, width), k.dtype)] * 2
    if slots:
        partial = (batch, heads, slots, TILE, width)
        outputs += [jax.ShapeDtypeStruct(partial, jnp.float32)] * 2
    rows = TILE // schedule.row_unit
    lanes = chunk // schedule.column_unit
    # Segments of queries and keys are the last inputs.
    segmented = len(inputs) > 6
    tiles = tuning.tiles
    tile = (tiles, launch.NUM_HALVES, HALF)
    scratch = _Memory(
        k=launch.smem_matrix((*tile, size), q.dtype),
        v=launch.smem_matrix((*tile, size), q.dtype),
        q=launch.smem_matrix((stages, chunk, size), q.dtype),
        d_out=launch.smem_matrix((stages, chunk, size), q.dtype),
        stats=plgpu.SMEM((2, stages, chunk), jnp.float32),
        # Arrivals are copies: of k and segments, of q, lse and segments, of d_out and
        # delta.
        k_ready=plgpu.Barrier(num_arrivals=rows * (1 + segmented), num_barriers=tiles),
        v_ready=plgpu.Barrier(num_arrivals=rows, num_barriers=tiles),
        q_ready=plgpu.Barrier(
            num_arrivals=lanes * (2 + segmented), num_barriers=stages
        ),
        d_ready=plgpu.Barrier(num_arrivals=lanes * 2, num_barriers=stages),
        k_free=plgpu.Barrier(num_arrivals=launch.NUM_HALVES, num_barriers=tiles),
        v_free=plgpu.Barrier(num_arrivals=launch.NUM_HALVES, num_barriers=tiles),
        q_free=plgpu.Barrier(num_arrivals=launch.NUM_HALVES, num_barriers=stages),
        d_free=plgpu.Barrier(num_arrivals=launch.NUM_HALVES, num_barriers=stages),
    )
    if width < size:
        # Results of a slice do not have the shape of k and v: they need a place.
        result = launch.smem_matrix((launch.NUM_HALVES, HALF, width), k.dtype)
        scratch = scratch._replace(result=result)
    if segmented:
        scratch = scratch._replace(
            row_segments=plgpu.SMEM(tile, jnp.int32),
            column_segments=plgpu.SMEM((stages, chunk), jnp.int32),
        )
    body = functools.partial(
        _body, schedule, options, tuning, interpret is not None, channels
    )
    dk, dv, *partial = launch.call(
        body, schedule, inputs, outputs, scratch, tuning, interpret
    )
    if slots:
        dk, dv = (
            merge_gradients(x, y, schedule)
            for x, y in zip((dk, dv), partial, strict=True)
        )
    return dk, dv


class _Memory(NamedTuple):
    """Shared memory and barriers: `ready` when filled, `free` when consumed."""

    k: Any
    v: Any
    q: Any
    d_out: Any
    stats: Any
    k_ready: Any
    v_ready: Any
    q_ready: Any
    d_ready: Any
    k_free: Any
    v_free: Any
    q_free: Any
    d_free: Any
    result: Any = None
    row_segments: Any = None
    column_segments: Any = None


def _body(
    sizes, options, tuning, simulated, channels, schedule, inputs, outputs, memory
):
    """Divides the work of a program between the warpgroups."""
    q_ref, k_ref = inputs[:2]
    group = q_ref.shape[2] // k_ref.shape[2]
    work = find_work(schedule, sizes, q_ref.shape[0], group)
    arithmetic = Arithmetic(simulated)
    specialize_warpgroups(
        lambda: _compute(work, options, tuning, arithmetic, channels, outputs, memory),
        lambda: _copy(work, tuning, inputs, memory),
    )


def _copy(work, tuning, inputs, memory):
    """Copies keys, values, queries and cotangents, in the warpgroup that copies."""
    q_ref, k_ref, v_ref, d_ref, lse_ref, delta_ref, *segment_refs = inputs

    def copy_tile(item, rows, number):
        slot = lax.rem(number, index(tuning.tiles))
        moves = [(copies.token_rows(k_ref, item), memory.k.at[slot])]
        if segment_refs:
            ref, tile = segment_refs[1], memory.row_segments
            moves.append((lambda tokens: ref.at[item.sequence, tokens], tile.at[slot]))
        copies.wait_for_free_slot(memory.k_free, number, tuning.tiles)
        copies.copy_rows(work, rows, memory.k_ready.at[slot], moves)
        moves = [(copies.token_rows(v_ref, item), memory.v.at[slot])]
        copies.wait_for_free_slot(memory.v_free, number, tuning.tiles)
        copies.copy_rows(work, rows, memory.v_ready.at[slot], moves)

    def copy_chunk(item, chunk, copied):
        columns = copies.read_columns(work, chunk)
        slot = lax.rem(copied, index(tuning.stages))
        sequence, first = item.sequence, item.head * index(work.group)

        def of_matrix(ref):
            return lambda tokens, member: ref.at[sequence, tokens, first + member]

        def of_vector(ref):
            return lambda tokens, member: ref.at[sequence, first + member, tokens]

        moves: list[Any] = [
            (of_matrix(q_ref), memory.q.at[slot]),
            (of_vector(lse_ref), memory.stats.at[0, slot]),
        ]
        if segment_refs:
            ref, tile = segment_refs[0], memory.column_segments
            moves.append((lambda tokens, _: ref.at[sequence, tokens], tile.at[slot]))
        copies.wait_for_free_slot(memory.q_free, copied, tuning.stages)
        copies.copy_columns(columns, memory.q_ready.at[slot], moves)
        moves = [
            (of_matrix(d_ref), memory.d_out.at[slot]),
            (of_vector(delta_ref), memory.stats.at[1, slot]),
        ]
        copies.wait_for_free_slot(memory.d_free, copied, tuning.stages)
        copies.copy_columns(columns, memory.d_ready.at[slot], moves)

    copies.produce(
        work,
        tuning,
        copy_tile,
        copy_chunk,
        [(memory.k_free, tuning.tiles), (memory.v_free, tuning.tiles)],
        [memory.q_free, memory.d_free],
    )


def _compute(work, options, tuning, arithmetic, channels, outputs, memory):
    """Computes the gradients of half of each tile, in one of two warpgroups."""
    dk_ref, dv_ref, *partial_refs = outputs
    segmented = memory.row_segments is not None
    schedule, sizes = work.schedule, work.static
    half = lax.axis_index("warpgroup")
    read_words = functools.partial(logits.read_words, arithmetic, schedule)
    shape = HALF, sizes.chunk
    width = channels.stop - channels.start
    output_channels = pl.ds(channels.start, width)

    def release(number):
        """Waits until results are stored from the tile, then frees the tile."""
        slot = lax.rem(number, index(tuning.tiles))
        copies.wait_for_stores()
        plgpu.barrier_arrive(memory.k_free.at[slot])
        plgpu.barrier_arrive(memory.v_free.at[slot])

    def compute_item(number, item, num_consumed):
        slot = lax.rem(number, index(tuning.tiles))
        rows = copies.read_rows(work, item, half * index(HALF), HALF)
        plgpu.barrier_wait(memory.k_ready.at[slot])
        row_segments: Any = None
        if segmented:
            row_segments = arithmetic.load(memory.row_segments.at[slot, half], ROWS)
            plgpu.commit_smem()  # the producer may overwrite what was loaded

        def chunk(nth, grads, masked):
            dk, dv = grads
            stage = lax.rem(num_consumed + nth, index(tuning.stages))
            words = read_words(item.first + nth, half) if masked else None

            plgpu.barrier_wait(memory.q_ready.at[stage])
            # One product at a time: both at once, as for dq, took 5 % longer.
            scores, _ = arithmetic.product(memory.k.at[slot, half], memory.q.at[stage])
            scores, slope = logits.scale_and_cap(scores, options)

            def compute_weights():
                lse = arithmetic.load(memory.stats.at[0, stage], COLUMNS)
                p = jnp.exp2(scores - logits.per_column(lse, shape))
                p = logits.mask_cells(arithmetic, p, sizes, words, 0.0)
                if not segmented:
                    return p
                column_segments = arithmetic.load(
                    memory.column_segments.at[stage], COLUMNS
                )
                return logits.mask_segments(p, row_segments, column_segments, 0.0)

            @pl.when(nth == 0)
            def _():
                # The store of the last item ends while the first scores are computed.
                if tuning.tiles > 1:
                    pl.when(number > 0)(lambda: release(number - 1))
                # Only here: the scores need k and q alone.
                plgpu.barrier_wait(memory.v_ready.at[slot])

            plgpu.barrier_wait(memory.d_ready.at[stage])
            # Weights are computed while tensor cores compute dp.
            dp, p = arithmetic.product(
                memory.v.at[slot, half], memory.d_out.at[stage], compute_weights
            )
            delta = arithmetic.load(memory.stats.at[1, stage], COLUMNS)
            plgpu.commit_smem()  # the producer may overwrite what was loaded
            ds = p * (dp - logits.per_column(delta, shape))
            ds = ds if slope is None else ds * slope
            dv, dk = arithmetic.accumulate(
                (dv, p, memory.d_out.at[stage, :, output_channels]),
                (dk, ds, memory.q.at[stage, :, output_channels]),
            )
            plgpu.barrier_arrive(memory.d_free.at[stage])
            plgpu.barrier_arrive(memory.q_free.at[stage])
            return dk, dv

        zeros = arithmetic.full((HALF, width), 0.0, plgpu.Layout.WGMMA)
        full = functools.partial(chunk, masked=False)
        grads = lax.fori_loop(0, item.full, full, (zeros, zeros))
        masked = functools.partial(chunk, masked=True)
        dk, dv = lax.fori_loop(item.full, item.count, masked, grads)
        dk *= options.scale

        @pl.when(item.slot < 0)
        def _():
            # Results take the place of k and v, so that two tiles fit.
            for grad, slots, ref in ((dk, memory.k, dk_ref), (dv, memory.v, dv_ref)):
                buffer = slots.at[slot, half]
                if memory.result is not None:
                    copies.wait_for_stores()
                    buffer = memory.result.at[half]
                buffer[...] = grad.astype(memory.k.dtype)
                copies.store_rows(work, rows, [(buffer, copies.token_rows(ref, item))])

        if partial_refs:
            copies.store_partial(item, list(zip(partial_refs, (dk, dv), strict=True)))
        if tuning.tiles == 1:
            release(number)
        return num_consumed + item.count

    work.for_each(compute_item, index(0))
    if tuning.tiles > 1:
        pl.when(work.count > 0)(lambda: release(work.count - 1))
