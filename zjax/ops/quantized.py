"""Matrices of int8 or int4 codes, with a scale for each block of inputs of an output.

A matrix is dequantised where it is multiplied, and again in the backward pass; between
the two no dequantised copy exists. Qwix rounds and dequantises.

References: QLoRA (Dettmers et al., arXiv:2305.14314), whose 4-bit codes are others;
github.com/google/qwix.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from zjax.errors import check_installed


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
