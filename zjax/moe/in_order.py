"""Experts whose sum for a token has one order, whatever the tokens beside it choose.

All experts multiply all tokens, and a token has weight 0 for experts that it did not
choose: a specification, not a fast form. Gradients are computed by `apply_experts`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from zjax.moe.experts import Activation, Experts, apply_experts
from zjax.moe.router import Routing
from zjax.ops import invariant, invariant_layers
from zjax_kernels.grouped.reference import num_parts


def apply_experts_in_order(
    x: Float[Array, "T M"],
    experts: Experts,
    routing: Routing,
    *,
    activation: Activation = "swiglu",
) -> Float[Array, "T M"]:
    """Adds up the outputs of each token's experts, in the order of the experts.

    Arguments are as for `apply_experts`; no axis of a mesh splits the experts.
    """

    def plain(x: jax.Array, experts: Any, weights: jax.Array, routing: Any) -> Any:
        routing = dataclasses.replace(routing, weights=weights)
        return apply_experts(x, experts, routing, activation=activation)

    def compute(x: jax.Array, experts: Any, weights: jax.Array, routing: Any) -> Any:
        weights = jnp.where(routing.kept, weights, 0)

        def add(sums: jax.Array, each: Any) -> tuple[jax.Array, None]:
            number, expert = each
            is_chosen = routing.experts == number
            own = invariant.total(jnp.where(is_chosen, weights, 0))
            outputs = _apply(x, expert, activation)
            return sums + invariant.product(outputs, own[:, None]), None

        numbers = jnp.arange(len(experts.up), dtype=routing.experts.dtype)
        zeros = jnp.zeros(x.shape, jnp.float32)
        sums, _ = jax.lax.scan(add, zeros, (numbers, experts))
        return invariant.round_to(sums, x.dtype)

    run = invariant.with_gradient_of(plain, compute)
    return run(x, experts, routing.weights, others=(routing,))


def _apply(x: jax.Array, expert: Experts, activation: Activation) -> jax.Array:
    """Applies one expert to all tokens: float32[T, M]."""
    hidden = invariant_layers.sum_products(x, expert.up)
    if expert.up_bias is not None:
        hidden += expert.up_bias.astype(jnp.float32)[None]
    parts = jnp.split(hidden, num_parts(activation), axis=1)
    hidden = invariant_layers.activate(activation, *parts)
    hidden = invariant.round_to(hidden, x.dtype)
    outputs = invariant_layers.sum_products(hidden, expert.down)
    if expert.down_bias is not None:
        outputs += expert.down_bias.astype(jnp.float32)[None]
    return outputs
