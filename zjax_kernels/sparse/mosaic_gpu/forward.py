"""The forward pass: averages and log-sum-exps."""

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
from zjax_kernels.sparse.mosaic_gpu.splits import merge_averages
from zjax_kernels.sparse.mosaic_gpu.work import find_work
from zjax_kernels.sparse.reference import Options
from zjax_kernels.sparse.schedule import Schedule
from zjax_kernels.sparse.tuning import Tuning, choose


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: tuple[jax.Array, jax.Array] | None,
    schedule: Schedule,
    options: Options,
    *,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """As `reference.forward`, on a Hopper GPU.

    Args:
        q: [B, S, H, D] queries, of 16 bits.
        k: [B, T, K, D] keys.
        v: [B, T, K, D] values.
        segments: int32[B, S] and int32[B, T].
        schedule: Tiles of queries.
        options: What scores mean.
        tuning: How the kernel runs; chosen by the head size if none.
        interpret: Parameters of the interpreter, or none on a GPU.

    Returns:
        [B, S, H, D] in the dtype of `q`, and float32[B, H, S].

    Reference:
        Shah et al., FlashAttention-3 (arXiv:2407.08608), algorithm 2.
    """
    segmented = segments is not None
    tuning = tuning or choose("forward", q.shape[-1], segmented=segmented)
    batch, length, heads, size = q.shape
    slots, tiles = schedule.num_slots, tuning.tiles
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    outputs = [jax.ShapeDtypeStruct(q.shape, q.dtype), shape((batch, heads, length))]
    if slots:
        outputs.append(shape((batch, heads, slots, TILE, size)))
        outputs.append(shape((batch, heads, slots, TILE)))
    stages, chunk = tuning.stages, schedule.chunk
    lanes = chunk // schedule.column_unit
    rows = TILE // schedule.row_unit
    vectors = 1 + segmented
    parts = launch.parts(size, segmented=segmented)
    scratch = _Memory(
        q=launch.matrix((tiles, launch.NUM_HALVES, HALF, size), q.dtype),
        k=launch.matrix((stages, chunk, size), q.dtype),
        v=launch.matrix((stages, chunk, size), q.dtype),
        result=launch.matrix((launch.NUM_HALVES, HALF, parts[0].stop), q.dtype),
        lse=plgpu.SMEM((launch.NUM_HALVES, HALF), jnp.float32),
        q_there=plgpu.Barrier(num_arrivals=rows * vectors, num_barriers=tiles),
        k_there=plgpu.Barrier(num_arrivals=lanes * vectors, num_barriers=stages),
        v_there=plgpu.Barrier(num_arrivals=lanes, num_barriers=stages),
        q_used=plgpu.Barrier(num_arrivals=launch.NUM_HALVES, num_barriers=tiles),
        k_used=plgpu.Barrier(num_arrivals=launch.NUM_HALVES, num_barriers=stages),
        v_used=plgpu.Barrier(num_arrivals=launch.NUM_HALVES, num_barriers=stages),
    )
    if segmented:
        scratch = scratch._replace(
            row_segments=plgpu.SMEM((tiles, launch.NUM_HALVES, HALF), jnp.int32),
            column_segments=plgpu.SMEM((stages, chunk), jnp.int32),
        )
    body = functools.partial(_body, schedule, options, tuning, interpret is not None)
    inputs = (q, k, v, *(segments or ()))
    out, lse, *parts = launch.call(
        body, schedule, inputs, outputs, scratch, tuning, interpret
    )
    return merge_averages(out, lse, parts, schedule) if slots else (out, lse)


class _Memory(NamedTuple):
    """Tiles and chunks of a program, and what says that they are there or used."""

    q: Any
    k: Any
    v: Any
    result: Any
    lse: Any
    q_there: Any
    k_there: Any
    v_there: Any
    q_used: Any
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
    """Fills shared memory with the queries of each item, and its keys and values."""
    q_ref, k_ref, v_ref, *segment_refs = inputs
    group = q_ref.shape[2] // k_ref.shape[2]
    stages = tuning.stages

    def copy_tile(item, rows, number):
        slot = lax.rem(number, index(tuning.tiles))
        moves = [(copies.rows_of(q_ref, item), memory.q.at[slot])]
        if segment_refs:
            ref, tile = segment_refs[0], memory.row_segments
            moves.append((lambda tokens: ref.at[item.sequence, tokens], tile.at[slot]))
        copies.wait_for_room(memory.q_used, number, tuning.tiles)
        copies.copy_rows(work, rows, memory.q_there.at[slot], moves)

    def copy_chunk(item, chunk, copied):
        columns = copies.read_columns(work, chunk)
        sequence, head = item.sequence, lax.div(item.head, index(group))
        slot = lax.rem(copied, index(stages))
        moves = [
            (lambda tokens, _: k_ref.at[sequence, tokens, head], memory.k.at[slot])
        ]
        if segment_refs:
            ref, tile = segment_refs[1], memory.column_segments
            moves.append((lambda tokens, _: ref.at[sequence, tokens], tile.at[slot]))
        copies.wait_for_room(memory.k_used, copied, stages)
        copies.copy_columns(columns, memory.k_there.at[slot], moves)
        moves = [
            (lambda tokens, _: v_ref.at[sequence, tokens, head], memory.v.at[slot])
        ]
        copies.wait_for_room(memory.v_used, copied, stages)
        copies.copy_columns(columns, memory.v_there.at[slot], moves)

    copies.copy_all(
        work,
        tuning,
        copy_tile,
        copy_chunk,
        [(memory.q_used, tuning.tiles)],
        [memory.k_used, memory.v_used],
    )


def _compute(work, options, tuning, arithmetic, outputs, memory):
    """Averages the values of each item for a half of its tile.

    The scores of a chunk are computed while the weights of the one before it are, be it
    of the same item or not.
    """
    out_ref, lse_ref, *partial_refs = outputs
    sizes, half = work.sizes, lax.axis_index("warpgroup")
    segmented = memory.row_segments is not None
    read_words = functools.partial(logits.read_words, arithmetic, work.schedule)
    size = memory.q.shape[-1]

    def scores_of(number, taken, meanwhile=lambda: None, there=True):
        """Of a chunk and the tile of an item, or of nothing if none will be there."""
        slot, stage = lax.rem(number, index(tuning.tiles)), _stage(taken, tuning)

        @pl.when(there)
        def _():
            plgpu.barrier_wait(memory.k_there.at[stage])

        return arithmetic.product(
            memory.q.at[slot, half], memory.k.at[stage], meanwhile
        )

    def compute_item(number, item, carry):
        scores, taken = carry
        rows = copies.read_rows(work, item, half * index(HALF), HALF)
        of_rows: Any = None
        if segmented:
            slot = lax.rem(number, index(tuning.tiles))
            of_rows = arithmetic.load(memory.row_segments.at[slot, half], ROWS)

        def weigh(state, scores, stage, words, of_columns):
            """Adds what a chunk contributes."""
            out, top, total = state
            if options.soft_cap:
                scores, _ = logits.bend(scores, options)
            if of_columns is not None:
                scores = logits.mask_segments(scores, of_rows, of_columns, -jnp.inf)
            scores = logits.mask_cells(arithmetic, scores, sizes, words, -jnp.inf)
            masked = words is not None or of_columns is not None
            p, higher, shrink = _soften(scores, top, options, masked)
            total = total * shrink + p.sum(axis=1)
            out = out * logits.along_rows(shrink, out.shape)
            p = p.astype(memory.v.dtype)
            plgpu.barrier_wait(memory.v_there.at[stage])
            [out] = arithmetic.accumulate((out, p, memory.v.at[stage]))
            plgpu.barrier_arrive(memory.v_used.at[stage])
            return out, higher, total

        def chunk(nth, carry, masked, is_last=False):
            scores, state = carry
            at, slot = taken + nth, lax.rem(number, index(tuning.tiles))
            stage = _stage(at, tuning)
            words = read_words(item.first + nth, half) if masked else None
            of_columns = None
            if of_rows is not None:
                of_columns = arithmetic.load(memory.column_segments.at[stage], COLUMNS)
                plgpu.commit_smem()
            plgpu.barrier_arrive(memory.k_used.at[stage])
            run = functools.partial(weigh, state, scores, stage, words, of_columns)
            if not is_last:
                return scores_of(number, at + 1, run)
            plgpu.barrier_arrive(memory.q_used.at[slot])
            more = number + 1 < work.count
            pl.when(more)(lambda: wait_for_tile(number + 1))
            return scores_of(number + 1, at + 1, run, more)

        start = (
            arithmetic.full((HALF, size), 0.0, plgpu.Layout.WGMMA),
            arithmetic.full((HALF,), -jnp.inf, ROWS),
            arithmetic.full((HALF,), 0.0, ROWS),
        )
        last = item.count - 1
        full = functools.partial(chunk, masked=False)
        partly = functools.partial(chunk, masked=True)
        num_full = jnp.minimum(item.full, last)
        carry = lax.fori_loop(0, num_full, full, (scores, start))
        carry = lax.fori_loop(num_full, last, partly, carry)
        scores, (out, top, total) = partly(last, carry, is_last=True)
        store(item, rows, *_average(out, top, total))
        return scores, taken + item.count

    def wait_for_tile(number):
        plgpu.barrier_wait(memory.q_there.at[lax.rem(number, index(tuning.tiles))])

    def store(item, rows, out, lse):
        averages, sums = memory.result.at[half], memory.lse.at[half]

        @pl.when(item.slot < 0)
        def _():
            for part in launch.parts(size, segmented=segmented):
                copies.wait_until_stored()
                averages[...] = out[:, part].astype(memory.q.dtype)
                moves = [(averages, copies.rows_of(out_ref, item, part))]
                if part.stop == size:
                    sums[...] = lse
                    moves.append((sums, copies.numbers_of(lse_ref, item)))
                copies.store_rows(work, rows, moves)

        if partial_refs:
            copies.store_part(item, list(zip(partial_refs, (out, lse), strict=True)))

    @pl.when(work.count > 0)
    def _():
        wait_for_tile(index(0))
        scores, _ = scores_of(index(0), index(0))
        work.for_each(compute_item, (scores, index(0)))
        copies.wait_until_stored()


def _soften(scores, top, options, masked):
    """Weights relative to the highest score so far, that, and how much lower it was."""
    factor = 1.0 if options.soft_cap else options.scale * logits.LOG2E
    higher = jnp.maximum(top, scores.max(axis=1) * factor)
    level = jnp.where(higher == -jnp.inf, 0.0, higher) if masked else higher
    p = jnp.exp2(scores * factor - logits.along_rows(level, scores.shape))
    return p, higher, jnp.exp2(top - level)


def _average(out, top, total):
    """Averages and log-sum-exps; 0 and -inf where nothing is seen."""
    some = jnp.where(total == 0.0, 1.0, total)
    lse = jnp.where(total == 0.0, -jnp.inf, top * (1 / logits.LOG2E) + jnp.log(some))
    return out * logits.along_rows(1.0 / some, out.shape), lse


def _stage(number, tuning):
    return lax.rem(number, index(tuning.stages))
