"""The backward pass of the keys and the values."""

import functools
from typing import Any

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
from zjax_kernels.sparse.mosaic_gpu.work import Work
from zjax_kernels.sparse.reference import Options
from zjax_kernels.sparse.schedule import Schedule
from zjax_kernels.sparse.tuning import Tuning, choose


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
    """As `reference.backward_keys`, on a Hopper GPU.

    Args:
        q: [B, S, H, D] queries, of 16 bits.
        k: [B, T, K, D] keys.
        v: [B, T, K, D] values.
        d_out: [B, S, H, D] gradient of the averages.
        lse: float32[B, H, S] as `forward` returned it.
        delta: float32[B, H, S], as in the reference.
        segments: int32[B, S] and int32[B, T].
        schedule: Tiles of keys.
        options: What scores mean.
        tuning: How the kernel runs; chosen by the head size if none.
        interpret: Parameters of the interpreter, or none on a GPU.

    Returns:
        [B, T, K, D] each, in the dtypes of `k` and `v`.

    Reference:
        Dao (arXiv:2307.08691), algorithm 2, of which this is the loop over queries.
    """
    segmented = segments is not None
    tuning = tuning or choose("keys", q.shape[-1], segmented=segmented)
    stats = logits.base_2(lse), delta
    inputs = (q, k, v, d_out, *stats, *(segments or ()))
    run = functools.partial(
        _run, inputs, schedule, options, tuning=tuning, interpret=interpret
    )
    found = [run(channels) for channels in _parts(k.shape[-1], segmented)]
    dk, dv = (jnp.concatenate(x, axis=-1) for x in zip(*found, strict=True))
    return dk, dv


def _parts(head_size, segmented):
    """Channels of dk and dv that there is room for at a time."""
    most = 64 if head_size > 128 and segmented else 128
    starts = range(0, head_size, most)
    return [slice(start, min(start + most, head_size)) for start in starts]


def _run(inputs, schedule, options, channels, *, tuning, interpret):
    """Some channels of dk and dv."""
    q, k = inputs[:2]
    batch, length, heads, size = k.shape
    slots, stages, chunk = schedule.num_slots, tuning.stages, schedule.chunk
    width = channels.stop - channels.start
    outputs = [jax.ShapeDtypeStruct((batch, length, heads, width), k.dtype)] * 2
    if slots:
        part = (batch, heads, slots, TILE, width)
        outputs += [jax.ShapeDtypeStruct(part, jnp.float32)] * 2
    rows = TILE // schedule.row_unit
    lanes = chunk // schedule.column_unit
    segmented = len(inputs) > 6
    tile = (tuning.tiles, launch.NUM_HALVES, HALF)
    scratch = [
        launch.matrix((*tile, size), q.dtype),
        launch.matrix((*tile, size), q.dtype),
        launch.matrix((stages, chunk, size), q.dtype),
        launch.matrix((stages, chunk, size), q.dtype),
        plgpu.SMEM((2, stages, chunk), jnp.float32),
        launch.matrix((launch.NUM_HALVES, HALF, width), k.dtype),
        plgpu.Barrier(num_arrivals=rows * (2 + segmented), num_barriers=tuning.tiles),
        plgpu.Barrier(num_arrivals=lanes * (2 + segmented), num_barriers=stages),
        plgpu.Barrier(num_arrivals=lanes * 2, num_barriers=stages),
        plgpu.Barrier(num_arrivals=launch.NUM_HALVES, num_barriers=tuning.tiles),
        plgpu.Barrier(num_arrivals=launch.NUM_HALVES, num_barriers=stages),
        plgpu.Barrier(num_arrivals=launch.NUM_HALVES, num_barriers=stages),
    ]
    if segmented:
        scratch.append(plgpu.SMEM(tile, jnp.int32))
        scratch.append(plgpu.SMEM((stages, chunk), jnp.int32))
    body = functools.partial(
        _body, schedule, options, tuning, interpret is not None, channels
    )
    dk, dv, *part = launch.call(
        body, schedule, inputs, outputs, scratch, tuning, interpret
    )
    if slots:
        dk, dv = (
            merge_sums(x, y, schedule) for x, y in zip((dk, dv), part, strict=True)
        )
    return dk, dv


def _body(
    sizes, options, tuning, simulated, channels, schedule, inputs, outputs, scratch
):
    q_ref, k_ref = inputs[:2]
    group = q_ref.shape[2] // k_ref.shape[2]
    work = Work(schedule, sizes, q_ref.shape[0], tuning.programs, group)
    arithmetic = Arithmetic(simulated)
    launch.divide(
        lambda: _compute(work, options, tuning, arithmetic, channels, outputs, scratch),
        lambda: _copy(work, tuning, inputs, scratch),
    )


def _copy(work, tuning, inputs, scratch):
    """Fills shared memory with what each item needs."""
    q_ref, k_ref, v_ref, d_ref, lse_ref, delta_ref, *segment_refs = inputs
    k_tile, v_tile, q_chunk, d_chunk, stats_chunk, _ = scratch[:6]
    there, q_there, d_there, used, q_used, d_used, *segment_tiles = scratch[6:]

    def copy_tile(item, slot):
        sequence, head = item.sequence, item.head
        moves = [
            (lambda tokens: k_ref.at[sequence, tokens, head], k_tile.at[slot]),
            (lambda tokens: v_ref.at[sequence, tokens, head], v_tile.at[slot]),
        ]
        if segment_refs:
            ref, tile = segment_refs[1], segment_tiles[0]
            moves.append((lambda tokens: ref.at[sequence, tokens], tile.at[slot]))
        copies.copy_rows(work, item, there.at[slot], moves)

    def copy_chunk(item, chunk, copied):
        columns = copies.read_columns(work, chunk)
        slot = lax.rem(copied, index(tuning.stages))
        sequence, first = item.sequence, item.head * index(work.group)

        def of_matrix(ref):
            return lambda tokens, member: ref.at[sequence, tokens, first + member]

        def of_vector(ref):
            return lambda tokens, member: ref.at[sequence, first + member, tokens]

        moves: list[Any] = [
            (of_matrix(q_ref), q_chunk.at[slot]),
            (of_vector(lse_ref), stats_chunk.at[0, slot]),
        ]
        if segment_refs:
            ref, tile = segment_refs[0], segment_tiles[1]
            moves.append((lambda tokens, _: ref.at[sequence, tokens], tile.at[slot]))
        copies.wait_for_room(q_used, copied, tuning.stages)
        copies.copy_columns(columns, q_there.at[slot], moves)
        moves = [
            (of_matrix(d_ref), d_chunk.at[slot]),
            (of_vector(delta_ref), stats_chunk.at[1, slot]),
        ]
        copies.wait_for_room(d_used, copied, tuning.stages)
        copies.copy_columns(columns, d_there.at[slot], moves)

    copies.copy_all(work, tuning, copy_tile, copy_chunk, used, (q_used, d_used))


def _compute(work, options, tuning, arithmetic, channels, outputs, scratch):
    """Gradients of the keys and values of each item, for a half of its tile."""
    k_tile, v_tile, q_chunk, d_chunk, stats_chunk, result = scratch[:6]
    there, q_there, d_there, used, q_used, d_used, *segment_tiles = scratch[6:]
    dk_ref, dv_ref, *part_refs = outputs
    schedule, sizes = work.schedule, work.sizes
    half = lax.axis_index("warpgroup")
    read_words = functools.partial(logits.read_words, arithmetic, schedule)
    shape = HALF, sizes.chunk
    width = channels.stop - channels.start
    part = pl.ds(channels.start, width)

    def compute_item(number, item, taken):
        slot = lax.rem(number, index(tuning.tiles))
        plgpu.barrier_wait(there.at[slot])
        of_rows: Any = None
        if segment_tiles:
            of_rows = arithmetic.load(segment_tiles[0].at[slot, half], ROWS)

        def chunk(nth, grads, masked):
            dk, dv = grads
            stage = lax.rem(taken + nth, index(tuning.stages))
            number = item.first + nth
            words = read_words(number, half) if masked else None
            plgpu.barrier_wait(q_there.at[stage])
            plgpu.barrier_wait(d_there.at[stage])
            scores, dp = arithmetic.products(
                [
                    (k_tile.at[slot, half], q_chunk.at[stage]),
                    (v_tile.at[slot, half], d_chunk.at[stage]),
                ]
            )
            scores, slope = logits.bend(scores, options)
            lse = arithmetic.load(stats_chunk.at[0, stage], COLUMNS)
            p = jnp.exp2(scores - logits.along_columns(lse, shape))
            p = logits.mask_cells(arithmetic, p, sizes, words, 0.0)
            if segment_tiles:
                of_columns = arithmetic.load(segment_tiles[1].at[stage], COLUMNS)
                p = logits.mask_segments(p, of_rows, of_columns, 0.0)
            delta = arithmetic.load(stats_chunk.at[1, stage], COLUMNS)
            ds = p * (dp - logits.along_columns(delta, shape))
            ds = ds if slope is None else ds * slope
            dv = arithmetic.accumulate(dv, p, d_chunk.at[stage, :, part])
            plgpu.commit_smem()  # numbers that were loaded may be copied over now
            plgpu.barrier_arrive(d_used.at[stage])
            dk = arithmetic.accumulate(dk, ds, q_chunk.at[stage, :, part])
            plgpu.barrier_arrive(q_used.at[stage])
            return dk, dv

        zeros = arithmetic.full((HALF, width), 0.0, plgpu.Layout.WGMMA)
        full = functools.partial(chunk, masked=False)
        grads = lax.fori_loop(0, item.full, full, (zeros, zeros))
        masked = functools.partial(chunk, masked=True)
        dk, dv = lax.fori_loop(item.full, item.count, masked, grads)
        dk *= options.scale

        if segment_tiles:
            plgpu.commit_smem()
        plgpu.barrier_arrive(used.at[slot])

        @pl.when((item.tile >= 0) & (item.slot < 0))
        def _():
            sequence, head, buffer = item.sequence, item.head, result.at[half]
            for grad, ref in ((dk, dk_ref), (dv, dv_ref)):
                buffer[...] = grad.astype(k_tile.dtype)
                place = functools.partial(_place, ref, sequence, head)
                copies.store_rows(work, item, [(buffer, place)])

        if part_refs:
            copies.store_part(item, list(zip(part_refs, (dk, dv), strict=True)))
        return taken + item.count

    work.for_each(compute_item, index(0))


def _place(ref, sequence, head, tokens):
    return ref.at[sequence, tokens, head]
