"""SmoothQuant: moves outliers of activations into the weights.

Reference: Xiao et al. (arXiv:2211.10438).
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

_LEAST = 1e-5
"""Least magnitude of a factor, as in the paper's code."""


def smoothquant_factors(
    kernel: Float[Array, "K M"], largest: Float[Array, " K"], strength: float = 0.5
) -> Float[Array, " K"]:
    """Returns factors that make activations and weights as hard to round.

    Row k of the matrix is to be multiplied by factor k, and input k divided by it.

    Args:
        kernel: Matrix [K, M], the columns of all matrices that read the inputs.
        largest: Largest magnitude of each input, float[K].
        strength: Share of the outliers that goes into the weights, between 0 and 1.

    Returns:
        Factors float32[K]; 1 for an input that is always 0.

    Example:
        >>> kernel, largest = jnp.array([[1.0], [4.0]]), jnp.array([16.0, 4.0])
        >>> smoothquant_factors(kernel, largest).tolist()
        [4.0, 1.0]

    Reference:
        Xiao et al. (arXiv:2211.10438, equation 4).
    """
    weights = jnp.abs(kernel.astype(jnp.float32)).max(axis=1)
    largest = largest.astype(jnp.float32)
    factors = jnp.maximum(largest, _LEAST) ** strength
    factors /= jnp.maximum(weights, _LEAST) ** (1 - strength)
    is_dead = (largest == 0) | (weights == 0)
    return jnp.where(is_dead, 1.0, jnp.maximum(factors, _LEAST))
