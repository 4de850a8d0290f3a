"""Even load without a loss: a bias on the scores, moved after each optimizer step.

Reference: Wang et al., arXiv:2408.15664, algorithm 1.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float


def move_bias(
    bias: Float[Array, "*layers E"], load: Float[Array, "*layers E"], rate: float
) -> Float[Array, "*layers E"]:
    """Lowers the bias of experts with more tokens than the mean, raises the others'.

    Args:
        bias: Bias of each expert, float32.
        load: Tokens that chose each expert in the global batch of a step.
        rate: Step size, 0 or more.

    Returns:
        The next bias, whose mean over the experts is 0.

    Example:
        >>> move_bias(jnp.zeros(3), jnp.array([4.0, 2.0, 0.0]), 0.5).tolist()
        [-0.5, 0.0, 0.5]
    """
    moved = bias + rate * jnp.sign(load.mean(-1, keepdims=True) - load)
    return moved - moved.mean(-1, keepdims=True)
