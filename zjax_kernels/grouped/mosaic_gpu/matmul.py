"""Kernel of grouped products, plus a bias."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from zjax_kernels.grouped.mosaic_gpu.pipeline import CHUNK
from zjax_kernels.grouped.mosaic_gpu.product import Epilogue, HalfTile, multiply
from zjax_kernels.grouped.tuning import Tuning, choose_tuning


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
    tuning = tuning or choose_tuning(kernel, *weights.shape)
    columns = weights.shape[1 if transpose else 2]

    def store(half: HalfTile) -> None:
        (output,), (result,) = half.refs.outputs, add_bias(half)
        result = result.astype(x.dtype)
        for start in half.starts:
            half.store(output, start, result[:, start : start + CHUNK])

    output = jax.ShapeDtypeStruct((len(x), columns), x.dtype)
    epilogue = Epilogue(store, [output], num_stores=1, inputs=bias_inputs(bias))
    return multiply(
        x,
        weights,
        sizes,
        epilogue,
        transpose=transpose,
        tuning=tuning,
        interpret=interpret,
    )[0]


def bias_inputs(bias: Array | None) -> tuple[Array, ...]:
    """Returns the bias, with 0 for rows without a group, as an input of an epilogue."""
    return () if bias is None else (jnp.pad(bias, ((0, 1), (0, 0))),)


def add_bias(half: HalfTile) -> list[Array]:
    """Returns the sums of each part, plus the bias from `bias_inputs`, if any."""
    if not half.refs.inputs:
        return list(half.sums)
    (bias,) = half.refs.inputs
    return [total + half.load_columns(bias, i) for i, total in enumerate(half.sums)]
