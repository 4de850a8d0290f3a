"""Normalisation over the last dim by any backend's compiler."""

import jax
import jax.numpy as jnp
from jax import Array


def forward(
    x: Array, scale: Array, bias: Array | None, *, eps: float, centre: bool
) -> tuple[Array, Array, Array]:
    """Normalises, scales and shifts each row.

    Args:
        x: [..., C], any floating dtype.
        scale: [C] factor per channel.
        bias: [C] offset per channel, or none.
        eps: Added to the variance.
        centre: Whether the mean is taken off.

    Returns:
        [..., C] in the dtype of `x`, and the mean (0 where it is not taken off) and the
        inverse deviation of each row, float32[..., 1].
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
    """Gradients of the input, the scale and the bias.

    Args:
        x: [..., C] as it was given to `forward`.
        mean: float32[..., 1] of `forward`.
        inverse: float32[..., 1] of `forward`.
        scale: [C] factor per channel.
        d_out: [..., C] gradient of the result.
        centre: As in `forward`.

    Returns:
        [..., C] in the dtype of `x`, float32[C], and float32[C] again, or none
        where the mean is not taken off.
    """
    normal = _normal(x, mean, inverse)
    wide = d_out.astype(jnp.float32)
    scaled = wide * _wide(scale, x.ndim)
    along = normal * (scaled * normal).mean(-1, keepdims=True)
    offset = scaled.mean(-1, keepdims=True) if centre else 0.0
    rows = tuple(range(x.ndim - 1))
    return (
        ((scaled - offset - along) * inverse).astype(x.dtype),
        (wide * normal).sum(rows),
        wide.sum(rows) if centre else None,
    )


def _variance(wide, mean, dtype):
    if dtype != jnp.bfloat16:
        return jnp.square(wide - mean).mean(-1, keepdims=True)
    # Both sums from one reading. They only cancel where the mean is so large that so
    # narrow an input has no digits left for the deviation either.
    difference = jnp.square(wide).mean(-1, keepdims=True) - jnp.square(mean)
    return jnp.maximum(difference, 0.0)


def _normal(x, mean, inverse):
    return (x.astype(jnp.float32) - mean) * inverse


def _wide(vector, num_dims):
    return vector.astype(jnp.float32).reshape((1,) * (num_dims - 1) + vector.shape)
