"""Even load without a loss: a bias on the scores, moved after each optimizer step.

Reference: Wang et al., arXiv:2408.15664, algorithm 1.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def move_bias(
    bias: Float[Array, "*layers E"], load: Int[Array, "*layers E"], rate: float
) -> Float[Array, "*layers E"]:
    """Lowers the bias of experts with more tokens than the mean, raises the others'.

    The result is the same bit for bit wherever the arrays are: sums are of integers.

    Args:
        bias: Bias of each expert, float32.
        load: Tokens that chose each expert in the global batch of a step.
        rate: Step size, 0 or more.

    Returns:
        The next bias. Its mean over the experts is that of `bias`.

    Example:
        >>> move_bias(jnp.zeros(3), jnp.array([4, 2, 0]), 0.5).tolist()
        [-0.5, 0.0, 0.5]
    """
    whole, part = jnp.divmod(load.sum(-1, keepdims=True), load.shape[-1])
    below = (load < whole) | ((load == whole) & (part > 0))
    direction = below.astype(jnp.int32) - (load > whole)
    # The barrier keeps a compiler from rounding the product and the sum at once.
    centred = direction - direction.mean(-1, keepdims=True)
    return bias + jax.lax.optimization_barrier(rate * centred)
