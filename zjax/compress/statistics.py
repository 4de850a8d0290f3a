"""Statistics of the inputs of a matrix, added up over tokens."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped


class Statistics(NamedTuple):
    """Second moments and magnitudes of the inputs of a matrix, in float32.

    Means, not sums, so that float32 holds them for any number of tokens.
    """

    hessian: Float[Array, "K K"]
    """Mean of 2 x x^T: the Hessian of the squared error of an output."""
    mean: Float[Array, " K"]
    """Mean of |x|."""
    largest: Float[Array, " K"]
    """Largest |x|."""
    num_tokens: Float[Array, ""]
    """Number of tokens."""


def empty(num_inputs: int) -> Statistics:
    """Returns the statistics of no token.

    Example:
        >>> empty(3).hessian.shape
        (3, 3)
    """
    shapes = (num_inputs, num_inputs), (num_inputs,), (num_inputs,), ()
    # An array each, as programs that add tokens reuse their memory.
    return Statistics(*(jnp.zeros(shape, jnp.float32) for shape in shapes))


def add_tokens(
    found: Statistics,
    x: Float[Array, "T K"],
    mask: Shaped[Array, " T"] | None = None,
) -> Statistics:
    """Adds tokens to statistics.

    Args:
        found: Statistics so far.
        x: Inputs of a matrix, a token a row, in the dtype of the model.
        mask: True or 1 for tokens that count; None counts all.

    Returns:
        Statistics of the earlier and the new tokens.

    Example:
        >>> both = add_tokens(empty(2), jnp.array([[1.0, 0.0], [3.0, -2.0]]))
        >>> both.hessian.tolist(), both.mean.tolist(), both.largest.tolist()
        ([[10.0, -6.0], [-6.0, 4.0]], [2.0, 1.0], [3.0, 2.0])
    """
    number = jnp.float32(len(x))
    if mask is not None:
        # A product with 0 would keep NaN of padding.
        x = jnp.where(mask[:, None] > 0, x, jnp.zeros_like(x))
        number = mask.astype(jnp.float32).sum()
    # Products of 16-bit inputs are exact in float32, also on tensor cores.
    gram = jnp.einsum(
        "tk,tl->kl",
        *(x, x),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    magnitudes = jnp.abs(x.astype(jnp.float32))
    count = found.num_tokens + number
    before = found.num_tokens / jnp.maximum(count, 1)
    share = 1 / jnp.maximum(count, 1)
    return Statistics(
        found.hessian * before + 2 * share * gram,
        found.mean * before + share * magnitudes.sum(0),
        jnp.maximum(found.largest, magnitudes.max(0, initial=0.0)),
        count,
    )


def output_error(
    difference: Float[Array, "K M"], hessian: Float[Array, "K K"]
) -> Float[Array, ""]:
    """Computes the mean squared error of the outputs of a changed matrix.

    Args:
        difference: Change of the matrix.
        hessian: Mean of 2 x x^T over the tokens.

    Returns:
        Mean over tokens of |x difference|^2, summed over the outputs.

    Example:
        >>> float(output_error(jnp.array([[3.0], [0.0]]), 2 * jnp.eye(2)))
        9.0
    """
    product = jnp.matmul(hessian, difference, precision=jax.lax.Precision.HIGHEST)
    return jnp.sum(difference * product) / 2
