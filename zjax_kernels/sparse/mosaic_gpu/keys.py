"""The backward pass of the keys and the values."""

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
    size = k.shape[-1]
    parts = launch.parts(size, segmented=segmented and size > 128)
    found = [run(channels) for channels in parts]
    dk, dv = (jnp.concatenate(x, axis=-1) for x in zip(*found, strict=True))
    return dk, dv


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
    tiles = tuning.tiles
    tile = (tiles, launch.NUM_HALVES, HALF)
    scratch = _Memory(
        k=launch.matrix((*tile, size), q.dtype),
        v=launch.matrix((*tile, size), q.dtype),
        q=launch.matrix((stages, chunk, size), q.dtype),
        d_out=launch.matrix((stages, chunk, size), q.dtype),
        stats=plgpu.SMEM((2, stages, chunk), jnp.float32),
        k_there=plgpu.Barrier(num_arrivals=rows * (1 + segmented), num_barriers=tiles),
        v_there=plgpu.Barrier(num_arrivals=rows, num_barriers=tiles),
        q_there=plgpu.Barrier(
            num_arrivals=lanes * (2 + segmented), num_barriers=stages
        ),
        d_there=plgpu.Barrier(num_arrivals=lanes * 2, num_barriers=stages),
        k_used=plgpu.Barrier(num_arrivals=launch.NUM_HALVES, num_barriers=tiles),
        v_used=plgpu.Barrier(num_arrivals=launch.NUM_HALVES, num_barriers=tiles),
        q_used=plgpu.Barrier(num_arrivals=launch.NUM_HALVES, num_barriers=stages),
        d_used=plgpu.Barrier(num_arrivals=launch.NUM_HALVES, num_barriers=stages),
    )
    if width < size:
        result = launch.matrix((launch.NUM_HALVES, HALF, width), k.dtype)
        scratch = scratch._replace(result=result)
    if segmented:
        scratch = scratch._replace(
            row_segments=plgpu.SMEM(tile, jnp.int32),
            column_segments=plgpu.SMEM((stages, chunk), jnp.int32),
        )
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


class _Memory(NamedTuple):
    """Tiles and chunks of a program, and what says that they are there or used."""

    k: Any
    v: Any
    q: Any
    d_out: Any
    stats: Any
    k_there: Any
    v_there: Any
    q_there: Any
    d_there: Any
    k_used: Any
    v_used: Any
    q_used: Any
    d_used: Any
    result: Any = None
    row_segments: Any = None
    column_segments: Any = None


def _body(
    sizes, options, tuning, simulated, channels, schedule, inputs, outputs, memory
):
    q_ref, k_ref = inputs[:2]
    group = q_ref.shape[2] // k_ref.shape[2]
    work = find_work(schedule, sizes, q_ref.shape[0], group)
    arithmetic = Arithmetic(simulated)
    launch.divide(
        lambda: _compute(work, options, tuning, arithmetic, channels, outputs, memory),
        lambda: _copy(work, tuning, inputs, memory),
    )


def _copy(work, tuning, inputs, memory):
    """Fills shared memory with what each item needs."""
    q_ref, k_ref, v_ref, d_ref, lse_ref, delta_ref, *segment_refs = inputs

    def copy_tile(item, rows, number):
        slot = lax.rem(number, index(tuning.tiles))
        moves = [(copies.rows_of(k_ref, item), memory.k.at[slot])]
        if segment_refs:
            ref, tile = segment_refs[1], memory.row_segments
            moves.append((lambda tokens: ref.at[item.sequence, tokens], tile.at[slot]))
        copies.wait_for_room(memory.k_used, number, tuning.tiles)
        copies.copy_rows(work, rows, memory.k_there.at[slot], moves)
        moves = [(copies.rows_of(v_ref, item), memory.v.at[slot])]
        copies.wait_for_room(memory.v_used, number, tuning.tiles)
        copies.copy_rows(work, rows, memory.v_there.at[slot], moves)

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
        copies.wait_for_room(memory.q_used, copied, tuning.stages)
        copies.copy_columns(columns, memory.q_there.at[slot], moves)
        moves = [
            (of_matrix(d_ref), memory.d_out.at[slot]),
            (of_vector(delta_ref), memory.stats.at[1, slot]),
        ]
        copies.wait_for_room(memory.d_used, copied, tuning.stages)
        copies.copy_columns(columns, memory.d_there.at[slot], moves)

    copies.copy_all(
        work,
        tuning,
        copy_tile,
        copy_chunk,
        [(memory.k_used, tuning.tiles), (memory.v_used, tuning.tiles)],
        [memory.q_used, memory.d_used],
    )


def _compute(work, options, tuning, arithmetic, channels, outputs, memory):
    """Gradients of the keys and values of each item, for a half of its tile."""
    dk_ref, dv_ref, *part_refs = outputs
    segmented = memory.row_segments is not None
    schedule, sizes = work.schedule, work.sizes
    half = lax.axis_index("warpgroup")
    read_words = functools.partial(logits.read_words, arithmetic, schedule)
    shape = HALF, sizes.chunk
    width = channels.stop - channels.start
    part = pl.ds(channels.start, width)

    def release(number):
        """Where keys and values were results lie until they are stored."""
        slot = lax.rem(number, index(tuning.tiles))
        copies.wait_until_stored()
        plgpu.barrier_arrive(memory.k_used.at[slot])
        plgpu.barrier_arrive(memory.v_used.at[slot])

    def compute_item(number, item, taken):
        slot = lax.rem(number, index(tuning.tiles))
        rows = copies.read_rows(work, item, half * index(HALF), HALF)
        plgpu.barrier_wait(memory.k_there.at[slot])
        of_rows: Any = None
        if segmented:
            of_rows = arithmetic.load(memory.row_segments.at[slot, half], ROWS)
            plgpu.commit_smem()  # numbers that were loaded may be copied over soon

        def chunk(nth, grads, masked):
            dk, dv = grads
            stage = lax.rem(taken + nth, index(tuning.stages))
            words = read_words(item.first + nth, half) if masked else None

            plgpu.barrier_wait(memory.q_there.at[stage])
            scores, _ = arithmetic.product(memory.k.at[slot, half], memory.q.at[stage])
            scores, slope = logits.bend(scores, options)

            def weigh():
                lse = arithmetic.load(memory.stats.at[0, stage], COLUMNS)
                p = jnp.exp2(scores - logits.along_columns(lse, shape))
                p = logits.mask_cells(arithmetic, p, sizes, words, 0.0)
                if not segmented:
                    return p
                of_columns = arithmetic.load(memory.column_segments.at[stage], COLUMNS)
                return logits.mask_segments(p, of_rows, of_columns, 0.0)

            @pl.when(nth == 0)
            def _():
                if tuning.tiles > 1:
                    pl.when(number > 0)(lambda: release(number - 1))
                plgpu.barrier_wait(memory.v_there.at[slot])

            plgpu.barrier_wait(memory.d_there.at[stage])
            dp, p = arithmetic.product(
                memory.v.at[slot, half], memory.d_out.at[stage], weigh
            )
            delta = arithmetic.load(memory.stats.at[1, stage], COLUMNS)
            plgpu.commit_smem()  # numbers that were loaded may be copied over soon
            ds = p * (dp - logits.along_columns(delta, shape))
            ds = ds if slope is None else ds * slope
            dv, dk = arithmetic.accumulate(
                (dv, p, memory.d_out.at[stage, :, part]),
                (dk, ds, memory.q.at[stage, :, part]),
            )
            plgpu.barrier_arrive(memory.d_used.at[stage])
            plgpu.barrier_arrive(memory.q_used.at[stage])
            return dk, dv

        zeros = arithmetic.full((HALF, width), 0.0, plgpu.Layout.WGMMA)
        full = functools.partial(chunk, masked=False)
        grads = lax.fori_loop(0, item.full, full, (zeros, zeros))
        masked = functools.partial(chunk, masked=True)
        dk, dv = lax.fori_loop(item.full, item.count, masked, grads)
        dk *= options.scale

        @pl.when(item.slot < 0)
        def _():
            for grad, room, ref in ((dk, memory.k, dk_ref), (dv, memory.v, dv_ref)):
                buffer = room.at[slot, half]
                if memory.result is not None:
                    copies.wait_until_stored()
                    buffer = memory.result.at[half]
                buffer[...] = grad.astype(memory.k.dtype)
                copies.store_rows(work, rows, [(buffer, copies.rows_of(ref, item))])

        if part_refs:
            copies.store_part(item, list(zip(part_refs, (dk, dv), strict=True)))
        if tuning.tiles == 1:
            release(number)
        return taken + item.count

    work.for_each(compute_item, index(0))
    if tuning.tiles > 1:
        pl.when(work.count > 0)(lambda: release(work.count - 1))
