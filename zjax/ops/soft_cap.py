"""Scores and logits bounded by a tanh.

Reference: Gemma 2 (arXiv:2408.00118, section 2).
"""

import jax.numpy as jnp
from jaxtyping import Array, Float


def soft_cap(x: Float[Array, "*dims"], cap: float) -> Float[Array, "*dims"]:
    """`cap * tanh(x / cap)`; `x` itself for a cap of 0.

    Example:
        >>> soft_cap(jnp.array([1e6]), 30.0).tolist()
        [30.0]
    """
    return cap * jnp.tanh(x / cap) if cap else x
