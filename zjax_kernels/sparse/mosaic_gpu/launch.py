"""Warp-specialized, persistent kernels: one program per SM, of three warpgroups.

Two warpgroups compute, one half of the tile's rows each; the third copies their inputs
into shared memory ahead of them. A program computes one item after another.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from zjax_kernels.sparse.cells import HALF, TILE
from zjax_kernels.sparse.schedule import Schedule
from zjax_kernels.sparse.tuning import Tuning
from zjax_kernels.warpgroups import AXIS, NUM_COMPUTE

NUM_HALVES = TILE // HALF
assert NUM_HALVES == NUM_COMPUTE


def call(
    body: Callable[..., None],
    schedule: Schedule,
    inputs: Sequence[jax.Array],
    outputs: Sequence[jax.ShapeDtypeStruct],
    scratch: Any,
    tuning: Tuning,
    interpret: Any,
) -> Sequence[jax.Array]:
    """Runs `body(schedule references, inputs, outputs, scratch)` as a kernel.

    `scratch` is a pytree of shared memory and barriers; `interpret` holds the
    interpreter's parameters, None on a GPU.
    """
    arrays, structure = jax.tree.flatten(_without_unread(schedule))
    scratch_leaves, scratch_structure = jax.tree.flatten(scratch)
    counts = len(arrays), len(inputs), len(outputs)

    def run(*refs):
        refs = list(refs)
        groups = [[refs.pop(0) for _ in range(count)] for count in counts]
        plan = jax.tree.unflatten(structure, groups[0])
        scratch = jax.tree.unflatten(scratch_structure, refs)
        body(plan, groups[1], groups[2], scratch)

    semantics = plgpu.LoweringSemantics
    kernel = plgpu.kernel(
        run,
        out_type=list(outputs),
        grid=(schedule.num_programs,),
        grid_names=("program",),
        num_threads=NUM_HALVES + 1,
        thread_name=AXIS,
        scratch_types=scratch_leaves,
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=0,
            lowering_semantics=(
                semantics.Warpgroup if tuning.warpgroup else semantics.Lane
            ),
        ),
        **({} if interpret is None else {"interpret": interpret}),
    )
    return kernel(*arrays, *inputs)


def _without_unread(schedule: Schedule) -> Schedule:
    """Drops arrays that the kernel does not read; XLA would copy them per call."""
    unused = dict.fromkeys(("num_items", "splits", "head_patterns"))
    return dataclasses.replace(schedule, **unused)


def smem_matrix(shape: Sequence[int], dtype: Any) -> Any:
    """Shared memory of 16-bit matrices, tiled and swizzled for tensor cores."""
    width = 64 if shape[-1] % 64 == 0 else 32
    transforms = (
        plgpu.TilingTransform((8, width)),
        plgpu.SwizzleTransform(2 * width),
    )
    return plgpu.SMEM(tuple(shape), dtype, transforms=transforms)


def channel_slices(head_size: int, *, segmented: bool) -> list[slice]:
    """Equal slices of the channels of a result, small enough for shared memory.

    Segments take shared memory, too.
    """
    size = min(head_size, 64 if segmented and head_size >= 128 else 128)
    return [slice(start, start + size) for start in range(0, head_size, size)]
