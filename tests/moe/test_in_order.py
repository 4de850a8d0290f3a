"""Experts whose sums have one order are the usual experts, with the usual gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zjax.moe.experts import Experts, apply_experts
from zjax.moe.in_order import apply_experts_in_order
from zjax.moe.router import Router, route, router_logits

RNG = np.random.default_rng(0)


def draw(*shape):
    return jnp.asarray(0.5 * RNG.normal(size=shape), jnp.float32)


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_values_and_gradients_are_those_of_the_usual_experts(scores):
    """With padding, of which no expert computes anything."""
    x, kernel = draw(7, 6), draw(6, 5)
    experts = Experts(draw(5, 6, 8), draw(5, 4, 6), draw(5, 8), draw(5, 6))
    counts = jnp.arange(7) != 3
    router = {"num_experts": 5, "top_k": 3, "scores": scores, "scale": 1.5}

    @functools.partial(jax.jit, static_argnums=0)
    def both(in_order, x, kernel, experts):
        def loss(x, kernel, experts):
            settings = Router(**router, invariant=in_order)
            logits = router_logits(x, kernel, invariant=in_order)
            routing = route(logits, settings, counts=counts)
            apply = apply_experts_in_order if in_order else apply_experts
            y = apply(x, experts, routing, activation="swiglu")
            return (y * jnp.cos(jnp.arange(y.size).reshape(y.shape))).sum(), y

        return jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(x, kernel, experts)

    found, wanted = (both(in_order, x, kernel, experts) for in_order in (True, False))
    assert not np.asarray(found[1])[3].any()
    compare = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(compare, found, wanted)
