"""How kernels run: three warpgroups a program, and one program a processor.

Two warpgroups compute, a half of the tile's rows each, and one copies what they need
into shared memory, ahead of them. Programs take one item after another.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from zjax_kernels.sparse.cells import HALF, TILE
from zjax_kernels.sparse.schedule import Schedule
from zjax_kernels.sparse.tuning import Tuning

NUM_HALVES = TILE // HALF


def call(
    body: Callable[..., None],
    schedule: Schedule,
    inputs: Sequence[jax.Array],
    outputs: Sequence[jax.ShapeDtypeStruct],
    scratch: Any,
    tuning: Tuning,
    interpret: Any,
) -> Sequence[jax.Array]:
    """Runs a kernel: `body(schedule references, inputs, outputs, scratch)`.

    Args:
        body: What a program does.
        schedule: The plan of this pass.
        inputs: Arrays in the GPU's memory.
        outputs: What the kernel writes.
        scratch: Shared memory and barriers, a pytree.
        tuning: How it runs.
        interpret: Parameters of the interpreter, or none on a GPU.

    Returns:
        The outputs.
    """
    arrays, structure = jax.tree.flatten(_read_by_programs(schedule))
    rooms, of_rooms = jax.tree.flatten(scratch)
    counts = len(arrays), len(inputs), len(outputs)

    def run(*refs):
        refs = list(refs)
        parts = [[refs.pop(0) for _ in range(count)] for count in counts]
        plan = jax.tree.unflatten(structure, parts[0])
        body(plan, parts[1], parts[2], jax.tree.unflatten(of_rooms, refs))

    semantics = plgpu.LoweringSemantics
    kernel = plgpu.kernel(
        run,
        out_type=list(outputs),
        grid=(schedule.num_programs,),
        grid_names=("program",),
        num_threads=NUM_HALVES + 1,
        thread_name="warpgroup",
        scratch_types=rooms,
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


def _read_by_programs(schedule: Schedule) -> Schedule:
    """Without arrays that only others read: XLA would fill constants for each call."""
    unread = dict.fromkeys(("num_items", "splits", "head_patterns"))
    return dataclasses.replace(schedule, **unread)


def matrix(shape: Sequence[int], dtype: Any) -> Any:
    """Shared memory that tensor cores read.

    Args:
        shape: Any, of which the last two are the matrix.
        dtype: 16 bits wide.

    Returns:
        What to ask for.
    """
    width = 64 if shape[-1] % 64 == 0 else 32
    transforms = (
        plgpu.TilingTransform((8, width)),
        plgpu.SwizzleTransform(2 * width),
    )
    return plgpu.SMEM(tuple(shape), dtype, transforms=transforms)


def parts(head_size: int, *, segmented: bool) -> list[slice]:
    """Channels of a result for which there is room at a time.

    Args:
        head_size: Channels per head.
        segmented: Whether there are segments, which take room.

    Returns:
        Parts of equal size.
    """
    size = min(head_size, 64 if segmented and head_size >= 128 else 128)
    return [slice(start, start + size) for start in range(0, head_size, size)]


def divide(compute: Callable[[], None], copy: Callable[[], None]) -> None:
    """Gives the warpgroups of a program their work, and registers to do it.

    Args:
        compute: What each of the two that compute does.
        copy: What the one that copies does.
    """
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup < NUM_HALVES)
    def _():
        plgpu.set_max_registers(240, action="increase")
        compute()

    @pl.when(warpgroup == NUM_HALVES)
    def _():
        plgpu.set_max_registers(24, action="decrease")
        copy()
