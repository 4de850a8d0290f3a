"""Sums of a program over steps: of weights, or of codes that are widened."""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from zjax_kernels.decode.product.mosaic_gpu.ring import Ring
from zjax_kernels.decode.product.mosaic_gpu.words import codes_of_words
from zjax_kernels.decode.product.tuning import CHUNK, num_bits
from zjax_kernels.sparse.mosaic_gpu.arithmetic import ACC, ROWS, index, per_row, widen


class Sums(NamedTuple):
    """What a program sums.

    Args:
        parts: float32[width, padded rows] transposed product with each matrix.
        squares: float32[CHUNK, padded rows] squares of the rows, over all steps, or
            None without a norm.
    """

    parts: list[Array]
    squares: Array | None


def multiply(ring: Ring) -> Sums:
    """Sums the products of the steps of a program."""
    if not ring.sizes.has_codes:
        return _multiply_weights(ring)
    return (_multiply_groups if ring.sizes.groups else _multiply_columns)(ring)


def _multiply_weights(ring: Ring) -> Sums:
    """Sums products of weights in shared memory."""
    sizes = ring.sizes

    def accumulate(*totals):
        def add(step, carry):
            stage, squares = carry
            squares = ring.wait(stage, squares)
            for part, total in enumerate(totals):
                weights = ring.memory.weights.at[stage, part].transpose((1, 0))
                plgpu.wgmma(total, weights, ring.rows(stage, 0))
            # Products of the step before are done: the stage is free.
            plgpu.wgmma_wait(len(totals))
            following, before = step - 1 + sizes.tuning.stages, ring.move(stage, -1)
            pl.when(step > 0)(lambda: ring.copy(following, before))
            return ring.move(stage, 1), squares

        start = index(0), ring.no_squares()
        _, squares = lax.fori_loop(0, ring.place.num_steps, add, start)
        return [total[...] for total in totals], squares

    accumulators = [ACC(sizes.sum_shape, jnp.float32)] * sizes.parts
    return Sums(*pl.run_scoped(accumulate, *accumulators))


def _multiply_columns(ring: Ring) -> Sums:
    """Sums products of codes with a scale for each column, which scales the sum."""
    sizes, arithmetic = ring.sizes, ring.arithmetic
    # Early: the end of a program would wait for global memory.
    scales = [
        arithmetic.load(
            ring.operands.scales.at[0, ring.channels(part)], ROWS, optimized=False
        )
        for part in range(sizes.parts)
    ]

    def multiply(stage, totals):
        pairs = [_widened(ring, stage, part) for part in range(sizes.parts)]
        return arithmetic.products(*pairs, onto=totals)

    parts, squares = _sum_steps(ring, multiply)
    pairs = zip(parts, scales, strict=True)
    return Sums(
        [x * per_row(s.astype(jnp.float32), x.shape) for x, s in pairs], squares
    )


def _multiply_groups(ring: Ring) -> Sums:
    """Sums products of codes; the sum of each group is scaled in float32."""

    def multiply(stage, totals):
        return [
            total + _product_of_groups(ring, stage, part)
            for part, total in enumerate(totals)
        ]

    return _sum_steps(ring, multiply)


def _sum_steps(
    ring: Ring, multiply: Callable[[Array, list[Array]], Sequence[Array]]
) -> Sums:
    """Adds the products of all steps; `multiply` adds those of a stage to sums."""
    sizes, full = ring.sizes, ring.arithmetic.full
    zero = full(sizes.sum_shape, 0.0, plgpu.Layout.WGMMA)

    def add(step, carry):
        stage, sums = carry
        squares = ring.wait(stage, sums.squares)
        parts = [*multiply(stage, sums.parts)]
        # Codes are in registers and products are done: the stage is free.
        ring.copy(step + index(sizes.tuning.stages), stage)
        return ring.move(stage, 1), Sums(parts, squares)

    start = index(0), Sums([zero] * sizes.parts, ring.no_squares())
    return lax.fori_loop(0, ring.place.num_steps, add, start)[1]


def _widened(ring: Ring, stage: Array, part: int) -> list[tuple[Array, Any]]:
    """Returns chunks of the codes of a step, in registers, and of the rows."""
    memory, arithmetic = ring.memory, ring.arithmetic
    codes, chunks = memory.weights.at[stage, part], range(ring.sizes.chunks)
    if jnp.issubdtype(codes.dtype, jnp.integer):
        words = memory.words.at[stage, part]
        words = arithmetic.load(words, plgpu.Layout.WGMMA, optimized=False)
        bits = num_bits(codes.dtype)
        widened = [codes_of_words(arithmetic, words, bits, chunk) for chunk in chunks]
    else:
        narrow = arithmetic.load(codes, plgpu.Layout.WGMMA_UPCAST_2X, optimized=False)
        narrow = arithmetic.layout_cast(narrow, plgpu.Layout.WGMMA)
        wide = widen(narrow, memory.x.tiled.dtype)
        widened = [wide[:, chunk * CHUNK : (chunk + 1) * CHUNK] for chunk in chunks]
    rows = [ring.rows(stage, chunk) for chunk in chunks]
    return [*zip(widened, rows, strict=True)]


def _product_of_groups(ring: Ring, stage: Array, part: int) -> Array:
    """Returns the product of a step with the codes of a part."""
    sizes, memory, arithmetic = ring.sizes, ring.memory, ring.arithmetic
    pairs, per_group = _widened(ring, stage, part), sizes.chunks // sizes.groups
    groups = [pairs[n : n + per_group] for n in range(0, sizes.chunks, per_group)]
    # Before the products: behind them, the stage is free.
    scales = [
        arithmetic.load(memory.scales.at[stage, part, group], ROWS, optimized=False)
        for group in range(sizes.groups)
    ]
    scaled = [
        each * per_row(scale.astype(jnp.float32), each.shape)
        for each, scale in zip(arithmetic.products(*groups), scales, strict=True)
    ]
    return functools.reduce(operator.add, scaled)
