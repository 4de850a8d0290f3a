"""Skeleton of persistent kernels: copies run ahead of products, also into later tiles.

Each program computes one output tile of 128 rows after another. A tile is a sum over
steps; the operands of a step fill one of several stages of shared memory.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from zjax_kernels import warpgroups
from zjax_kernels.device import NUM_SMS

HALF = 64
"""Rows of a tile that a warpgroup computes."""
TILE_ROWS = warpgroups.NUM_COMPUTE * HALF
DEPTH = 64
"""Contracted elements of a step: 128 bytes, the width of the swizzle."""
CHUNK = 64
"""Columns of a tile of 16 bits that are stored at a time: rows of 128 bytes."""
SWIZZLED = (plgpu.SwizzleTransform(128),)
"""Order of rows of 128 bytes in which reads of tensor cores meet no bank conflicts."""
TILED = (plgpu.TilingTransform((8, 64)), *SWIZZLED)
"""Tiles of 8 swizzled rows, as wgmma addresses operands."""
_ACC: Any = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]
_SIMULATED_SMS = 2


def run(
    body: Callable[..., None],
    inputs: Sequence[Array],
    outputs: Sequence[jax.ShapeDtypeStruct],
    scratch: Any,
    interpret: Any,
    num_warpgroups: int = warpgroups.NUM_COMPUTE + 1,
) -> tuple[Array, ...]:
    """Runs `warpgroups.launch` with one program per SM, for all tiles.

    Barriers and shared memory are then set up once.
    """
    return warpgroups.launch(
        body,
        inputs,
        outputs,
        scratch,
        num_programs=NUM_SMS if interpret is None else _SIMULATED_SMS,
        num_warpgroups=num_warpgroups,
        interpret=interpret,
        approx_math=True,  # rsqrt is a single instruction
        reduction_scratch_bytes=0,  # rows are reduced within a warp
    )


def for_each_tile(total: Any, act: Callable[[Array, Array], Array]) -> Array:
    """Calls `act(tile, steps before)` for the tiles of a program; returns all steps."""
    program = lax.axis_index("program")
    # int32 throughout: the default integer of JAX may have 64 bits.
    programs = jnp.int32(lax.axis_size("program"))
    count = lax.div(total - program + (programs - 1), programs)
    first = jnp.int32(0)
    # Steps are counted over all tiles: stages and barriers carry on.
    return lax.fori_loop(
        0, count, lambda i, steps: act(program + i * programs, steps), first
    )


class Stages(NamedTuple):
    """Barriers of stages of shared memory: `ready` when filled, `free` when read."""

    ready: Any
    free: Any

    @classmethod
    def allocate(cls, count: int, num_copies: int) -> "Stages":
        """Creates barriers of `count` stages, each filled by `num_copies` copies."""
        return cls(
            ready=plgpu.Barrier(num_arrivals=num_copies, num_barriers=count),
            free=plgpu.Barrier(num_arrivals=warpgroups.NUM_COMPUTE, num_barriers=count),
        )

    def _stage(self, step: Array) -> Array:
        return lax.rem(step, jnp.int32(self.ready.shape[0]))

    def fill(
        self, before: Array, count: Array, copy: Callable[[Array, Array, Any], None]
    ) -> Array:
        """Starts `copy(step, stage, barrier)` of each step; returns all steps."""
        num_stages = self.ready.shape[0]

        def fill_stage(step, _):
            stage = self._stage(before + step)

            # Stages are empty at first: nobody frees the first round.
            @pl.when(before + step >= num_stages)
            def _():
                plgpu.barrier_wait(self.free.at[stage])

            copy(step, stage, self.ready.at[stage])

        lax.fori_loop(0, count, fill_stage, None)
        return before + count

    def drain(self, filled: Array) -> None:
        """Waits until all stages are read: a kernel must observe every arrival."""

        @pl.loop(jnp.maximum(filled - self.ready.shape[0], 0), filled)
        def _(step):
            plgpu.barrier_wait(self.free.at[self._stage(step)])

    def contract(
        self,
        before: Array,
        count: Array,
        width: int,
        multiply: Callable[[Any, Array, Array], None],
        num_sums: int = 1,
    ) -> tuple[Array, ...]:
        """Sums products of `multiply(sums, step, stage)`, each float32[HALF, width]."""

        def accumulate(*totals):
            def add(step, _):
                stage = self._stage(before + step)
                plgpu.barrier_wait(self.ready.at[stage])
                multiply(totals, step, stage)
                # Products of this step stay under way: the step before is done.
                plgpu.wgmma_wait(num_sums)

                @pl.when(step > 0)
                def _():
                    plgpu.barrier_arrive(self.free.at[self._stage(before + step - 1)])

            lax.fori_loop(0, count, add, None)
            plgpu.wgmma_wait(0)

            @pl.when(count > 0)
            def _():
                plgpu.barrier_arrive(self.free.at[self._stage(before + count - 1)])

            return tuple(total[...] for total in totals)

        accumulators = [_ACC((HALF, width), jnp.float32)] * num_sums
        return pl.run_scoped(accumulate, *accumulators)

    def read(self, step: Array, use: Callable[[Array], Array]) -> Array:
        """Returns `use(stage)` of a step without a product, and frees the stage."""
        stage = self._stage(step)
        plgpu.barrier_wait(self.ready.at[stage])
        values = use(stage)
        plgpu.commit_smem()  # the next copy into the stage comes after the read
        plgpu.barrier_arrive(self.free.at[stage])
        return values


@dataclasses.dataclass(frozen=True)
class Views:
    """Three views of one piece of shared memory.

    Args:
        by_rows: Swizzled rows: a copy begins at any row of global memory, where a copy
            of tiles begins at a multiple of 8 rows.
        tiled: Tiles in the byte order of `by_rows`, as tensor cores and registers
            address shared memory.
        plain: Rows without a swizzle, which can be copied one by one.
    """

    by_rows: Any
    tiled: Any
    plain: Any

    @classmethod
    def allocate(cls, shape: tuple[int, ...], dtype: Any, *, simulated: bool) -> Any:
        """Allocates matrices with rows of 128 bytes, to be viewed by `of`."""
        tiled = plgpu.TilingTransform((8, shape[-1])), *SWIZZLED
        views = [plgpu.SMEM(shape, dtype, transforms=x) for x in (SWIZZLED, tiled, ())]
        return views[-1] if simulated else plgpu.RefUnion(*views)

    @classmethod
    def of(cls, ref: Any, *, simulated: bool) -> "Views":
        """Returns the views of a reference; the interpreter has one order of memory."""
        return cls(ref, ref, ref) if simulated else cls(*ref)


def num_store_buffers(num_chunks: int) -> int:
    """Returns the buffers of a warpgroup: a chunk is stored while the next is written.

    The number divides the chunks, so that each tile begins with the first buffer.
    """
    return 2 if num_chunks % 2 == 0 else 1


def store_chunk(
    chunk: Array, number: int, tiled: Any, copied: Any, num_buffers: int, target: Any
) -> None:
    """Starts to store chunk `number` of a warpgroup's half of a tile.

    `tiled` and `copied` are views of the buffers [halves, num_buffers, HALF, columns],
    as registers write and as copies read.
    """
    place = lax.axis_index(warpgroups.AXIS), number % num_buffers
    # The buffer is free once all copies but the latest `num_buffers - 1` have read.
    plgpu.wait_smem_to_gmem(num_buffers - 1, wait_read_only=True)
    tiled[place] = chunk
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(copied.at[place], target)
