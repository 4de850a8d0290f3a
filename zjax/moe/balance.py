"""Balance of the load of experts: auxiliary losses, and a bias on router scores."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from zjax.moe.router import Routing, count_tokens


def balance_loss(
    routing: Routing, *, choices: int = 0, num_sequences: int = 1
) -> Float[Array, ""]:
    """Computes the load-balancing loss of a router, which is 1 for an even load.

    The loss is `E / k` times the sum over experts of (share of the scores) x (share of
    the tokens, dropped tokens included). Gradients flow through the scores alone.

    Args:
        routing: Routing of the tokens of a microbatch.
        choices: Number of choices of each token that count as load, 0 to K; 0 counts
            all choices, and 1 is the loss of GShard and Switch.
        num_sequences: Number of equal parts of the tokens, 1 or more; each part has a
            load, and the losses of the parts are averaged by tokens.

    Returns:
        Loss, float32[]; 0 if `chosen` counts no token.
    """
    num_experts = routing.scores.shape[1]
    choices = choices or routing.experts.shape[1]

    def losses(shares: jax.Array, experts: jax.Array, chosen: jax.Array) -> Any:
        """Returns the loss summed over the tokens, and the number of tokens."""
        used = chosen[:, 0].astype(jnp.float32)
        # Integer counts have no gradient: the loss pushes the scores alone.
        load = count_tokens(experts, chosen, num_experts).astype(jnp.float32)
        products = (used @ shares * load).sum()
        # At least 1, so that padding alone gives 0 and not 0 / 0.
        scale = num_experts / choices / jnp.maximum(used.sum(), 1)
        return scale * products, used.sum()

    arrays = routing.shares, routing.experts[:, :choices], routing.chosen[:, :choices]
    parts = [x.reshape(num_sequences, -1, x.shape[1]) for x in arrays]
    sums, num_tokens = jax.vmap(losses)(*parts)
    return sums.sum() / jnp.maximum(num_tokens.sum(), 1)


def z_loss(routing: Routing) -> Float[Array, ""]:
    """Averages the squared log-sum-exp of the router logits over the counted tokens."""
    used = routing.chosen[:, 0].astype(jnp.float32)
    squares = jax.nn.logsumexp(routing.logits, axis=1) ** 2
    return (used * squares).sum() / jnp.maximum(used.sum(), 1)


def move_bias(
    bias: Float[Array, "*layers E"], load: Int[Array, "*layers E"], rate: float
) -> Float[Array, "*layers E"]:
    """Lowers the bias of experts above the mean load and raises the bias below it.

    `load` counts the tokens that chose each expert in the global batch of a step. The
    mean of the bias over the experts stays, and all meshes give equal bits.
    """
    # The load is compared with its mean in integers, exactly, on any mesh.
    whole, part = jnp.divmod(load.sum(-1, keepdims=True), load.shape[-1])
    below = (load < whole) | ((load == whole) & (part > 0))
    direction = below.astype(jnp.int32) - (load > whole)
    # The barrier keeps a compiler from rounding the product and the sum at once.
    # Without the mean, the bias of all experts together would drift.
    centred = direction - direction.mean(-1, keepdims=True)
    return bias + jax.lax.optimization_barrier(rate * centred)
