"""Normalisation over the last dim, computed in float32 whatever the input."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def layer_norm(
    x: Float[Array, "*dims M"],
    scale: Float[Array, " M"],
    bias: Float[Array, " M"] | None = None,
    *,
    eps: float = 1e-5,
) -> Float[Array, "*dims M"]:
    """Subtracts the mean and divides by the standard deviation.

    Args:
        x: Activations, any floating dtype.
        scale: Factor per channel.
        bias: Offset per channel, or none.
        eps: Added to the variance, above 0.

    Returns:
        Normalised activations in the dtype of `x`.

    Example:
        >>> x = jnp.array([[-3.0, 3.0]])
        >>> layer_norm(x, jnp.ones(2)).round(3).tolist()
        [[-1.0, 1.0]]

    Reference:
        Ba et al., Layer Normalization (arXiv:1607.06450).
    """
    centred = x.astype(jnp.float32)
    centred -= centred.mean(-1, keepdims=True)
    normal = centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + eps)
    return _scale_and_shift(normal, scale, bias).astype(x.dtype)


def rms_norm(
    x: Float[Array, "*dims M"],
    scale: Float[Array, " M"],
    *,
    eps: float = 1e-5,
) -> Float[Array, "*dims M"]:
    """Divides by the root mean square.

    Args:
        x: Activations, any floating dtype.
        scale: Factor per channel.
        eps: Added to the mean square, above 0.

    Returns:
        Normalised activations in the dtype of `x`.

    Example:
        >>> rms_norm(jnp.array([[3.0, 3.0]]), jnp.ones(2)).round(3).tolist()
        [[1.0, 1.0]]

    Reference:
        Zhang and Sennrich (arXiv:1910.07467).
    """
    wide = x.astype(jnp.float32)
    normal = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + eps)
    return _scale_and_shift(normal, scale, None).astype(x.dtype)


def _scale_and_shift(normal, scale, bias):
    shape = (1,) * (normal.ndim - 1) + scale.shape
    scaled = normal * scale.astype(jnp.float32).reshape(shape)
    return scaled if bias is None else scaled + bias.astype(jnp.float32).reshape(shape)
