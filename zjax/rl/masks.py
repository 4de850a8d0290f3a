"""Masked arrays: positions outside a mask reach neither values nor gradients."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def at_least_float32(x: Float[Array, "*S"]) -> Float[Array, "*S"]:
    """Casts every dtype but float64 to float32."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def masked(x: Float[Array, "*#S"], mask: Bool[Array, "*S"]) -> Float[Array, "*S"]:
    """Returns `x`, float32 or wider, with 0 outside the mask.

    A function must mask inputs, not outputs: the derivative of an exponential at NaN is
    NaN, and 0 times NaN is NaN.

    Example:
        >>> masked(jnp.array([[1.5, jnp.nan]]), jnp.array([[True, False]])).tolist()
        [[1.5, 0.0]]
    """
    return jnp.where(mask, at_least_float32(x), 0)


def mean_of_rows(
    x: Float[Array, "B L"], mask: Bool[Array, "B L"]
) -> Float[Array, "B 1"]:
    """Averages each row over the tokens of the mask; 0 for a row without tokens.

    Example:
        >>> x, mask = jnp.array([[1.0, 3.0, jnp.inf]]), jnp.array([[True, True, False]])
        >>> mean_of_rows(x, mask).tolist()
        [[2.0]]
    """
    count = jnp.maximum(mask.sum(1, keepdims=True), 1)
    return masked(x, mask).sum(1, keepdims=True) / count
