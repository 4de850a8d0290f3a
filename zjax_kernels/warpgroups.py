"""Launch of kernels, loads into registers, and warpgroups: two compute, one copies."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

_INDEX = inspect.signature(plgpu.load).parameters["idx"]
"""`idx` of `plgpu.load`: required before JAX 0.11, absent afterwards."""
NUM_COMPUTE = 2
"""Warpgroups that compute; one more copies."""
AXIS = "warpgroup"
CLUSTER = "rank"
"""Axis of the programs of a cluster."""


def launch(
    body: Callable[[Any, Any, Any], None],
    inputs: Any,
    outputs: Sequence[jax.ShapeDtypeStruct],
    scratch: Any = (),
    *,
    num_programs: int,
    num_warpgroups: int | None = None,
    cluster_size: int = 1,
    interpret: Any,
    **parameters: Any,
) -> tuple[Any, ...]:
    """Runs `body(inputs, outputs, scratch)`, all of references, as a kernel.

    `inputs` (arrays, and references of `jax.new_ref` that the kernel writes in place)
    and `scratch` (shared memory and barriers) are pytrees, and `parameters`
    are of Mosaic's compiler. Programs have `num_warpgroups`, or one and no axis of
    warpgroups. With a `cluster_size` above 1 a cluster of so many, along the axis
    `CLUSTER`, takes the place of each program. `interpret` holds the interpreter's
    parameters, None on a GPU.
    """
    operands = jax.tree.leaves(inputs)
    leaves, structure = jax.tree.flatten((inputs, outputs, scratch))
    scratch_types = leaves[len(operands) + len(outputs) :]
    mesh: dict[str, Any] = {"grid": (num_programs,), "grid_names": ("program",)}
    # Even an axis of one warpgroup costs barriers around the kernel.
    if num_warpgroups is not None:
        mesh |= {"num_threads": num_warpgroups, "thread_name": AXIS}
    if cluster_size > 1:
        mesh |= {"cluster": (cluster_size,), "cluster_names": (CLUSTER,)}
    parameters = {"lowering_semantics": plgpu.LoweringSemantics.Lane} | parameters
    options = {
        "out_type": tuple(outputs),
        "compiler_params": plgpu.CompilerParams(**parameters),
    }
    if interpret is not None:
        options["interpret"] = interpret

    def run(*refs):
        body(*jax.tree.unflatten(structure, refs))

    # Profiles of a GPU show the name.
    run.__name__ = body.__qualname__.split(".")[0]
    if not any(isinstance(x, jax.Ref) for x in operands):
        return plgpu.kernel(run, scratch_types=scratch_types, **options, **mesh)(
            *operands
        )

    # The rule for `vmap` of `plgpu.kernel` hides references from older JAX.
    def run_scoped(*refs):
        pl.run_scoped(functools.partial(run, *refs), *scratch_types)

    run_scoped.__name__ = run.__name__
    run_kernel: Any = pl.kernel(run_scoped, mesh=plgpu.Mesh(**mesh), **options)
    return run_kernel(*operands)


def load(ref: Any, layout: Any, *, interpret: Any, optimized: bool = True) -> jax.Array:
    """Reads an array inside a kernel; the interpreter ignores `layout`.

    `interpret` is as for `launch`. `optimized` makes a load without a fast
    implementation an error of compilation.
    """
    if interpret is not None:
        return ref[...]
    index = {"idx": ()} if _INDEX.default is _INDEX.empty else {}
    return plgpu.load(ref, layout=layout, optimized=optimized, **index)


def specialize_warpgroups(
    compute: Callable[[], None], copy: Callable[[], None]
) -> None:
    """Runs `compute` on two warpgroups, and `copy` with few registers on the third."""
    warpgroup = lax.axis_index(AXIS)

    # An SM has 65,536 registers, 512 for each lane of a warpgroup: 2 * 240 + 24 = 504.
    @pl.when(warpgroup < NUM_COMPUTE)
    def _():
        plgpu.set_max_registers(240, action="increase")
        compute()

    @pl.when(warpgroup == NUM_COMPUTE)
    def _():
        plgpu.set_max_registers(24, action="decrease")
        copy()


def meet_cluster(barrier: Any) -> None:
    """Waits until all programs of a cluster have come here.

    Copies to global memory that a program waited for before, all programs of the
    cluster may copy from there afterwards.
    """
    # Barriers of clusters order shared memory alone. A copy that has ended is visible
    # to the program that made the copy, and without a fence to no other.
    _emit("fence.acq_rel.cluster;")
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)
    _emit("fence.acq_rel.cluster; fence.proxy.async.global;")


def _emit(instructions: str) -> None:
    """Adds instructions of PTX without operands to a kernel, for all lanes."""

    def emit(ctx: Any) -> None:
        del ctx
        void = ir.Type.parse("!llvm.void")
        llvm.inline_asm(void, [], instructions, "", has_side_effects=True)

    run: Any = plgpu.inline_mgpu()(emit)
    run()


HAS_EARLY_START = hasattr(plgpu, "griddepcontrol_wait")
"""Whether kernels may start before the last one ends: from JAX 0.11.2 on."""


def start_next() -> None:
    """Lets the next kernel start while this one runs, if it can wait for this one."""
    if HAS_EARLY_START:
        plgpu.griddepcontrol_launch_dependents()


def wait_for_last() -> None:
    """Waits until the kernels before this one have ended, where it may start early."""
    if HAS_EARLY_START:
        plgpu.griddepcontrol_wait()
