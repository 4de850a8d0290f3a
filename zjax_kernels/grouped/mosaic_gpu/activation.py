"""Kernels of grouped products with a bias and an activation, forward and backward."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from zjax_kernels.grouped.mosaic_gpu import product
from zjax_kernels.grouped.mosaic_gpu.pipeline import CHUNK, TILE_ROWS
from zjax_kernels.grouped.reference import LIMIT, SLOPE, num_parts
from zjax_kernels.grouped.tuning import Tuning, choose_tuning

_SLOPE, _CUBE = 2 * math.sqrt(2 / math.pi), 0.044715
"""`gelu(x)` is `x * sigmoid(_SLOPE * (x + _CUBE * x**3))`: no `tanh`."""


def activate(activation: str, parts: Sequence[Array]) -> Array:
    """Applies an activation to float32 arrays: x, or the gates and values of SwiGLU."""
    x = parts[0]
    if activation == "relu":
        return jnp.maximum(x, 0.0)
    if activation == "gelu":
        return x * _gelu_share(x)
    if activation == "clamped_swiglu":
        x, factor = _at_most(x, LIMIT), 1.0 + _clipped(parts[1])
        return x * _sigmoid(SLOPE * x) * factor
    return x * _sigmoid(x) * parts[1]


def differentiate(
    activation: str, parts: Sequence[Array], cotangent: Array
) -> tuple[Array, tuple[Array, ...]]:
    """Returns the activation and the cotangents of the parts."""
    x = parts[0]
    if activation == "relu":
        return jnp.maximum(x, 0.0), (jnp.where(x > 0.0, cotangent, 0.0),)
    if activation == "gelu":
        share = _gelu_share(x)
        inner = _SLOPE * (1.0 + 3.0 * _CUBE * x * x)
        slope = share * (1.0 + x * (1.0 - share) * inner)
        return x * share, (cotangent * slope,)
    if activation == "clamped_swiglu":
        return _differentiate_clamped(x, parts[1], cotangent)
    share = _sigmoid(x)
    silu, slope = x * share, share * (1.0 + x * (1.0 - share))
    return silu * parts[1], (cotangent * parts[1] * slope, cotangent * silu)


def _differentiate_clamped(
    gate: Array, value: Array, cotangent: Array
) -> tuple[Array, tuple[Array, ...]]:
    """Returns clamped SwiGLU, and cotangents of gate and value: 0 where clamped."""
    x, factor = _at_most(gate, LIMIT), 1.0 + _clipped(value)
    share = _sigmoid(SLOPE * x)
    silu, slope = x * share, share * (1.0 + SLOPE * x * (1.0 - share))
    of_gate = jnp.where(gate < LIMIT, cotangent * factor * slope, 0.0)
    of_value = jnp.where(value < LIMIT, cotangent * silu, 0.0)
    of_value = jnp.where(value > -LIMIT, of_value, 0.0)
    return silu * factor, (of_gate, of_value)


def _clipped(value: Array) -> Array:
    return jnp.maximum(_at_most(value, LIMIT), -LIMIT)


def _at_most(x: Array, bound: float) -> Array:
    """Returns the smaller of an array and a bound, and NaN where the array is NaN."""
    # NaN is not above the bound; `x < bound` would replace NaN by the bound.
    return jnp.where(x > bound, bound, x)


def _gelu_share(x: Array) -> Array:
    return _sigmoid(_SLOPE * (x + _CUBE * x * x * x))


def _sigmoid(x: Array) -> Array:
    # 1 / (1 + exp(-x)): rsqrt is one instruction, a division is many.
    root = lax.rsqrt(1.0 + jnp.exp(-x))
    return root * root


def grouped_matmul(
    x: Array,
    weights: Array,
    sizes: Array,
    bias: Array | None = None,
    *,
    transpose: bool = False,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> Array:
    """Runs `reference.grouped_matmul` for 16-bit arrays, K and N multiples of 64."""
    kernel = "transposed" if transpose else "matmul"
    return grouped_activation(
        x,
        weights,
        sizes,
        bias,
        activation=None,
        transpose=transpose,
        saves=False,
        tuning=tuning or choose_tuning(kernel, *weights.shape),
        interpret=interpret,
    )[0]


def grouped_activation(
    x: Array,
    weights: Array,
    sizes: Array,
    bias: Array | None = None,
    *,
    activation: str | None,
    transpose: bool = False,
    saves: bool = True,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> tuple[Array, ...]:
    """Runs `reference.grouped_activation` for 16 bits, K and F multiples of 64.

    Without an activation the result is the product.
    """
    tuning = tuning or choose_tuning("activation", *weights.shape)
    parts, dtype = num_parts(activation) if activation else 1, x.dtype
    columns = weights.shape[1 if transpose else 2] // parts

    def store(half: product.HalfTile) -> None:
        *saved, activated = half.refs.outputs
        # Rounded first: the backward pass differentiates at the saved 16-bit numbers.
        sums = [each.astype(dtype) for each in _add_bias(half)]
        for start in half.starts:
            chunks = [each[:, start : start + CHUNK] for each in sums]
            for output in saved:
                for part, chunk in enumerate(chunks):
                    half.store(output, part * columns + start, chunk)
            result = chunks[0]
            if activation:
                wide = activate(activation, [x.astype(jnp.float32) for x in chunks])
                result = wide.astype(dtype)
            half.store(activated, start, result)

    widths = [parts * columns] * saves + [columns]
    epilogue = product.Epilogue(
        store,
        [jax.ShapeDtypeStruct((len(x), width), dtype) for width in widths],
        num_stores=parts * saves + 1,
        # The bias of rows without a group is 0.
        inputs=() if bias is None else (jnp.pad(bias, ((0, 1), (0, 0))),),
        num_parts=parts,
    )
    return product.multiply(
        x,
        weights,
        sizes,
        epilogue,
        transpose=transpose,
        tuning=tuning,
        interpret=interpret,
    )


def _add_bias(half: product.HalfTile) -> list[Array]:
    """Returns the sums of each part, plus the bias, if any."""
    if not half.refs.inputs:
        return list(half.sums)
    (bias,) = half.refs.inputs
    return [total + half.load_columns(bias, i) for i, total in enumerate(half.sums)]


def grouped_activation_backward(
    cotangent: Array,
    weights: Array,
    sizes: Array,
    inputs: Array,
    scale: Array,
    *,
    activation: str,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> tuple[Array, Array, Array]:
    """Runs `reference.grouped_activation_backward`; 16 bits, K, F multiples of 64."""
    tuning = tuning or choose_tuning("activation_backward", *weights.shape)
    (num_rows, _), columns, dtype = cotangent.shape, weights.shape[1], inputs.dtype
    parts = num_parts(activation)

    def store(half: product.HalfTile) -> None:
        gradients, scaled, products = half.refs.outputs
        scales = half.load_rows(half.refs.inputs[1])
        total = jnp.float32(0.0)
        for number, start in enumerate(half.starts):
            chunk = half.sums[0][:, start : start + CHUNK]
            # In the order in which the producer copies: by chunk, then by part.
            read = [half.read(number * parts + part) for part in range(parts)]
            activated, found = differentiate(
                activation, [x.astype(jnp.float32) for x in read], chunk * scales
            )
            # The cotangent of `scale` is of the product before scaling.
            total = total + (activated * chunk).sum(axis=1)
            for part, each in enumerate(found):
                half.store(gradients, part * columns + start, each.astype(dtype))
            half.store(scaled, start, (activated * scales).astype(dtype))
        half.store_rows(products, total)

    sums = (
        product.tile_columns(tuning, columns, 1),
        product.num_tiles(num_rows, len(sizes)),
        TILE_ROWS,
    )
    epilogue = product.Epilogue(
        store,
        [
            jax.ShapeDtypeStruct(inputs.shape, dtype),
            jax.ShapeDtypeStruct((num_rows, columns), dtype),
            jax.ShapeDtypeStruct(sums, jnp.float32),
        ],
        num_stores=parts + 1,
        # Padded, as the tile of the last rows may reach beyond the end.
        inputs=(inputs, jnp.pad(scale, (0, TILE_ROWS))),
        num_reads=parts,
        sums_rows=True,
    )
    gradients, scaled, products = product.multiply(
        cotangent,
        weights,
        sizes,
        epilogue,
        transpose=True,
        tuning=tuning,
        interpret=interpret,
    )
    # Tiles side by side store sums apart: atomics would add in any order.
    return gradients, scaled, product.values_of_rows(products.sum(0), sizes, num_rows)
