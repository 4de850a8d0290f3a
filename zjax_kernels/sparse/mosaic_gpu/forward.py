"""Kernel of the forward pass: outputs and log-sum-exps."""

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
from zjax_kernels.sparse.mosaic_gpu.launch import find_work, merge_outputs
from zjax_kernels.sparse.reference import Options
from zjax_kernels.sparse.schedule import Schedule
from zjax_kernels.sparse.tuning import Tuning, choose_tuning
from zjax_kernels.warpgroups import specialize_warpgroups


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
    """Runs `reference.forward` on a Hopper GPU, for 16-bit arrays.

    A `tuning` of None is chosen by head size; `interpret` holds the interpreter's
    parameters, None on a GPU.

    Reference:
        Shah et al., FlashAttention-3 (arXiv:2407.08608), algorithm 2.
    """
    segmented = segments is not None
    tuning = tuning or choose_tuning("forward", q.shape[-1], segmented=segmented)
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
    # Segments arrive on the barriers of q and k, which count copies.
    vectors = 1 + segmented
    slices = launch.channel_slices(size, segmented=segmented)
    scratch = _Memory(
        q=launch.smem_matrix((tiles, launch.NUM_HALVES, HALF, size), q.dtype),
        k=launch.smem_matrix((stages, chunk, size), q.dtype),
        v=launch.smem_matrix((stages, chunk, size), q.dtype),
        result=launch.smem_matrix((launch.NUM_HALVES, HALF, slices[0].stop), q.dtype),
        lse=plgpu.SMEM((launch.NUM_HALVES, HALF), jnp.float32),
        q_ready=plgpu.Barrier(num_arrivals=rows * vectors, num_barriers=tiles),
        k_ready=plgpu.Barrier(num_arrivals=lanes * vectors, num_barriers=stages),
        v_ready=plgpu.Barrier(num_arrivals=lanes, num_barriers=stages),
        q_free=plgpu.Barrier(num_arrivals=launch.NUM_HALVES, num_barriers=tiles),
        k_free=plgpu.Barrier(num_arrivals=launch.NUM_HALVES, num_barriers=stages),
        v_free=plgpu.Barrier(num_arrivals=launch.NUM_HALVES, num_barriers=stages),
    )
    if segmented:
        scratch = scratch._replace(
            row_segments=plgpu.SMEM((tiles, launch.NUM_HALVES, HALF), jnp.int32),
            column_segments=plgpu.SMEM((stages, chunk), jnp.int32),
        )
    body = functools.partial(_body, schedule, options, tuning, interpret is not None)
    inputs = (q, k, v, *(segments or ()))
    out, lse, *partial = launch.call(
        body, schedule, inputs, outputs, scratch, tuning, interpret
    )
    return merge_outputs(out, lse, partial, schedule) if slots else (out, lse)


class _Memory(NamedTuple):
    """Shared memory and barriers: `ready` when filled, `free` when consumed."""

    q: Any
    k: Any
    v: Any
    result: Any
    lse: Any
    q_ready: Any
    k_ready: Any
    v_ready: Any
    q_free: Any
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
    """Copies queries, keys and values, in the warpgroup that copies."""
    q_ref, k_ref, v_ref, *segment_refs = inputs
    group = q_ref.shape[2] // k_ref.shape[2]
    stages = tuning.stages

    def copy_tile(item, rows, number):
        slot = lax.rem(number, index(tuning.tiles))
        moves = [(copies.token_rows(q_ref, item), memory.q.at[slot])]
        if segment_refs:
            ref, tile = segment_refs[0], memory.row_segments
            moves.append((lambda tokens: ref.at[item.sequence, tokens], tile.at[slot]))
        copies.wait_for_free_slot(memory.q_free, number, tuning.tiles)
        copies.copy_rows(work, rows, memory.q_ready.at[slot], moves)

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
        # Keys first: the scores need keys alone.
        copies.wait_for_free_slot(memory.k_free, copied, stages)
        copies.copy_columns(columns, memory.k_ready.at[slot], moves)
        moves = [
            (lambda tokens, _: v_ref.at[sequence, tokens, head], memory.v.at[slot])
        ]
        copies.wait_for_free_slot(memory.v_free, copied, stages)
        copies.copy_columns(columns, memory.v_ready.at[slot], moves)

    copies.produce(
        work,
        tuning,
        copy_tile,
        copy_chunk,
        [(memory.q_free, tuning.tiles)],
        [memory.k_free, memory.v_free],
    )


def _compute(work, options, tuning, arithmetic, outputs, memory):
    """Computes the outputs of half of each tile, in one of two warpgroups.

    The scores of a chunk are computed while the chunk before, of the current or the
    last item, is added to the output.
    """
    out_ref, lse_ref, *partial_refs = outputs
    sizes, half = work.static, lax.axis_index("warpgroup")
    segmented = memory.row_segments is not None
    read_words = functools.partial(logits.read_words, arithmetic, work.schedule)
    size = memory.q.shape[-1]

    def compute_scores(number, num_consumed, meanwhile=lambda: None, exists=True):
        """Returns scores of a chunk and a tile; garbage unless the item `exists`."""
        slot, stage = lax.rem(number, index(tuning.tiles)), _stage(num_consumed, tuning)

        @pl.when(exists)
        def _():
            plgpu.barrier_wait(memory.k_ready.at[stage])

        return arithmetic.product(
            memory.q.at[slot, half], memory.k.at[stage], meanwhile
        )

    def compute_item(number, item, carry):
        scores, num_consumed = carry
        rows = copies.read_rows(work, item, half * index(HALF), HALF)
        row_segments: Any = None
        if segmented:
            slot = lax.rem(number, index(tuning.tiles))
            row_segments = arithmetic.load(memory.row_segments.at[slot, half], ROWS)

        def update(state, scores, stage, words, column_segments):
            """Adds a chunk to the running softmax."""
            out, row_max, row_sum = state
            if options.soft_cap:
                scores, _ = logits.scale_and_cap(scores, options)
            if column_segments is not None:
                scores = logits.mask_segments(
                    scores, row_segments, column_segments, -jnp.inf
                )
            scores = logits.mask_cells(arithmetic, scores, sizes, words, -jnp.inf)
            masked = words is not None or column_segments is not None
            p, new_max, correction = _softmax_step(scores, row_max, options, masked)
            row_sum = row_sum * correction + p.sum(axis=1)
            out = out * logits.per_row(correction, out.shape)
            p = p.astype(memory.v.dtype)
            # Only here: the softmax runs while values are on the way.
            plgpu.barrier_wait(memory.v_ready.at[stage])
            [out] = arithmetic.accumulate((out, p, memory.v.at[stage]))
            plgpu.barrier_arrive(memory.v_free.at[stage])
            return out, new_max, row_sum

        def chunk(nth, carry, masked, is_last=False):
            scores, state = carry
            position, slot = num_consumed + nth, lax.rem(number, index(tuning.tiles))
            stage = _stage(position, tuning)
            words = read_words(item.first + nth, half) if masked else None
            column_segments = None
            if row_segments is not None:
                column_segments = arithmetic.load(
                    memory.column_segments.at[stage], COLUMNS
                )
                plgpu.commit_smem()  # the producer may overwrite what was loaded
            # The scores are in registers: k is free before the softmax.
            plgpu.barrier_arrive(memory.k_free.at[stage])
            run = functools.partial(
                update, state, scores, stage, words, column_segments
            )
            if not is_last:
                return compute_scores(number, position + 1, run)
            # The last scores of the item are done: the next tile may be copied.
            plgpu.barrier_arrive(memory.q_free.at[slot])
            # After the last item, scores are of an old tile, and nobody reads the
            # scores.
            has_next = number + 1 < work.count
            pl.when(has_next)(lambda: wait_for_tile(number + 1))
            return compute_scores(number + 1, position + 1, run, has_next)

        start = (
            arithmetic.full((HALF, size), 0.0, plgpu.Layout.WGMMA),
            arithmetic.full((HALF,), -jnp.inf, ROWS),
            arithmetic.full((HALF,), 0.0, ROWS),
        )
        last = item.count - 1
        full_chunk = functools.partial(chunk, masked=False)
        masked_chunk = functools.partial(chunk, masked=True)
        # The last chunk, full or not, is apart: it begins the next item.
        num_full = jnp.minimum(item.full, last)
        carry = lax.fori_loop(0, num_full, full_chunk, (scores, start))
        carry = lax.fori_loop(num_full, last, masked_chunk, carry)
        scores, (out, row_max, row_sum) = masked_chunk(last, carry, is_last=True)
        store(item, rows, *_normalize(out, row_max, row_sum))
        return scores, num_consumed + item.count

    def wait_for_tile(number):
        plgpu.barrier_wait(memory.q_ready.at[lax.rem(number, index(tuning.tiles))])

    def store(item, rows, out, lse):
        buffer, sums = memory.result.at[half], memory.lse.at[half]

        @pl.when(item.slot < 0)
        def _():
            for part in launch.channel_slices(size, segmented=segmented):
                # One buffer for all slices: the copy before must have read.
                copies.wait_for_stores()
                buffer[...] = out[:, part].astype(memory.q.dtype)
                moves = [(buffer, copies.token_rows(out_ref, item, part))]
                # With the last slice: `lse` must be stored once.
                if part.stop == size:
                    sums[...] = lse
                    moves.append((sums, copies.token_scalars(lse_ref, item)))
                copies.store_rows(work, rows, moves)

        if partial_refs:
            copies.store_partial(item, list(zip(partial_refs, (out, lse), strict=True)))

    @pl.when(work.count > 0)
    def _():
        wait_for_tile(index(0))
        scores, _ = compute_scores(index(0), index(0))
        work.for_each(compute_item, (scores, index(0)))
        copies.wait_for_stores()


def _softmax_step(scores, row_max, options, masked):
    """Returns weights relative to the new maximum, the maximum, and a correction."""
    # Without a cap the factor is folded into the exponent, one fused multiply-add.
    factor = 1.0 if options.soft_cap else options.scale * logits.LOG2E
    new_max = jnp.maximum(row_max, scores.max(axis=1) * factor)
    # -inf minus -inf is NaN; without masks every row has a maximum.
    level = jnp.where(new_max == -jnp.inf, 0.0, new_max) if masked else new_max
    p = jnp.exp2(scores * factor - logits.per_row(level, scores.shape))
    return p, new_max, jnp.exp2(row_max - level)


def _normalize(out, row_max, row_sum):
    """Returns outputs and log-sum-exps; 0 and -inf for queries that see nothing."""
    divisor = jnp.where(row_sum == 0.0, 1.0, row_sum)
    lse = jnp.where(
        row_sum == 0.0, -jnp.inf, row_max * (1 / logits.LOG2E) + jnp.log(divisor)
    )
    return out * logits.per_row(1.0 / divisor, out.shape), lse


def _stage(number, tuning):
    return lax.rem(number, index(tuning.stages))
