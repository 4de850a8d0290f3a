"""Sums that many programs add to: of integers, which come out alike in any order."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from zjax_kernels.sparse.cells import HALF
from zjax_kernels.sparse.mosaic_gpu import copies, launch
from zjax_kernels.sparse.mosaic_gpu.arithmetic import index
from zjax_kernels.sparse.mosaic_gpu.work import Work

_BITS = 30
"""Of the largest sum: one less than an integer has besides the sign."""
_LEAST = 2.0**-80
"""Largest gradient that is counted as if it were larger: units have inverses."""


def find_unit(
    k: jax.Array, v: jax.Array, d_out: jax.Array, delta: jax.Array
) -> jax.Array:
    """What an integer counts in the gradient of a query before it is scaled.

    That gradient is the sum of p (d_out v - delta) k over keys, with weights p that sum
    up to 1 at most, so that it is no more than the largest of these.

    Args:
        k: [B, T, K, D] keys.
        v: [B, T, K, D] values.
        d_out: [B, S, H, D] gradient of the averages.
        delta: float32[B, H, S].

    Returns:
        float32[B, H, S], above 0; inf or nan where the gradient may be either.
    """
    k, v, d_out = (x.astype(jnp.float32) for x in (k, v, d_out))
    widest = jnp.sqrt((k * k).max(axis=-1))
    longest = widest * jnp.linalg.norm(v, axis=-1)
    group = d_out.shape[2] // k.shape[2]
    widest, longest = (
        jnp.repeat(x.max(axis=1), group, axis=-1)[..., None] for x in (widest, longest)
    )
    norms = jnp.linalg.norm(d_out, axis=-1).swapaxes(1, 2)
    most = norms * longest + jnp.abs(delta) * widest
    return jnp.maximum(most, _LEAST) * 2.0**-_BITS


def add(work: Work, simulated: bool, memory: Any, total: Any) -> None:
    """Adds what the warpgroups computed for each chunk.

    Args:
        work: The items.
        simulated: Whether the interpreter runs the kernel: each program then has a sum
            of its own, as it knows no reductions.
        memory: Has `d_q`, [halves, HALF, HALF], `d_q_there` and `d_q_used`.
        total: int32[B, S, H, D], or of each program.
    """
    if simulated:
        total = total.at[lax.axis_index("program")]
        total[...] = jnp.zeros(total.shape, total.dtype)
    column_unit = work.sizes.column_unit
    for part in range(launch.NUM_HALVES):
        plgpu.barrier_arrive(memory.d_q_used.at[part])

    def add_item(_, item, carry):
        @pl.loop(index(0), item.count)
        def _(nth):
            columns = copies.read_columns(work, item.first + nth)
            for part in range(launch.NUM_HALVES):
                plgpu.barrier_wait(memory.d_q_there.at[part])
                for lane, (tokens, member) in enumerate(columns):
                    half, within = divmod(lane * column_unit, HALF)
                    if work.sizes.chunk > HALF and half != part:
                        continue
                    channels = slice(None)
                    if work.sizes.chunk == HALF:
                        channels = pl.ds(part * HALF, HALF)
                    head = item.head * index(work.group) + member
                    source = memory.d_q.at[part, pl.ds(within, column_unit)]
                    target = total.at[item.sequence, tokens, head, channels]
                    if simulated:
                        target[...] = target[...] + source[...]
                    else:
                        plgpu.copy_smem_to_gmem(source, target, reduction_op="add")
                if simulated:
                    plgpu.commit_smem()
                else:
                    copies.wait_until_stored()
                plgpu.barrier_arrive(memory.d_q_used.at[part])

        return carry

    work.for_each(add_item, index(0))
    if not simulated:
        plgpu.wait_smem_to_gmem(0)
