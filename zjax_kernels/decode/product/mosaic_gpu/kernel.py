"""Kernel of products of few rows: weights stream through a ring of shared memory.

Tensor cores multiply 64 rows or more at a time. The product is therefore the transposed
one: output channels are the rows of tensor cores, and the few rows of the activations
are the columns. Programs that share the sums of a tile are a cluster: the first of them
receives the sums of the others, and adds them in order.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from zjax_kernels.decode.product.mosaic_gpu.memory import Memory, Place, Sizes
from zjax_kernels.decode.product.mosaic_gpu.ring import PAIRS, Ring
from zjax_kernels.decode.product.mosaic_gpu.sums import Sums, multiply
from zjax_kernels.decode.product.reference import Operands, Options
from zjax_kernels.decode.product.tuning import Tuning
from zjax_kernels.sparse.mosaic_gpu.arithmetic import Arithmetic, index, per_column
from zjax_kernels.warpgroups import CLUSTER, launch


def few_rows_matmul(
    operands: Operands,
    options: Options,
    *,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> Array:
    """Runs `reference.few_rows_matmul` on a Hopper GPU, for 16-bit rows.

    A `tuning` of None is chosen by shape; `interpret` holds the interpreter's
    parameters, None on a GPU. The interpreter has no clusters: it needs 1 split.
    """
    sizes, arithmetic = Sizes.of(operands, options, tuning), Arithmetic(interpret)

    def body(inputs, outputs, scratch):
        memory = scratch.of(interpret, has_words=sizes.has_words)
        ring = Ring(sizes, Place.of(sizes), inputs, memory, arithmetic)
        (out_ref,) = outputs
        # The interpreter runs one kernel after another.
        ring.fill(early=options.early and interpret is None)
        End(ring, options, out_ref).run()

    (out,) = launch(
        body,
        operands,
        [jax.ShapeDtypeStruct((sizes.rows, sizes.columns), operands.x.dtype)],
        Memory.allocate(sizes, operands, interpret),
        num_programs=sizes.columns // sizes.tuning.width,
        cluster_size=sizes.tuning.splits,
        interpret=interpret,
        approx_math=True,  # exp2 and tanh are single instructions
    )
    return out


@dataclasses.dataclass(frozen=True)
class End:
    """Steps of a program, and what follows: norm, activation and residual.

    Args:
        ring: Sizes, memory and operands of the program.
        options: Static choices.
        out_ref: Reference to the result in global memory.
    """

    ring: Ring
    options: Options
    out_ref: Any

    def run(self) -> None:
        """Multiplies, and stores the result in the first program of the cluster."""
        self.start()
        sums, split = multiply(self.ring), self.ring.place.split
        if self.ring.sizes.tuning.splits == 1:
            self.store(sums)
        else:
            pl.when(split > 0)(lambda: self.send(sums))
            pl.when(split == 0)(lambda: self.store(self.receive(sums)))

    def start(self) -> None:
        """Starts to copy the residual, in the program that stores."""
        memory, ring = self.ring.memory, self.ring
        if memory.residual is None:
            return

        # No other program would wait for the copy before it ends.
        @pl.when(ring.place.split == 0)
        def _():
            source = ring.operands.residual.at[:, ring.channels()]
            target = memory.residual.at[pl.ds(0, ring.sizes.rows)]
            plgpu.copy_gmem_to_smem(source, target, memory.residual_ready)

    def send(self, sums: Sums) -> None:
        """Sends the sums to the first program of the cluster."""
        place, memory = self.ring.place.split - 1, self.ring.memory
        sent = [(memory.sums.at[place, n], x) for n, x in enumerate(sums.parts)]
        if sums.squares is not None:
            squares = self.layout_cast(sums.squares, plgpu.Layout.WGMMA)
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

    def receive(self, sums: Sums) -> Sums:
        """Adds the sums of the other programs of the cluster, in order."""
        memory, (parts, squares) = self.ring.memory, sums
        plgpu.barrier_wait(memory.sums_ready)
        for other in range(self.ring.sizes.tuning.splits - 1):
            parts = [
                total + self.load(memory.sums.at[other, part], plgpu.Layout.WGMMA)
                for part, total in enumerate(parts)
            ]
            if squares is not None:
                some = self.load(memory.squares.at[other], plgpu.Layout.WGMMA)
                squares += self.layout_cast(some, PAIRS)
        return Sums(parts, squares)

    def store(self, sums: Sums) -> None:
        """Stores the result of the product."""
        memory, sizes = self.ring.memory, self.ring.sizes
        total = self.layout_cast(self.activate(self.normalised(sums)), PAIRS)
        if memory.residual is not None:
            plgpu.barrier_wait(memory.residual_ready)
            residual = self.load(memory.residual.transpose((1, 0)), PAIRS)
            total += residual.astype(jnp.float32)
        memory.out.transpose((1, 0))[...] = total.astype(memory.out.dtype)
        plgpu.commit_smem()  # copies must see the writes of registers
        rows = memory.out.at[pl.ds(0, sizes.rows)]
        columns = pl.ds(self.ring.place.output, sizes.tuning.width)
        plgpu.copy_smem_to_gmem(rows, self.out_ref.at[:, columns])
        plgpu.wait_smem_to_gmem(0)

    def activate(self, parts: list[Array]) -> Array:
        """Returns the activation of the parts of the product."""
        return self.options.activate(*parts)

    def normalised(self, sums: Sums) -> list[Array]:
        """Returns the sums of the parts, divided by the deviations of a norm."""
        sizes, (parts, squares) = self.ring.sizes, sums
        if squares is None:
            return parts
        squares = self.layout_cast(squares, plgpu.Layout.WGMMA)
        mean = squares.sum(axis=0) * (1 / sizes.depth)
        factor = per_column(lax.rsqrt(mean + self.options.eps), sizes.sum_shape)
        return [total * factor for total in parts]

    def layout_cast(self, x: Array, layout: Any) -> Array:
        """Distributes numbers over the lanes of the warpgroup."""
        return self.ring.arithmetic.layout_cast(x, layout)

    def load(self, ref: Any, layout: Any) -> Array:
        """Loads numbers from shared memory."""
        return self.ring.arithmetic.load(ref, layout, optimized=False)
