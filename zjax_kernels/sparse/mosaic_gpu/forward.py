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
from zjax_kernels.sparse.mosaic_gpu.work import Work
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
    scratch = _Memory(
        q=launch.matrix((tiles, launch.NUM_HALVES, HALF, size), q.dtype),
        k=launch.matrix((stages, chunk, size), q.dtype),
        v=launch.matrix((stages, chunk, size), q.dtype),
        lse=plgpu.SMEM((launch.NUM_HALVES, HALF), jnp.float32),
        q_there=plgpu.Barrier(num_arrivals=rows * vectors, num_barriers=tiles),
        k_there=plgpu.Barrier(num_arrivals=lanes * vectors, num_barriers=stages),
        v_there=plgpu.Barrier(num_arrivals=lanes, num_barriers=stages),
        q_used=plgpu.Barrier(num_arrivals=launch.NUM_HALVES, num_barriers=tiles),
        k_used=plgpu.Barrier(num_arrivals=launch.NUM_HALVES, num_barriers=stages),
        v_used=plgpu.Barrier(num_arrivals=launch.NUM_HALVES, num_barriers=stages),
        turns=plgpu.Barrier(num_arrivals=launch.NUM_HALVES, num_barriers=1),
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
    lse: Any
    q_there: Any
    k_there: Any
    v_there: Any
    q_used: Any
    k_used: Any
    v_used: Any
    turns: Any
    row_segments: Any = None
    column_segments: Any = None


def _body(sizes, options, tuning, simulated, schedule, inputs, outputs, memory):
    work = Work(schedule, sizes, inputs[0].shape[0], tuning.programs)
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

    def copy_tile(item, slot):
        sequence, head = item.sequence, item.head
        moves = [(lambda tokens: q_ref.at[sequence, tokens, head], memory.q.at[slot])]
        if segment_refs:
            ref, tile = segment_refs[0], memory.row_segments
            moves.append((lambda tokens: ref.at[sequence, tokens], tile.at[slot]))
        copies.copy_rows(work, item, memory.q_there.at[slot], moves)

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
        memory.q_used,
        (memory.k_used, memory.v_used),
    )


def _compute(work, options, tuning, arithmetic, outputs, memory):
    """Averages the values of each item for a half of its tile."""
    out_ref, lse_ref, *partial_refs = outputs
    segmented = memory.row_segments is not None
    schedule, sizes = work.schedule, work.sizes
    half = lax.axis_index("warpgroup")
    read_words = functools.partial(logits.read_words, arithmetic, schedule)
    size = memory.q.shape[-1]
    shape = HALF, sizes.chunk

    def turn():
        if tuning.ping_pong:
            plgpu.barrier_arrive(memory.turns.at[0])
            plgpu.barrier_wait(memory.turns.at[0])

    def see_last_turn():
        plgpu.barrier_wait(memory.turns.at[0])

    def compute_item(number, item, taken):
        slot = lax.rem(number, index(tuning.tiles))
        start = (
            arithmetic.full((HALF, size), 0.0, plgpu.Layout.WGMMA),
            arithmetic.full((HALF,), -jnp.inf, ROWS),
            arithmetic.full((HALF,), 0.0, ROWS),
        )
        plgpu.barrier_wait(memory.q_there.at[slot])
        if tuning.ping_pong:  # no turn waits for another item
            pl.when(half == 1)(turn)
            pl.when((half == 0) & (number > 0))(see_last_turn)
        of_rows: Any = None
        if segmented:
            of_rows = arithmetic.load(memory.row_segments.at[slot, half], ROWS)

        def chunk(nth, carry, masked):
            out, top, total = carry
            stage = lax.rem(taken + nth, index(tuning.stages))
            number = item.first + nth
            words = read_words(number, half) if masked else None
            plgpu.barrier_wait(memory.k_there.at[stage])
            [scores] = arithmetic.products(
                [(memory.q.at[slot, half], memory.k.at[stage])]
            )
            turn()
            factor = options.scale * logits.LOG2E
            if options.soft_cap:
                scores, _ = logits.bend(scores, options)
                factor = 1.0
            if segmented:
                of_columns = arithmetic.load(memory.column_segments.at[stage], COLUMNS)
                scores = logits.mask_segments(scores, of_rows, of_columns, -jnp.inf)
                plgpu.commit_smem()
            plgpu.barrier_arrive(memory.k_used.at[stage])
            scores = logits.mask_cells(arithmetic, scores, sizes, words, -jnp.inf)
            higher = jnp.maximum(top, scores.max(axis=1) * factor)
            guarded = masked or segmented
            level = jnp.where(higher == -jnp.inf, 0.0, higher) if guarded else higher
            shrink = jnp.exp2(top - level)
            p = jnp.exp2(scores * factor - logits.along_rows(level, shape))
            total = total * shrink + p.sum(axis=1)
            out = out * logits.along_rows(shrink, out.shape)
            p = p.astype(memory.v.dtype)
            plgpu.barrier_wait(memory.v_there.at[stage])
            turn()
            out = arithmetic.accumulate(out, p, memory.v.at[stage])
            plgpu.barrier_arrive(memory.v_used.at[stage])
            return out, higher, total

        full = functools.partial(chunk, masked=False)
        carry = lax.fori_loop(0, item.full, full, start)
        partly = functools.partial(chunk, masked=True)
        out, top, total = lax.fori_loop(item.full, item.count, partly, carry)
        if tuning.ping_pong:
            pl.when(half == 0)(lambda: plgpu.barrier_arrive(memory.turns.at[0]))
        some = jnp.where(total == 0.0, 1.0, total)
        out = out * logits.along_rows(1.0 / some, out.shape)
        lse = jnp.where(
            total == 0.0, -jnp.inf, top * (1 / logits.LOG2E) + jnp.log(some)
        )

        @pl.when((item.tile >= 0) & (item.slot < 0))
        def _():
            sequence, head = item.sequence, item.head
            averages, sums = memory.q.at[slot, half], memory.lse.at[half]
            averages[...] = out.astype(memory.q.dtype)
            sums[...] = lse
            moves = (
                (averages, lambda tokens: out_ref.at[sequence, tokens, head]),
                (sums, lambda tokens: lse_ref.at[sequence, head, tokens]),
            )
            copies.store_rows(work, item, moves)

        if partial_refs:
            sums = zip(partial_refs, (out, lse), strict=True)
            copies.store_part(item, list(sums))
        if segmented:
            plgpu.commit_smem()
        plgpu.barrier_arrive(memory.q_used.at[slot])
        return taken + item.count

    count, _ = work.for_each(compute_item, index(0))
    if tuning.ping_pong:
        pl.when((half == 0) & (count > 0))(see_last_turn)
