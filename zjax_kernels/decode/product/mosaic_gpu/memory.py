"""Sizes of a call, the share of each program, and shared memory."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from zjax_kernels.decode.product.reference import Operands, Options
from zjax_kernels.decode.product.tuning import (
    CHUNK,
    Tuning,
    choose,
    num_bits,
    step_depth,
)
from zjax_kernels.grouped.mosaic_gpu.pipeline import Views
from zjax_kernels.sparse.mosaic_gpu.arithmetic import index
from zjax_kernels.warpgroups import CLUSTER


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Static sizes of a call.

    Args:
        rows: Rows of the activations.
        depth: Contracted channels.
        columns: Output channels.
        parts: Matrices, of gates and of values, or one.
        step: Contracted channels of a step.
        groups: Groups of channels of a step that have scales; 0 without codes, and for
            a scale of each column.
        tuning: Choices that set how fast the kernel runs.
        has_codes: Whether the weights are codes.
        has_words: Whether the weights are codes of integers, in words of 16 bits.
    """

    rows: int
    depth: int
    columns: int
    parts: int
    step: int
    groups: int
    tuning: Tuning
    has_codes: bool = False
    has_words: bool = False

    @classmethod
    def of(cls, operands: Operands, options: Options, tuning: Tuning | None) -> "Sizes":
        """Reads the sizes of arrays."""
        (rows, depth), parts, scales = (
            operands.x.shape,
            options.num_parts,
            operands.scales,
        )
        columns, step = operands.columns // parts, step_depth(operands.weights.dtype)
        tuning = tuning or choose(
            rows,
            depth,
            columns,
            parts=parts,
            normal=operands.norm is not None,
            dtype=operands.weights.dtype,
        )
        has_codes = scales is not None
        groups = step * len(scales) // depth if has_codes and len(scales) > 1 else 0
        has_words = jnp.issubdtype(operands.weights.dtype, jnp.integer)
        kinds = has_codes, has_words
        return cls(rows, depth, columns, parts, step, groups, tuning, *kinds)

    @property
    def padded_rows(self) -> int:
        """Rows of which tensor cores multiply a multiple of 8."""
        return -(-self.rows // 8) * 8

    @property
    def sum_shape(self) -> tuple[int, int]:
        """Shape of the sum of a part."""
        return self.tuning.width, self.padded_rows

    @property
    def chunks(self) -> int:
        """Number of chunks of the rows in a step."""
        return self.step // CHUNK


@dataclasses.dataclass(frozen=True)
class Place:
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
    def of(cls, sizes: Sizes) -> "Place":
        """Returns the place of this program."""
        width, splits = sizes.tuning.width, sizes.tuning.splits
        split = index(lax.axis_index(CLUSTER) if splits > 1 else 0)
        steps = sizes.depth // sizes.step
        first, end = share_steps(split, steps, splits)
        return cls(split, lax.axis_index("program") * width, first, end - first)

    @property
    def output(self) -> Array:
        """First column of the result."""
        return self.start

    def step_of_rows(self, step: Array) -> Array:
        """Returns the place of a step among the contracted channels of the rows."""
        return self.first + step

    def step_of_weights(self, step: Array) -> Array:
        """Returns the place of a step among the rows of the weights."""
        return self.first + step


def share_steps(split: Array, steps: int, splits: int) -> tuple[Array, Array]:
    """Returns the first step of a split, and the first step behind the split."""
    first = lax.div(split * steps, index(splits))
    return first, lax.div((split + 1) * steps, index(splits))


class Memory(NamedTuple):
    """Shared memory and barriers of a program.

    Args:
        x: [stages, chunks, padded rows, CHUNK] activations.
        weights: [stages, parts, step, width] weights, or [stages, parts, width, step]
            codes.
        words: uint16[stages, parts, width, CHUNK] view of codes; the interpreter has
            one view.
        scales: [stages, parts, groups, width] scales of groups, or None.
        norm: [stages, chunks, CHUNK] scales of the norm, or None.
        residual: [padded rows, width] residual, or None.
        out: [padded rows, width] results.
        sums: float32[splits - 1, parts, width, padded rows] sums of other programs.
        squares: float32[splits - 1, CHUNK, padded rows] sums of squares of the others.
        ready: Barriers per stage on which the operands arrive.
        residual_ready: Barrier on which the residual arrives.
        sums_ready: Barrier on which sums arrive.
    """

    x: Any
    weights: Any
    words: Any
    scales: Any
    norm: Any
    residual: Any
    out: Any
    sums: Any
    squares: Any
    ready: Any
    residual_ready: Any
    sums_ready: Any

    @classmethod
    def allocate(cls, sizes: Sizes, operands: Operands, interpret: Any) -> "Memory":
        """Returns types of shared memory and barriers, to be viewed by `of`."""
        stages, parts, width = sizes.tuning.stages, sizes.parts, sizes.tuning.width
        rows, others, x = sizes.padded_rows, sizes.tuning.splits - 1, operands.x
        norm, residual = operands.norm, operands.residual
        scales = operands.scales if sizes.groups else None
        tile = (width, sizes.step) if sizes.has_codes else (sizes.step, width)
        codes = functools.partial(_codes, interpret=interpret)
        weights = codes if sizes.has_words else functools.partial(_tiled, swizzle=128)
        chunks, num_sums = sizes.chunks, parts + (norm is not None)
        copies = chunks + num_sums + (0 if scales is None else parts)
        return cls(
            x=Views.allocate(
                (stages, chunks, rows, CHUNK), x.dtype, simulated=interpret is not None
            ),
            weights=weights((stages, parts, *tile), operands.weights.dtype),
            words=None,
            scales=_plain((stages, parts, sizes.groups, width), scales),
            norm=_plain((stages, sizes.step), norm),
            residual=_plain((rows, width), residual),
            out=_plain((rows, width), x),
            sums=_tiled((others, parts, *sizes.sum_shape)) if others else None,
            squares=_tiled((others, CHUNK, rows))
            if others and num_sums > parts
            else None,
            ready=plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
            residual_ready=None if residual is None else plgpu.Barrier(),
            sums_ready=(
                plgpu.Barrier(num_arrivals=others * num_sums) if others else None
            ),
        )

    def of(self, interpret: Any, *, has_words: bool = False) -> "Memory":
        """Names the views of activations and of codes."""
        found = self._replace(x=Views.of(self.x, simulated=interpret is not None))
        if has_words and interpret is None:
            codes, words = self.weights
            return found._replace(weights=codes, words=words)
        return found._replace(words=self.weights)


def _plain(shape: tuple[int, ...], like: Any) -> Any:
    """Allocates rows in the dtype of an operand, or nothing without an operand."""
    return None if like is None else plgpu.SMEM(shape, like.dtype)


def _codes(shape: tuple[int, ...], dtype: Any, interpret: Any) -> Any:
    """Allocates codes, and for GPUs a view of them as words of 16 bits."""
    codes = _tiled(shape, dtype, 128)
    words = *shape[:-1], shape[-1] * num_bits(dtype) // 16
    return codes if interpret else plgpu.RefUnion(codes, _tiled(words, jnp.uint16, 128))


def _tiled(shape: tuple[int, ...], dtype: Any = jnp.float32, swizzle: int = 32) -> Any:
    """Allocates matrices in tiles of 8 swizzled rows of `swizzle` bytes."""
    width = (
        8 * swizzle // jnp.iinfo(dtype).bits
        if jnp.issubdtype(dtype, jnp.integer)
        else swizzle // jnp.dtype(dtype).itemsize
    )
    tiling = plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(swizzle)
    return plgpu.SMEM(shape, dtype, transforms=tiling)
