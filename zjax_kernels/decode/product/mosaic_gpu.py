"""Kernel of products of few rows: weights stream through a ring of shared memory.

Tensor cores multiply 64 rows or more at a time. The product is therefore the transposed
one: output channels are the rows of tensor cores, and the few rows of the activations
are the columns.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from zjax_kernels.decode.product.tuning import DEPTH, Tuning, choose
from zjax_kernels.grouped.mosaic_gpu.pipeline import TILED, Views
from zjax_kernels.sparse.mosaic_gpu.arithmetic import ACC, index
from zjax_kernels.warpgroups import launch


def few_rows_matmul(
    x: Array, weights: Array, *, tuning: Tuning | None = None, interpret: Any = None
) -> Array:
    """Runs `reference.few_rows_matmul` on a Hopper GPU, for 16-bit arrays.

    A `tuning` of None is chosen by shape; `interpret` holds the interpreter's
    parameters, None on a GPU.
    """
    rows, (depth, columns) = len(x), weights.shape
    tuning = tuning or choose(rows, depth, columns)
    sizes = _Sizes(rows, depth, columns, tuning)
    # Parts of a sum are not rounded before they are added.
    dtype = x.dtype if sizes.tuning.splits == 1 else jnp.float32

    def body(inputs, outputs, scratch):
        memory = _Memory.of(scratch, interpret)
        place = _Place.of(sizes, lax.axis_index("program"))
        x_ref, weights_ref = inputs
        program = _Program(sizes, place, x_ref, weights_ref, memory)
        program.start()
        total = program.multiply()
        if interpret is None:
            # Pairs of channels, which lie side by side in a row, in place of pairs of
            # rows.
            total = plgpu.layout_cast(total, plgpu.Layout.WGMMA_TRANSPOSED)
        program.store(total, *outputs)

    (parts,) = launch(
        body,
        (x, weights),
        [jax.ShapeDtypeStruct((sizes.tuning.splits, *sizes.result), dtype)],
        _Memory.allocate(sizes, x.dtype, dtype, interpret),
        num_programs=sizes.tiles * sizes.tuning.splits,
        interpret=interpret,
    )
    # In a fixed order, so that results repeat.
    return parts[0] if len(parts) == 1 else parts.sum(0).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """Static sizes of a call.

    Args:
        rows: Rows of the activations.
        depth: Contracted channels.
        columns: Output channels.
        tuning: Choices that set how fast the kernel runs.
    """

    rows: int
    depth: int
    columns: int
    tuning: Tuning

    @property
    def result(self) -> tuple[int, int]:
        """Shape of the product."""
        return self.rows, self.columns

    @property
    def padded_rows(self) -> int:
        """Rows of which tensor cores multiply a multiple of 8."""
        return -(-self.rows // 8) * 8

    @property
    def tiles(self) -> int:
        """Number of tiles of output channels."""
        return self.columns // self.tuning.width

    @property
    def steps(self) -> int:
        """Number of steps of all splits of a tile."""
        return self.depth // DEPTH


class _Place(NamedTuple):
    """What a program multiplies.

    Args:
        split: Index of the split.
        channels: Output channels.
        first: First step.
        num_steps: Number of steps.
    """

    split: Array
    channels: Any
    first: Array
    num_steps: Array

    @classmethod
    def of(cls, sizes: _Sizes, program: Array) -> "_Place":
        """Returns the place of a program: neighbours read neighbouring channels."""
        split, tile = (
            lax.div(program, index(sizes.tiles)),
            lax.rem(program, index(sizes.tiles)),
        )
        width, splits = sizes.tuning.width, sizes.tuning.splits
        first = lax.div(split * sizes.steps, index(splits))
        end = lax.div((split + 1) * sizes.steps, index(splits))
        return cls(split, pl.ds(tile * width, width), first, end - first)


class _Memory(NamedTuple):
    """Shared memory and barriers of a program.

    Args:
        x: [stages, padded rows, DEPTH] activations.
        weights: [stages, DEPTH, width] weights.
        out: [padded rows, width] results.
        ready: Barriers per stage on which both arrive.
    """

    x: Any
    weights: Any
    out: Any
    ready: Any

    @classmethod
    def allocate(
        cls, sizes: _Sizes, dtype: Any, out_dtype: Any, interpret: Any
    ) -> "_Memory":
        """Returns types of shared memory and barriers, to be named by `of`."""
        stages, width = sizes.tuning.stages, sizes.tuning.width
        rows, simulated = sizes.padded_rows, interpret is not None
        return cls(
            x=Views.allocate((stages, rows, DEPTH), dtype, simulated=simulated),
            weights=plgpu.SMEM((stages, DEPTH, width), dtype, transforms=TILED),
            out=plgpu.SMEM((rows, width), out_dtype),
            ready=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        )

    @classmethod
    def of(cls, refs: "_Memory", interpret: Any) -> "_Memory":
        """Names the views of the activations."""
        return refs._replace(x=Views.of(refs.x, simulated=interpret is not None))


@dataclasses.dataclass(frozen=True)
class _Program:
    """One program: some output channels of the product, over some of the steps.

    Args:
        sizes: Static sizes.
        place: What the program multiplies.
        x: Reference to the activations in global memory.
        weights: Reference to the weights in global memory.
        memory: Shared memory.
    """

    sizes: _Sizes
    place: _Place
    x: Any
    weights: Any
    memory: _Memory

    def start(self) -> None:
        """Starts the copies of the first steps."""
        for step in range(self.sizes.tuning.stages):
            self.copy(index(step))

    def copy(self, step: Array) -> None:
        """Starts to copy the operands of a step, if the step exists."""
        stage = self.stage(step)
        deep = pl.ds((self.place.first + step) * DEPTH, DEPTH)

        @pl.when(step < self.place.num_steps)
        def _():
            memory, ready = self.memory, self.memory.ready.at[stage]
            source = self.weights.at[deep, self.place.channels]
            plgpu.copy_gmem_to_smem(source, memory.weights.at[stage], ready)
            # What other rows of the tile hold stays in columns that nobody stores.
            rows = memory.x.by_rows.at[stage, pl.ds(0, self.sizes.rows)]
            plgpu.copy_gmem_to_smem(self.x.at[:, deep], rows, ready)

    def stage(self, step: Array) -> Array:
        """Returns the stage of a step."""
        return lax.rem(step, index(self.sizes.tuning.stages))

    def multiply(self) -> Array:
        """Returns the transposed product, float32[width, padded rows]."""
        stages = self.sizes.tuning.stages

        def accumulate(total):
            def add(step, _):
                stage = self.stage(step)
                plgpu.barrier_wait(self.memory.ready.at[stage])
                weights = self.memory.weights.at[stage].transpose((1, 0))
                x = self.memory.x.tiled.at[stage].transpose((1, 0))
                plgpu.wgmma(total, weights, x)
                # The product of the step before is done: the stage is free.
                plgpu.wgmma_wait(1)
                pl.when(step > 0)(lambda: self.copy(step - 1 + stages))

            lax.fori_loop(0, self.place.num_steps, add, None)
            return total[...]

        shape = self.sizes.tuning.width, self.sizes.padded_rows
        return pl.run_scoped(accumulate, ACC(shape, jnp.float32))

    def store(self, total: Array, out_ref: Any) -> None:
        """Stores the product of the program."""
        out = self.memory.out
        out.transpose((1, 0))[...] = total.astype(out.dtype)
        plgpu.commit_smem()  # copies must see the writes of registers
        target = out_ref.at[self.place.split, :, self.place.channels]
        plgpu.copy_smem_to_gmem(out.at[pl.ds(0, self.sizes.rows)], target)
        plgpu.wait_smem_to_gmem(0)
