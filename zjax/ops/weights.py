"""Forms of weights that runs and checkpoints share, for arrays of JAX and of NumPy."""

import functools
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from zjax.errors import check_installed


def low_bits(x: Any) -> Any:
    """Distance of float32 weights from their bfloat16 rounding, in steps: int16[...].

    A weight half-way between two bfloat16 numbers may be restored one step off; all
    other weights are restored exactly. Takes and returns arrays of JAX or NumPy.
    """
    # Neighbouring floats of one sign have adjacent bit patterns.
    difference = x.view(np.int32) - _as_float32(x.astype(jnp.bfloat16)).view(np.int32)
    # Half-way weights lie 2**15 steps off, one more than int16 holds.
    return difference.clip(-(2**15), 2**15 - 1).astype(np.int16)


def join_bits(high: Any, low: Any) -> Any:
    """Restores float32[...] weights from bfloat16 and the int16 of `low_bits`."""
    bits = _as_float32(high).view(np.int32) + low.astype(np.int32)
    return bits.view(np.float32)


def _as_float32(high: Any) -> Any:
    """Widens bfloat16 by bits: a compiler may remove a pair of dtype conversions."""
    bits = high.view(np.uint16).astype(np.uint32) << 16
    return bits.view(np.float32)


def column_lengths(squares: Any, numpy: ModuleType = np) -> Any:
    """Turns sums of squares of columns into the lengths that DoRA divides by.

    A column of zeros, as of a padded vocabulary, gets the smallest positive length.

    Example:
        >>> column_lengths(np.float32([0, 9])).tolist()
        [1.0842021724855044e-19, 3.0]
    """
    # Not 0, by which the column's magnitude of 0 would be divided.
    return numpy.sqrt(numpy.maximum(squares, np.finfo(np.float32).tiny))


def quantize(kernel: Array, dim: int, block_size: int, dtype: str) -> Any:
    """Rounds a matrix to codes times scales; the largest value maps to the last code.

    Blocks of `block_size`, which divides dim `dim`, share a float32 scale. `dtype` is
    `int8` or `int4`.
    """
    check_installed("qwix")
    import qwix  # pyright: ignore[reportMissingImports]

    last = int(jnp.iinfo(dtype).max)
    # By itself Qwix maps the largest value to last + 1/2, where rounding may overflow.
    found = qwix.quantize(
        kernel.astype(jnp.float32),
        jnp.dtype(dtype),
        channelwise_axes=[other for other in range(kernel.ndim) if other != dim],
        tiled_axes={dim: block_size},
        calibration_method=f"absmax,{(last + 0.5) / last}",
    )
    return found.qvalue, found.scale


def dequantize(codes: Array, scales: Array) -> Array:
    """Multiplies codes by scales into a matrix in the dtype of the scales."""
    check_installed("qwix")
    import qwix  # pyright: ignore[reportMissingImports]

    return qwix.dequantize(qwix.QArray(codes, scales))


def multiply(
    x: Float[Array, "..."], codes: Array, scales: Array, num_inputs: int
) -> Float[Array, "..."]:
    """Multiplies activations by a matrix of codes, which gets no gradient.

    Codes have `num_inputs` input dims, then one output dim; blocks of scales lie along
    the last input dim.
    """
    return _multiply(x, codes, scales, num_inputs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _multiply(x: Array, codes: Array, scales: Array, num_inputs: int) -> Any:
    return jnp.tensordot(x, dequantize(codes, scales), num_inputs)


def _forward(x: Array, codes: Array, scales: Array, num_inputs: int) -> Any:
    return _multiply(x, codes, scales, num_inputs), (codes, scales)


def _backward(num_inputs: int, saved: Any, cotangent: Array) -> Any:
    """Multiplies the cotangent by the matrix, dequantised again."""
    # Otherwise the compiler dequantises once, and holds the matrix until here.
    (codes, scales), cotangent = jax.lax.optimization_barrier((saved, cotangent))
    kernel = dequantize(codes, scales)
    dims = (cotangent.ndim - 1,), (num_inputs,)
    return jax.lax.dot_general(cotangent, kernel, (dims, ((), ()))), None, None


_multiply.defvjp(_forward, _backward)
