"""Kernels of the gradients: dq of the queries, dk and dv of keys and values."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from zjax_kernels.sparse.chunks import HALF
from zjax_kernels.sparse.mosaic_gpu import arithmetic as logits
from zjax_kernels.sparse.mosaic_gpu import copies, skeleton
from zjax_kernels.sparse.mosaic_gpu.arithmetic import index
from zjax_kernels.sparse.mosaic_gpu.skeleton import NUM_HALVES, Program, Ring
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
        _compute_queries,
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


def _compute_queries(program: Program) -> None:
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


def backward_keys(
    inputs: BackwardInputs,
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
    k, size = inputs.k, inputs.k.shape[-1]
    segmented = inputs.segments is not None
    tuning = tuning or choose_tuning("keys", size, segmented=segmented)
    arrays = skeleton.name_arrays(inputs, "column_segments", "row_segments")

    def run(channels):
        width = channels.stop - channels.start
        result = skeleton.smem_matrix((NUM_HALVES, HALF, width), k.dtype)
        found, partial = skeleton.run(
            functools.partial(_compute_keys, channels=channels),
            arrays,
            [jax.ShapeDtypeStruct((*k.shape[:3], width), k.dtype)] * 2,
            schedule,
            options,
            rows=[Ring(tuning.tiles, [["k", "row_segments"], ["v"]])],
            columns=Ring(
                tuning.stages, [["q", "lse", "column_segments"], ["d_out", "delta"]]
            ),
            # Results of a slice do not have the shape of k and v: they need a place.
            scratch={"result": result} if width < size else {},
            tuning=tuning,
            interpret=interpret,
        )
        return merge_gradients(found, partial, schedule)

    # dk and dv of 256 channels would take 256 registers: one launch per slice.
    slices = skeleton.channel_slices(size, segmented=segmented and size > 128)
    gradients = zip(*map(run, slices), strict=True)
    dk, dv = (jnp.concatenate(x, axis=-1) for x in gradients)
    return dk, dv


def _compute_keys(program: Program, *, channels: slice) -> None:
    """Computes the gradients of half of each tile, in one of two warpgroups."""
    work, memory, arithmetic = program.work, program.memory, program.arithmetic
    half, options, tiles = program.half, program.options, memory.num_slots("k")
    shape, width = (HALF, work.static.chunk), channels.stop - channels.start
    output_channels = pl.ds(channels.start, width)

    def release(number):
        """Waits until results are stored from the tile, then frees the tile."""
        slot = memory.slot("k", number)
        copies.wait_for_stores()
        memory.release("k", slot)
        memory.release("v", slot)

    def compute_item(number, item, num_consumed):
        slot = memory.slot("k", number)
        rows = program.read_rows(item)
        memory.wait("k", slot)
        row_segments = None
        if program.segmented:
            row_segments = program.row_vector("row_segments", slot)
            plgpu.commit_smem()  # the producer may overwrite what was loaded

        def chunk(nth, grads, masked):
            dk, dv = grads
            stage = memory.slot("q", num_consumed + nth)
            words = program.read_words(item.first + nth) if masked else None

            memory.wait("q", stage)
            # One product at a time: both at once, as for dq, took 5 % longer.
            scores, _ = arithmetic.product(
                memory.at("k", slot, half), memory.at("q", stage)
            )
            scores, slope = logits.scale_and_cap(scores, options)

            def compute_weights():
                lse = program.column_vector("lse", stage)
                p = jnp.exp2(scores - logits.per_column(lse, shape))
                return program.mask_weights(p, words, row_segments, stage)

            @pl.when(nth == 0)
            def _():
                # The store of the last item ends while the first scores are computed.
                if tiles > 1:
                    pl.when(number > 0)(lambda: release(number - 1))
                # Only here: the scores need k and q alone.
                memory.wait("v", slot)

            memory.wait("d_out", stage)
            # Weights are computed while tensor cores compute dp.
            dp, p = arithmetic.product(
                memory.at("v", slot, half), memory.at("d_out", stage), compute_weights
            )
            delta = program.column_vector("delta", stage)
            plgpu.commit_smem()  # the producer may overwrite what was loaded
            ds = p * (dp - logits.per_column(delta, shape))
            ds = ds if slope is None else ds * slope
            dv, dk = arithmetic.accumulate(
                (dv, p, memory.at("d_out", stage, slice(None), output_channels)),
                (dk, ds, memory.at("q", stage, slice(None), output_channels)),
            )
            memory.release("d_out", stage)
            memory.release("q", stage)
            return dk, dv

        zeros = arithmetic.full((HALF, width), 0.0, plgpu.Layout.WGMMA)
        grads = skeleton.fold_chunks(chunk, (zeros, zeros), item.full, item.num_chunks)
        dk, dv = grads
        dk *= options.scale
        program.store_gradients(item, rows, slot, {"k": dk, "v": dv})
        if tiles == 1:
            release(number)
        return num_consumed + item.num_chunks

    work.for_each(compute_item, index(0))
    if tiles > 1:
        pl.when(work.count > 0)(lambda: release(work.count - 1))
