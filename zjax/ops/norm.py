"""Normalisation over the last dim, computed in float32 whatever the input.

The backward pass is written out: it keeps two numbers per token besides the input, and
reads the input once for each of its two kinds of sum. Forward-mode differentiation is
not defined.
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

STATISTICS = "norm_statistics"
"""Name of the mean and the inverse deviation of each token, for `jax.checkpoint`."""


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
    return _normalize(eps, True, x, scale, bias)


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
    return _normalize(eps, False, x, scale, None)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _normalize(eps, centre, x, scale, bias):
    return _forward(eps, centre, x, scale, bias)[0]


def _forward(eps, centre, x, scale, bias):
    wide = x.astype(jnp.float32)
    mean = wide.mean(-1, keepdims=True) if centre else jnp.zeros_like(wide[..., :1])
    statistics = mean, jax.lax.rsqrt(_variance(wide, mean, x.dtype) + eps)
    statistics = checkpoint_name(statistics, STATISTICS)
    scaled = _normal(x, statistics) * _wide(scale, x.ndim)
    shifted = scaled if bias is None else scaled + _wide(bias, x.ndim)
    return shifted.astype(x.dtype), (x, statistics, scale, bias)


def _backward(eps, centre, residuals, gradient):
    x, statistics, scale, bias = residuals
    normal = _normal(x, statistics)
    wide = gradient.astype(jnp.float32)
    tokens = tuple(range(x.ndim - 1))
    scaled = wide * _wide(scale, x.ndim)
    along = normal * (scaled * normal).mean(-1, keepdims=True)
    offset = scaled.mean(-1, keepdims=True) if centre else 0.0
    return (
        ((scaled - offset - along) * statistics[1]).astype(x.dtype),
        (wide * normal).sum(tokens).astype(scale.dtype),
        None if bias is None else wide.sum(tokens).astype(bias.dtype),
    )


_normalize.defvjp(_forward, _backward)


def _variance(wide, mean, dtype):
    if dtype == jnp.float32:
        return jnp.square(wide - mean).mean(-1, keepdims=True)
    # Both sums from one reading. They only cancel where the mean is so large that a
    # narrow input has no digits left for the deviation either.
    difference = jnp.square(wide).mean(-1, keepdims=True) - jnp.square(mean)
    return jnp.maximum(difference, 0.0)


def _normal(x, statistics):
    mean, inverse_deviation = statistics
    return (x.astype(jnp.float32) - mean) * inverse_deviation


def _wide(vector, num_dims):
    return vector.astype(jnp.float32).reshape((1,) * (num_dims - 1) + vector.shape)
