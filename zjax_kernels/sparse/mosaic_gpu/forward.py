"""Kernel of the forward pass: outputs and log-sum-exps."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from zjax_kernels.sparse.chunks import HALF
from zjax_kernels.sparse.mosaic_gpu import arithmetic as logits
from zjax_kernels.sparse.mosaic_gpu import copies, skeleton
from zjax_kernels.sparse.mosaic_gpu.arithmetic import ROWS, index
from zjax_kernels.sparse.mosaic_gpu.skeleton import NUM_HALVES, Program, Ring
from zjax_kernels.sparse.mosaic_gpu.work import merge_outputs
from zjax_kernels.sparse.reference import Options
from zjax_kernels.sparse.schedule import Schedule
from zjax_kernels.sparse.tuning import Tuning, choose_tuning


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
    size, segmented = q.shape[-1], segments is not None
    tuning = tuning or choose_tuning("forward", size, segmented=segmented)
    batch, length, heads, _ = q.shape
    slices = skeleton.channel_slices(size, segmented=segmented)
    halves = NUM_HALVES, HALF
    names = "row_segments", "column_segments"
    (out, lse), partial = skeleton.run(
        functools.partial(_compute, slices=slices),
        {"q": q, "k": k, "v": v} | dict(zip(names, segments or (), strict=False)),
        [
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((batch, heads, length), jnp.float32),
        ],
        schedule,
        options,
        rows=[Ring(tuning.tiles, [["q", "row_segments"]])],
        # Keys first: the scores need keys alone.
        columns=Ring(tuning.stages, [["k", "column_segments"], ["v"]]),
        scratch={
            "result": skeleton.smem_matrix((*halves, slices[0].stop), q.dtype),
            "lse": plgpu.SMEM(halves, jnp.float32),
        },
        tuning=tuning,
        interpret=interpret,
    )
    return merge_outputs(out, lse, partial, schedule)


def _compute(program: Program, *, slices: list[slice]) -> None:
    """Computes the outputs of half of each tile, in one of two warpgroups.

    The scores of a chunk are computed while the chunk before, of the current or the
    last item, is added to the output.
    """
    work, memory, arithmetic = program.work, program.memory, program.arithmetic
    half, options, sizes = program.half, program.options, program.work.static
    size = memory.at("q").shape[-1]

    def compute_scores(number, num_consumed, meanwhile=lambda: None, exists=True):
        """Returns scores of a chunk and a tile; garbage unless the item `exists`."""
        slot, stage = memory.slot("q", number), memory.slot("k", num_consumed)
        pl.when(exists)(lambda: memory.wait("k", stage))
        return arithmetic.product(
            memory.at("q", slot, half), memory.at("k", stage), meanwhile
        )

    def compute_item(number, item, carry):
        scores, num_consumed = carry
        rows = program.read_rows(item)
        row_segments: Any = None
        if program.segmented:
            row_segments = program.row_vector("row_segments", memory.slot("q", number))

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
            # Without a cap the factor is folded into the exponent, one fused
            # multiply-add.
            factor = 1.0 if options.soft_cap else options.scale * logits.LOG2E
            p, new_max, correction = logits.softmax_step(
                scores, row_max, factor, masked=masked
            )
            row_sum = row_sum * correction + p.sum(axis=1)
            out = out * logits.per_row(correction, out.shape)
            p = p.astype(program.outputs[0].dtype)
            # Only here: the softmax runs while values are on the way.
            memory.wait("v", stage)
            [out] = arithmetic.accumulate((out, p, memory.at("v", stage)))
            memory.release("v", stage)
            return out, new_max, row_sum

        def chunk(nth, carry, masked, is_last=False):
            scores, state = carry
            position, slot = num_consumed + nth, memory.slot("q", number)
            stage = memory.slot("k", position)
            words = program.read_words(item.first + nth) if masked else None
            column_segments = None
            if row_segments is not None:
                column_segments = program.column_vector("column_segments", stage)
                plgpu.commit_smem()  # the producer may overwrite what was loaded
            # The scores are in registers: k is free before the softmax.
            memory.release("k", stage)
            run = functools.partial(
                update, state, scores, stage, words, column_segments
            )
            if not is_last:
                return compute_scores(number, position + 1, run)
            # The last scores of the item are done: the next tile may be copied.
            memory.release("q", slot)
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
        last = item.num_chunks - 1
        # The last chunk, full or not, is apart: it begins the next item.
        num_full = jnp.minimum(item.full, last)
        carry = skeleton.fold_chunks(chunk, (scores, start), num_full, last)
        scores, (out, row_max, row_sum) = chunk(last, carry, masked=True, is_last=True)
        store(item, rows, *logits.normalize(out, row_max, row_sum))
        return scores, num_consumed + item.num_chunks

    def wait_for_tile(number):
        memory.wait("q", memory.slot("q", number))

    def store(item, rows, out, lse):
        buffer, sums = memory.at("result", half), memory.at("lse", half)
        out_ref, lse_ref = program.outputs

        @pl.when(item.slot < 0)
        def _():
            for part in slices:
                # One buffer for all slices: the copy before must have read.
                copies.wait_for_stores()
                buffer[...] = out[:, part].astype(out_ref.dtype)
                moves = [(buffer, out_ref)]
                # With the last slice: `lse` must be stored once.
                if part.stop == size:
                    sums[...] = lse
                    moves.append((sums, lse_ref))
                copies.store_rows(work, item, rows, moves, part)

        program.store_partial(item, out, lse)

    @pl.when(work.count > 0)
    def _():
        wait_for_tile(index(0))
        scores, _ = compute_scores(index(0), index(0))
        work.for_each(compute_item, (scores, index(0)))
        copies.wait_for_stores()
