"""Layer norm and RMS norm in jax.numpy; limits of the rows that the kernels take."""

import jax
import jax.numpy as jnp
from jax import Array

THREADS = 128
"""Threads of a warpgroup; the kernels take multiples of so many channels."""
MAX_CHANNELS = 32 * THREADS
"""Largest row whose values and sums fit in registers."""


def forward(
    x: Array, scale: Array, bias: Array | None, *, eps: float, centre: bool
) -> tuple[Array, Array, Array]:
    """Normalises, scales and shifts each row of x [..., C], of any floating dtype.

    Returns [..., C] in the dtype of `x`, and mean (0 without `centre`) and inverse
    deviation of each row, float32[..., 1].
    """
    wide = x.astype(jnp.float32)
    mean = wide.mean(-1, keepdims=True) if centre else jnp.zeros_like(wide[..., :1])
    inverse = jax.lax.rsqrt(_variance(wide, mean, x.dtype) + eps)
    scaled = _normal(x, mean, inverse) * _wide(scale, x.ndim)
    shifted = scaled if bias is None else scaled + _wide(bias, x.ndim)
    return shifted.astype(x.dtype), mean, inverse


def backward(
    x: Array, mean: Array, inverse: Array, scale: Array, d_out: Array, *, centre: bool
) -> tuple[Array, Array, Array | None]:
    """Returns gradients of input, scale and bias (None for the bias without `centre`).

    `mean` and `inverse`, float32[..., 1], come from `forward`; `d_out` is the cotangent
    of the output.
    """
    normal = _normal(x, mean, inverse)
    wide = d_out.astype(jnp.float32)
    scaled = wide * _wide(scale, x.ndim)
    projection = normal * (scaled * normal).mean(-1, keepdims=True)
    offset = scaled.mean(-1, keepdims=True) if centre else 0.0
    rows = tuple(range(x.ndim - 1))
    return (
        ((scaled - offset - projection) * inverse).astype(x.dtype),
        (wide * normal).sum(rows),
        wide.sum(rows) if centre else None,
    )


def _variance(wide, mean, dtype):
    """Returns the variance of each row, float32[..., 1]."""
    if dtype != jnp.bfloat16:
        return jnp.square(wide - mean).mean(-1, keepdims=True)
    # One pass over x for both sums, which cancel only where the mean is so large that
    # bfloat16 input has lost the deviation already.
    difference = jnp.square(wide).mean(-1, keepdims=True) - jnp.square(mean)
    # Rounding may leave a difference below 0, whose root is NaN.
    return jnp.maximum(difference, 0.0)


def _normal(x, mean, inverse):
    return (x.astype(jnp.float32) - mean) * inverse


def _wide(vector, num_dims):
    return vector.astype(jnp.float32).reshape((1,) * (num_dims - 1) + vector.shape)
