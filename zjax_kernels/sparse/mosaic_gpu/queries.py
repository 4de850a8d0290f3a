"""Kernel of the gradients of the queries, dq."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from zjax_kernels.sparse.chunks import HALF
from zjax_kernels.sparse.mosaic_gpu import arithmetic as logits
from zjax_kernels.sparse.mosaic_gpu import copies, skeleton
from zjax_kernels.sparse.mosaic_gpu.arithmetic import index
from zjax_kernels.sparse.mosaic_gpu.skeleton import Program, Ring
from zjax_kernels.sparse.mosaic_gpu.work import merge_gradients
from zjax_kernels.sparse.reference import BackwardInputs, Options
from zjax_kernels.sparse.schedule import Schedule
from zjax_kernels.sparse.tuning import Tuning, choose_tuning


def backward_queries(
    inputs: BackwardInputs,
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
    q, size = inputs.q, inputs.q.shape[-1]
    segmented = inputs.segments is not None
    tuning = tuning or choose_tuning("queries", size, segmented=segmented)
    # One slot saves shared memory: d_out is needed, and copied, after q.
    d_tiles = tuning.tiles if size < 128 else 1
    found, partial = skeleton.run(
        _compute,
        skeleton.name_arrays(inputs, "row_segments", "column_segments"),
        [jax.ShapeDtypeStruct(q.shape, q.dtype)],
        schedule,
        options,
        rows=[
            Ring(tuning.tiles, [["q", "lse", "row_segments"]]),
            Ring(d_tiles, [["d_out", "delta"]]),
        ],
        # Values first: the slot of v is free before the slot of k, which dq reads last.
        columns=Ring(tuning.stages, [["k", "column_segments"], ["v"]], last_first=True),
        scratch={},
        tuning=tuning,
        interpret=interpret,
    )
    return merge_gradients(found, partial, schedule)[0]


def _compute(program: Program) -> None:
    """Computes the gradients of half of each tile, in one of two warpgroups."""
    work, memory, arithmetic = program.work, program.memory, program.arithmetic
    half, options, tiles = program.half, program.options, memory.num_slots("q")
    shape, size = (HALF, work.static.chunk), memory.at("q").shape[-1]

    def release(number):
        """Waits for the store of dq from the memory of q, then frees the tile."""
        copies.wait_for_stores()
        memory.release("q", memory.slot("q", number))

    def compute_item(number, item, num_consumed):
        slot, d_slot = memory.slot("q", number), memory.slot("d_out", number)
        rows = program.read_rows(item)
        memory.wait("q", slot)
        lse = program.row_vector("lse", slot)
        row_segments = (
            program.row_vector("row_segments", slot) if program.segmented else None
        )
        plgpu.commit_smem()  # fence: loads finish before the producer may overwrite

        def chunk(nth, dq, masked):
            stage = memory.slot("k", num_consumed + nth)
            is_last = nth == item.num_chunks - 1
            words = program.read_words(item.first + nth) if masked else None

            def wait_for_d_out_and_v():
                # The store of the last item ends while the first scores are computed.
                if tiles > 1:
                    pl.when((nth == 0) & (number > 0))(lambda: release(number - 1))
                pl.when(nth == 0)(lambda: memory.wait("d_out", d_slot))
                memory.wait("v", stage)
                return memory.at("d_out", d_slot, half), memory.at("v", stage)

            def compute_weights(scores):
                scores, slope = logits.scale_and_cap(scores, options)
                p = jnp.exp2(scores - logits.per_row(lse, shape))
                p = program.mask_weights(p, words, row_segments, stage)
                if row_segments is not None:
                    plgpu.commit_smem()  # the producer may overwrite what was loaded
                return p, slope

            memory.wait("k", stage)
            pair = memory.at("q", slot, half), memory.at("k", stage)
            (p, slope), dp = arithmetic.overlapped_products(
                pair, wait_for_d_out_and_v, compute_weights
            )
            memory.release("v", stage)
            delta = program.row_vector("delta", d_slot)

            # d_out is free before q, which keeps dq until the store ends.
            @pl.when(is_last)
            def _():
                plgpu.commit_smem()
                memory.release("d_out", d_slot)

            ds = p * (dp - logits.per_row(delta, shape))
            ds = ds if slope is None else ds * slope
            [dq] = arithmetic.accumulate((dq, ds, memory.at("k", stage)))
            memory.release("k", stage)
            return dq

        dq = arithmetic.full((HALF, size), 0.0, plgpu.Layout.WGMMA)
        dq = skeleton.fold_chunks(chunk, dq, item.full, item.num_chunks) * options.scale
        program.store_gradients(item, rows, slot, {"q": dq})
        if tiles == 1:
            release(number)
        return num_consumed + item.num_chunks

    work.for_each(compute_item, index(0))
    if tiles > 1:
        pl.when(work.count > 0)(lambda: release(work.count - 1))
