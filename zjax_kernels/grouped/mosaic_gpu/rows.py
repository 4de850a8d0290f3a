"""Kernel of copies of rows into the order of groups, as of tokens to experts."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from zjax_kernels.grouped.mosaic_gpu.pipeline import run

_LANES = 128
_BATCH_BYTES = 16 * 1024
"""Bytes of the tokens that one copy loads."""
_MAX_STAGES = 8
_MEMORY_BYTES = 192 * 1024
"""Shared memory of all stages."""


def copy_rows(
    x: Array, sources: Array, targets: Array, *, interpret: Any = None
) -> Array:
    """Runs `reference.copy_rows` for rows of a multiple of 128 numbers."""
    num_tokens, width = x.shape
    num_rows = len(sources)  # `targets` is the inverse of `sources`
    row_bytes = width * x.dtype.itemsize
    batch = min(num_tokens, max(1, _BATCH_BYTES // row_bytes))
    # Two stages at least: one is loaded while the other is stored.
    stages = max(2, min(_MAX_STAGES, _MEMORY_BYTES // (batch * row_bytes)))
    scratch = _Memory(
        rows=plgpu.SMEM((stages, batch, width // _LANES, _LANES), x.dtype),
        ready=plgpu.Barrier(num_barriers=stages),
    )

    def body(inputs, outputs, memory):
        (x_ref, targets_ref), (output,) = inputs, outputs
        program, programs = lax.axis_index("program"), lax.axis_size("program")
        total = -(-num_tokens // batch)
        count = lax.div(total - program + (programs - 1), jnp.int32(programs))

        def first_token(number):
            # The last batch begins earlier: it copies some tokens again.
            start = (program + number * programs) * batch
            return jnp.minimum(start, num_tokens - batch)

        def load(number):
            stage = lax.rem(number, jnp.int32(stages))
            tokens = x_ref.at[pl.ds(first_token(number), batch)]
            plgpu.copy_gmem_to_smem(
                tokens, memory.rows.at[stage], memory.ready.at[stage]
            )

        def store(number, _):
            stage = lax.rem(number, jnp.int32(stages))
            start = first_token(number)
            # Targets are read before the wait, while the tokens are on the way.
            places = [
                (token, targets_ref[start + token, choice])
                for token in range(batch)
                for choice in range(targets.shape[1])
            ]
            plgpu.barrier_wait(memory.ready.at[stage])
            for token, row in places:

                @pl.when(row < num_rows)
                def _(token=token, row=row):
                    source = memory.rows.at[stage, token]
                    # One group for the copies of a batch: the wait below counts groups.
                    plgpu.copy_smem_to_gmem(source, output.at[row], commit_group=False)

            plgpu.commit_smem_to_gmem_group()
            # The next batch to load has the stage of the oldest of these stores.
            plgpu.wait_smem_to_gmem(stages - ahead, wait_read_only=True)
            pl.when(number + ahead < count)(lambda: load(number + ahead))

        # Half of the stages hold loads ahead, half hold stores that may still read.
        ahead = stages // 2
        lax.fori_loop(0, jnp.minimum(ahead, count), lambda i, _: load(i), None)
        lax.fori_loop(0, count, store, None)
        plgpu.wait_smem_to_gmem(0)

    def in_lanes(length):
        # A copy takes at most 256 elements per dim.
        return length, width // _LANES, _LANES

    output = jax.ShapeDtypeStruct(in_lanes(num_rows), x.dtype)
    inputs = x.reshape(in_lanes(num_tokens)), targets
    (rows,) = run(body, inputs, [output], scratch, interpret, num_warpgroups=1)
    return rows.reshape(num_rows, width)


class _Memory(NamedTuple):
    """Shared memory and the barriers of copies into each stage."""

    rows: Any
    ready: Any
