"""Even load of experts: by losses of the router, or by a bias on its scores."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from zjax.moe.router import Routing, count_tokens


def balance_loss(
    routing: Routing, *, choices: int = 0, num_sequences: int = 1
) -> Float[Array, ""]:
    """Compares the load of the experts with an even one, for which it is 1.

    It is `E / k` times the sum over experts of (their share of the scores) x (their
    share of the tokens, dropped ones included). Only the scores have a gradient.

    Args:
        routing: Routing of the tokens of a microbatch.
        choices: How many choices of each token count as load; 0 counts all of them,
            and 1 is the loss of GShard and Switch.
        num_sequences: Number of equal parts of the tokens; each has its own load, and
            their losses are averaged by their tokens.

    Returns:
        A scalar; 0 where no token counts.

    Example:
        >>> from zjax.moe.router import Router, route
        >>> even = route(jnp.eye(4), Router(num_experts=4))
        >>> round(float(balance_loss(even)), 6)
        1.0
    """
    num_experts = routing.scores.shape[1]
    choices = choices or routing.experts.shape[1]

    def losses(shares: jax.Array, experts: jax.Array, chosen: jax.Array) -> Any:
        """The sum over the tokens of a sequence, and their number."""
        used = chosen[:, 0].astype(jnp.float32)
        load = count_tokens(experts, chosen, num_experts).astype(jnp.float32)
        products = (used @ shares * load).sum()
        scale = num_experts / choices / jnp.maximum(used.sum(), 1)
        return scale * products, used.sum()

    arrays = routing.shares, routing.experts[:, :choices], routing.chosen[:, :choices]
    parts = [x.reshape(num_sequences, -1, x.shape[1]) for x in arrays]
    sums, num_tokens = jax.vmap(losses)(*parts)
    return sums.sum() / jnp.maximum(num_tokens.sum(), 1)


def z_loss(routing: Routing) -> Float[Array, ""]:
    """Averages the squared log-sum-exp of the logits over the tokens that count.

    Example:
        >>> from zjax.moe.router import Router, route
        >>> routing = route(jnp.zeros((2, 4)), Router(num_experts=4))
        >>> round(float(z_loss(routing)), 4)  # log(4) ** 2
        1.9218
    """
    used = routing.chosen[:, 0].astype(jnp.float32)
    squares = jax.nn.logsumexp(routing.logits, axis=1) ** 2
    return (used * squares).sum() / jnp.maximum(used.sum(), 1)


def move_bias(
    bias: Float[Array, "*layers E"], load: Int[Array, "*layers E"], rate: float
) -> Float[Array, "*layers E"]:
    """Lowers the bias of experts with more tokens than the mean, raises the others'.

    The result is the same bit for bit wherever the arrays are: sums are of integers.

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
