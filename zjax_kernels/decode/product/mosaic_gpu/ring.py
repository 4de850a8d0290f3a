"""Copies of operands into a ring of stages, some steps ahead of the products."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from zjax_kernels import warpgroups
from zjax_kernels.decode.product.mosaic_gpu.memory import Memory, Place, Sizes
from zjax_kernels.decode.product.tuning import CHUNK
from zjax_kernels.sparse.mosaic_gpu.arithmetic import Arithmetic, index, per_row

PAIRS = plgpu.Layout.WGMMA_TRANSPOSED
"""Layout of matrices in registers, by pairs of channels that lie side by side."""


@dataclasses.dataclass(frozen=True)
class Ring:
    """Stages of shared memory, which hold the operands of some steps.

    Args:
        sizes: Static sizes.
        place: What the program multiplies.
        operands: `Operands` of references to global memory.
        memory: Shared memory.
        arithmetic: Operations on registers.
    """

    sizes: Sizes
    place: Place
    operands: Any
    memory: Memory
    arithmetic: Arithmetic

    def fill(self, *, early: bool) -> None:
        """Starts the copies of the first steps.

        With `early` the weights are read before the kernels before this one end.
        """
        if not early:
            self._start(self.copy)
            return
        self._start(self.copy_weights)
        warpgroups.wait_for_last()
        # Behind the wait: what the next kernels read early is then surely written.
        warpgroups.start_next()
        self._start(self.copy_rows)

    def _start(self, copy: Callable[[Array, Array], None]) -> None:
        """Starts copies of the first steps."""
        # A loop: short programs would wait for the instructions of many copies.
        stages = index(self.sizes.tuning.stages)
        lax.fori_loop(0, stages, lambda step, _: copy(step, step), None)

    def channels(self, part: int = 0) -> Any:
        """Returns the output channels of the program, in a block of the weights."""
        first = self.place.start + part * self.sizes.columns
        return pl.ds(first, self.sizes.tuning.width)

    def copy(self, step: Array, stage: Array) -> None:
        """Starts to copy the operands of a step into a stage, if the step exists."""
        self.copy_weights(step, stage)
        self.copy_rows(step, stage)

    def copy_weights(self, step: Array, stage: Array) -> None:
        """Starts to copy the weights of a step, and the scales."""
        sizes, memory = self.sizes, self.memory

        @pl.when(step < self.place.num_steps)
        def _():
            first, ready = self.first(step), memory.ready.at[stage]
            rows = self.place.step_of_weights(step) * sizes.step
            for part in range(sizes.parts):
                source = self.operands.weights.at[self.weights(part, rows)]
                plgpu.copy_gmem_to_smem(source, memory.weights.at[stage, part], ready)
                if sizes.groups:
                    groups = lax.div(first, index(sizes.step // sizes.groups))
                    place = pl.ds(groups, sizes.groups), self.channels(part)
                    source = self.operands.scales.at[place]
                    target = memory.scales.at[stage, part]
                    plgpu.copy_gmem_to_smem(source, target, ready)

    def copy_rows(self, step: Array, stage: Array) -> None:
        """Starts to copy a step of the rows, and the scales of the norm."""
        sizes, memory = self.sizes, self.memory

        @pl.when(step < self.place.num_steps)
        def _():
            first, ready = self.first(step), memory.ready.at[stage]
            for chunk in range(sizes.chunks):
                # What other rows of the tile hold stays in columns that nobody stores.
                target = memory.x.by_rows.at[stage, chunk, pl.ds(0, sizes.rows)]
                source = self.operands.x.at[:, pl.ds(first + chunk * CHUNK, CHUNK)]
                plgpu.copy_gmem_to_smem(source, target, ready)
            if memory.norm is not None:
                source = self.operands.norm.at[pl.ds(first, sizes.step)]
                plgpu.copy_gmem_to_smem(source, memory.norm.at[stage], ready)

    def first(self, step: Array) -> Array:
        """Returns the first contracted channel of a step."""
        return self.place.step_of_rows(step) * self.sizes.step

    def weights(self, part: int, first: Array) -> tuple[Any, ...]:
        """Returns the place of the weights of a step, in a block of the matrix."""
        place = pl.ds(first, self.sizes.step), self.channels(part)
        return place[::-1] if self.sizes.has_codes else place

    def move(self, stage: Array, by: int) -> Array:
        """Returns the stage of the next step (1), or of the step before (-1)."""
        # Cheaper than a remainder of the step, which each step would wait for.
        last = index(self.sizes.tuning.stages - 1)
        end, start = (last, index(0)) if by > 0 else (index(0), last)
        return jnp.where(stage == end, start, stage + index(by))

    def wait(self, stage: Array, squares: Array | None) -> Array | None:
        """Waits for the operands of a step; returns the sums of squares of a norm.

        Rows are scaled by channel, in place, and the squares of the rows are added. The
        deviation divides the product in the end: it needs the whole rows.
        """
        plgpu.barrier_wait(self.memory.ready.at[stage])
        if squares is None:
            return None
        for chunk in range(self.sizes.chunks):
            rows, norm = self.rows(stage, chunk), self.memory.norm.at[stage]
            wide = self.arithmetic.load(rows, PAIRS, optimized=False)
            wide = wide.astype(jnp.float32)
            scale = norm.at[pl.ds(chunk * CHUNK, CHUNK)]
            scale = self.arithmetic.load(scale, PAIRS.reduce(1), optimized=False)
            scaled = wide * per_row(scale.astype(jnp.float32), wide.shape)
            rows[...] = scaled.astype(rows.dtype)
            squares += wide * wide
        plgpu.commit_smem()  # tensor cores must see the writes of registers
        return squares

    def rows(self, stage: Array, chunk: int) -> Any:
        """Returns a chunk of the rows, transposed: [CHUNK, padded rows]."""
        return self.memory.x.tiled.at[stage, chunk].transpose((1, 0))

    def no_squares(self) -> Array | None:
        """Returns sums of squares before the first step, or None without a norm."""
        if self.memory.norm is None:
            return None
        return self.arithmetic.full((CHUNK, self.sizes.padded_rows), 0.0, PAIRS)
