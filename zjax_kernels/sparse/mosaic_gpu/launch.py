"""How kernels run: three warpgroups a program, or four, and one program a processor.

Two warpgroups compute, a half of the tile's rows each, and one copies what they need
into shared memory, ahead of them. Where programs add to sums, one more does that.
Programs take one item after another.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
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
    *,
    sums: Sequence[jax.ShapeDtypeStruct] = (),
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
        sums: Outputs that begin as 0, to be added to; they come first.

    Returns:
        The outputs.
    """
    arrays, structure = jax.tree.flatten(schedule)
    rooms, of_rooms = jax.tree.flatten(scratch)
    counts = len(arrays), len(inputs), len(sums) + len(outputs)

    def run(*refs):
        refs = list(refs)
        parts = [[refs.pop(0) for _ in range(count)] for count in counts]
        plan = jax.tree.unflatten(structure, parts[0])
        body(plan, parts[1], parts[2], jax.tree.unflatten(of_rooms, refs))

    semantics = plgpu.LoweringSemantics
    mesh: dict[str, Any] = {
        "grid": (schedule.num_programs,),
        "grid_names": ("program",),
        "num_threads": NUM_HALVES + 1 + bool(sums),
        "thread_name": "warpgroup",
    }
    options: dict[str, Any] = {
        "compiler_params": plgpu.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=0,
            lowering_semantics=(
                semantics.Warpgroup if tuning.warpgroup else semantics.Lane
            ),
        ),
    }
    if interpret is not None:
        options["interpret"] = interpret
    if interpret is None and sums:
        return _run_in_place(run, sums, outputs, rooms, mesh, options)(*arrays, *inputs)
    kernel = plgpu.kernel(
        run, out_type=[*sums, *outputs], scratch_types=rooms, **mesh, **options
    )
    return kernel(*arrays, *inputs)


def _run_in_place(run, sums, outputs, rooms, mesh, options):
    """A kernel that writes into arrays, some of which are 0 before it runs."""

    def body(*refs):
        scoped: Any = functools.partial(run, *refs)
        pl.run_scoped(scoped, *rooms, collective_axes=mesh["thread_name"])

    kernel = pl.kernel(body, mesh=plgpu.Mesh(**mesh), **options)

    @jax.custom_batching.sequential_vmap
    def call(*arrays):
        def write(refs):
            kernel(*arrays, *refs)

        zeros = [jnp.zeros(x.shape, x.dtype) for x in sums]
        return pl.run_state(write)(
            [*zeros, *(lax.empty(x.shape, x.dtype) for x in outputs)]
        )

    return call


def matrix(shape: Sequence[int], dtype: Any) -> Any:
    """Shared memory that tensor cores read.

    Args:
        shape: Any, of which the last two are the matrix.
        dtype: 16 or 32 bits wide.

    Returns:
        What to ask for.
    """
    itemsize = jnp.dtype(dtype).itemsize
    num_bytes = 128 if shape[-1] * itemsize % 128 == 0 else 64
    transforms = (
        plgpu.TilingTransform((8, num_bytes // itemsize)),
        plgpu.SwizzleTransform(num_bytes),
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


def divide(
    compute: Callable[[], None],
    copy: Callable[[], None],
    add: Callable[[], None] | None = None,
) -> None:
    """Gives the warpgroups of a program their work, and registers to do it.

    Args:
        compute: What each of the two that compute does.
        copy: What the one that copies does.
        add: What the one that adds to sums does, if there are any.
    """
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup < NUM_HALVES)
    def _():
        plgpu.set_max_registers(232 if add else 240, action="increase")
        compute()

    for number, run in enumerate((copy, add), start=NUM_HALVES):
        if run:

            @pl.when(warpgroup == number)
            def _(run=run):
                plgpu.set_max_registers(24, action="decrease")
                run()
