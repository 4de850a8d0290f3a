"""Kernel of products of few rows: weights stream through a ring of shared memory.

Tensor cores multiply 64 rows or more at a time. The product is therefore the transposed
one: output channels are the rows of tensor cores, and the few rows of the activations
are the columns. Programs that share the sums of a tile are a cluster: the first of them
receives the sums of the others, and adds them in order.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from zjax_kernels.decode.product.reference import Operands, Options
from zjax_kernels.decode.product.tuning import DEPTH, Tuning, choose
from zjax_kernels.grouped.mosaic_gpu.pipeline import TILED, Views
from zjax_kernels.sparse.mosaic_gpu.arithmetic import (
    ACC,
    Arithmetic,
    index,
    per_column,
    per_row,
)
from zjax_kernels.warpgroups import CLUSTER, launch

_PAIRS = plgpu.Layout.WGMMA_TRANSPOSED
"""Layout of matrices in registers, by pairs of channels that lie side by side."""


def few_rows_matmul(
    operands: Operands,
    options: Options,
    *,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> Array:
    """Runs `reference.few_rows_matmul` on a Hopper GPU, for 16-bit arrays.

    A `tuning` of None is chosen by shape; `interpret` holds the interpreter's
    parameters, None on a GPU. The interpreter has no clusters: it needs 1 split.
    """
    (rows, depth), columns = operands.x.shape, operands.weights.shape[1]
    parts = options.num_parts
    sizes = _Sizes(
        rows,
        depth,
        columns // parts,
        parts,
        tuning or choose(rows, depth, columns // parts, parts),
    )

    def body(inputs, outputs, scratch):
        program = _Program(
            sizes,
            options,
            _Place.of(sizes),
            inputs,
            scratch._replace(x=Views.of(scratch.x, simulated=interpret is not None)),
            Arithmetic(interpret),
        )
        program.start()
        sums = program.multiply()
        if sizes.tuning.splits == 1:
            program.store(sums, *outputs)
        else:
            pl.when(program.place.split > 0)(lambda: program.send(sums))
            pl.when(program.place.split == 0)(
                lambda: program.store(program.receive(sums), *outputs)
            )

    (out,) = launch(
        body,
        operands,
        [jax.ShapeDtypeStruct((rows, sizes.columns), operands.x.dtype)],
        _Memory.allocate(sizes, operands, interpret),
        num_programs=sizes.columns // sizes.tuning.width,
        cluster_size=sizes.tuning.splits,
        interpret=interpret,
        approx_math=True,  # exp2 and tanh are single instructions
    )
    return out


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """Static sizes of a call.

    Args:
        rows: Rows of the activations.
        depth: Contracted channels.
        columns: Output channels.
        parts: Matrices, of gates and of values, or one.
        tuning: Choices that set how fast the kernel runs.
    """

    rows: int
    depth: int
    columns: int
    parts: int
    tuning: Tuning

    @property
    def padded_rows(self) -> int:
        """Rows of which tensor cores multiply a multiple of 8."""
        return -(-self.rows // 8) * 8

    @property
    def sum_shapes(self) -> list[tuple[int, int]]:
        """Shapes of the sums of a program."""
        return [(self.tuning.width, self.padded_rows)] * self.parts


class _Place(NamedTuple):
    """What a program multiplies.

    Args:
        split: Index of the split.
        start: First output channel.
        first: First step.
        num_steps: Number of steps.
    """

    split: Array
    start: Array
    first: Array
    num_steps: Array

    @classmethod
    def of(cls, sizes: _Sizes) -> "_Place":
        """Returns the place of this program."""
        width, splits = sizes.tuning.width, sizes.tuning.splits
        split = index(lax.axis_index(CLUSTER) if splits > 1 else 0)
        steps = sizes.depth // DEPTH
        first = lax.div(split * steps, index(splits))
        end = lax.div((split + 1) * steps, index(splits))
        return cls(split, lax.axis_index("program") * width, first, end - first)


class _Memory(NamedTuple):
    """Shared memory and barriers of a program.

    Args:
        x: [stages, padded rows, DEPTH] activations.
        weights: [stages, parts, DEPTH, width] weights.
        norm: [stages, DEPTH] scales of the norm, or None.
        residual: [padded rows, width] residual, or None.
        out: [padded rows, width] results.
        sums: float32[splits - 1, parts, width, padded rows] sums of other programs.
        squares: float32[splits - 1, DEPTH, padded rows] sums of squares of the others.
        ready: Barriers per stage on which the operands arrive.
        residual_ready: Barrier on which the residual arrives.
        sums_ready: Barrier on which sums arrive.
    """

    x: Any
    weights: Any
    norm: Any
    residual: Any
    out: Any
    sums: Any
    squares: Any
    ready: Any
    residual_ready: Any
    sums_ready: Any

    @classmethod
    def allocate(cls, sizes: _Sizes, operands: Operands, interpret: Any) -> "_Memory":
        """Returns types of shared memory and barriers."""
        stages, width = sizes.tuning.stages, sizes.tuning.width
        rows, dtype = sizes.padded_rows, operands.x.dtype
        others = sizes.tuning.splits - 1
        norm, is_added = operands.norm, operands.residual is not None
        normal = norm is not None
        views = (stages, rows, DEPTH)
        weights = (stages, sizes.parts, DEPTH, width)
        sums = (others, sizes.parts, width, rows)
        return cls(
            x=Views.allocate(views, dtype, simulated=interpret is not None),
            weights=plgpu.SMEM(weights, dtype, transforms=TILED),
            norm=None if norm is None else plgpu.SMEM((stages, DEPTH), norm.dtype),
            residual=plgpu.SMEM((rows, width), dtype) if is_added else None,
            out=plgpu.SMEM((rows, width), dtype),
            sums=_received(sums) if others else None,
            squares=_received((others, DEPTH, rows)) if others and normal else None,
            ready=plgpu.Barrier(
                num_arrivals=1 + sizes.parts + normal, num_barriers=stages
            ),
            residual_ready=plgpu.Barrier() if is_added else None,
            sums_ready=(
                plgpu.Barrier(num_arrivals=others * (sizes.parts + normal))
                if others
                else None
            ),
        )


def _received(shape):
    """Allocates matrices that other programs of the cluster send."""
    tiling = plgpu.TilingTransform((8, 8)), plgpu.SwizzleTransform(32)
    return plgpu.SMEM(shape, jnp.float32, transforms=tiling)


class _Sums(NamedTuple):
    """What a program sums.

    Args:
        parts: float32[width, padded rows] transposed product with each matrix.
        squares: float32[DEPTH, padded rows] squares of the rows, over all steps, or
            None without a norm.
    """

    parts: list[Array]
    squares: Array | None


@dataclasses.dataclass(frozen=True)
class _Program:
    """One program: some output channels of the product, over some of the steps.

    Args:
        sizes: Static sizes.
        options: Static choices.
        place: What the program multiplies.
        operands: `Operands` of references to global memory.
        memory: Shared memory.
        arithmetic: Operations on registers.
    """

    sizes: _Sizes
    options: Options
    place: _Place
    operands: Any
    memory: _Memory
    arithmetic: Arithmetic

    def start(self) -> None:
        """Starts the copies of the first steps, and of the residual."""
        for step in range(self.sizes.tuning.stages):
            self.copy(index(step))
        if self.memory.residual is not None:
            # The others do not store: none waits for the copy before the program ends.
            pl.when(self.place.split == 0)(self.copy_residual)

    def copy_residual(self) -> None:
        """Starts to copy the residual."""
        plgpu.copy_gmem_to_smem(
            self.operands.residual.at[:, self.channels()],
            self.memory.residual.at[pl.ds(0, self.sizes.rows)],
            self.memory.residual_ready,
        )

    def channels(self, part: int = 0) -> Any:
        """Returns the output channels of the program, in a block of the weights."""
        first = self.place.start + part * self.sizes.columns
        return pl.ds(first, self.sizes.tuning.width)

    def copy(self, step: Array) -> None:
        """Starts to copy the operands of a step, if the step exists."""
        stage = self.stage(step)
        deep = pl.ds((self.place.first + step) * DEPTH, DEPTH)
        operands, memory = self.operands, self.memory

        @pl.when(step < self.place.num_steps)
        def _():
            ready = memory.ready.at[stage]
            for part in range(self.sizes.parts):
                source = operands.weights.at[deep, self.channels(part)]
                plgpu.copy_gmem_to_smem(source, memory.weights.at[stage, part], ready)
            # What other rows of the tile hold stays in columns that nobody stores.
            rows = memory.x.by_rows.at[stage, pl.ds(0, self.sizes.rows)]
            plgpu.copy_gmem_to_smem(operands.x.at[:, deep], rows, ready)
            if memory.norm is not None:
                target = memory.norm.at[stage]
                plgpu.copy_gmem_to_smem(operands.norm.at[deep], target, ready)

    def stage(self, step: Array) -> Array:
        """Returns the stage of a step."""
        return lax.rem(step, index(self.sizes.tuning.stages))

    def multiply(self) -> _Sums:
        """Sums over the steps of the program."""
        stages, shapes = self.sizes.tuning.stages, self.sizes.sum_shapes

        def accumulate(*totals):
            def add(step, squares):
                stage = self.stage(step)
                plgpu.barrier_wait(self.memory.ready.at[stage])
                squares = self.scale_rows(stage, squares)
                x = self.memory.x.tiled.at[stage].transpose((1, 0))
                for part, total in enumerate(totals):
                    weights = self.memory.weights.at[stage, part].transpose((1, 0))
                    plgpu.wgmma(total, weights, x)
                # Products of the step before are done: the stage is free.
                plgpu.wgmma_wait(len(totals))
                pl.when(step > 0)(lambda: self.copy(step - 1 + stages))
                return squares

            squares = lax.fori_loop(0, self.place.num_steps, add, self.no_squares())
            return [total[...] for total in totals], squares

        accumulators = [ACC(shape, jnp.float32) for shape in shapes]
        return _Sums(*pl.run_scoped(accumulate, *accumulators))

    def no_squares(self) -> Array | None:
        """Returns sums of squares before the first step."""
        if self.memory.norm is None:
            return None
        shape = DEPTH, self.sizes.padded_rows
        return self.arithmetic.full(shape, 0.0, _PAIRS)

    def scale_rows(self, stage: Array, squares: Array | None) -> Array | None:
        """Scales a step of the rows by channel, in place, and adds their squares.

        The deviation divides the product in the end: it needs the whole rows.
        """
        if squares is None:
            return None
        ref = self.memory.x.tiled.at[stage].transpose((1, 0))
        wide = self.arithmetic.load(ref, _PAIRS, optimized=False).astype(jnp.float32)
        norm = self.memory.norm.at[stage]
        scale = self.arithmetic.load(norm, _PAIRS.reduce(1), optimized=False)
        scaled = wide * per_row(scale.astype(jnp.float32), wide.shape)
        ref[...] = scaled.astype(ref.dtype)
        plgpu.commit_smem()  # tensor cores must see the writes of registers
        return squares + wide * wide

    def send(self, sums: _Sums) -> None:
        """Sends the sums to the first program of the cluster."""
        place, memory = self.place.split - 1, self.memory
        sent = [(memory.sums.at[place, n], x) for n, x in enumerate(sums.parts)]
        if sums.squares is not None:
            squares = self.arithmetic.layout_cast(sums.squares, plgpu.Layout.WGMMA)
            sent.append((memory.squares.at[place], squares))
        for target, value in sent:
            plgpu.async_store_smem(
                value,
                target,
                memory.sums_ready,
                cluster_idx=index(0),
                cluster_dim=CLUSTER,
                optimized=False,
            )

    def receive(self, sums: _Sums) -> _Sums:
        """Adds the sums of the other programs of the cluster, in order."""
        plgpu.barrier_wait(self.memory.sums_ready)
        parts, squares = list(sums.parts), sums.squares
        for other in range(self.sizes.tuning.splits - 1):
            for part, total in enumerate(parts):
                parts[part] = total + self.load(self.memory.sums.at[other, part])
            if squares is not None:
                received = self.load(self.memory.squares.at[other])
                squares += self.arithmetic.layout_cast(received, _PAIRS)
        return _Sums(parts, squares)

    def load(self, ref: Any) -> Array:
        """Loads what another program sent."""
        return self.arithmetic.load(ref, plgpu.Layout.WGMMA, optimized=False)

    def store(self, sums: _Sums, out_ref: Any) -> None:
        """Stores the result of the product."""
        memory, parts = self.memory, sums.parts
        if sums.squares is not None:
            squares = self.arithmetic.layout_cast(sums.squares, plgpu.Layout.WGMMA)
            mean = squares.sum(axis=0) * (1 / self.sizes.depth)
            factor = per_column(lax.rsqrt(mean + self.options.eps), parts[0].shape)
            parts = [total * factor for total in parts]
        total = self.arithmetic.layout_cast(self.options.activate(*parts), _PAIRS)
        if memory.residual is not None:
            plgpu.barrier_wait(memory.residual_ready)
            residual = memory.residual.transpose((1, 0))
            residual = self.arithmetic.load(residual, _PAIRS, optimized=False)
            total += residual.astype(jnp.float32)
        memory.out.transpose((1, 0))[...] = total.astype(memory.out.dtype)
        plgpu.commit_smem()  # copies must see the writes of registers
        rows = memory.out.at[pl.ds(0, self.sizes.rows)]
        plgpu.copy_smem_to_gmem(rows, out_ref.at[:, self.channels()])
        plgpu.wait_smem_to_gmem(0)
