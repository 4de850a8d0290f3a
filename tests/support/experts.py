"""A small mixture of experts as plain functions, and batches for it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from zjax.moe.balance import balance_loss
from zjax.moe.experts import Experts, apply_experts
from zjax.moe.router import Router, route
from zjax.typing import Loss, Model

EXPERTS, WIDTH, HIDDEN, TOKENS, DEVICES = 8, 6, 4, 64, 8
DROPLESS = Router(num_experts=EXPERTS, top_k=2)
CAPACITY = dataclasses.replace(DROPLESS, drop="position", min_capacity=3)
"""At most 3 of the 8 tokens of a device per expert, so that some are dropped."""
LOGICAL = {
    "dense": ("embed", None),
    "router": ("embed", None),
    "up": ("experts", "embed", None),
    "down": ("experts", "mlp", "embed"),
    "up_bias": ("experts", None),
    "down_bias": ("experts", "embed"),
}


def init(key):
    shapes = {
        "dense": (WIDTH, WIDTH),
        "router": (WIDTH, EXPERTS),
        "up": (EXPERTS, WIDTH, 2 * HIDDEN),
        "down": (EXPERTS, HIDDEN, WIDTH),
        "up_bias": (EXPERTS, 2 * HIDDEN),
        "down_bias": (EXPERTS, WIDTH),
    }
    keys = jax.random.split(key, len(shapes))
    pairs = zip(keys, shapes.items(), strict=True)
    return {name: 0.5 * jax.random.normal(k, shape) for k, (name, shape) in pairs}


def make_model(router=DROPLESS, num_groups=1, *, separable=True):
    """A dense layer, and experts that are routed to in groups of adjacent tokens.

    Args:
        router: Settings.
        num_groups: Groups of the tokens of a device.
        separable: Whether the loss says that devices may differentiate their rows.
    """

    def loss_of(params, x, y):
        x = jnp.tanh(x @ params["dense"])
        routing = route(x @ params["router"], router)
        names = "up", "down", "up_bias", "down_bias"
        out = apply_experts(x, Experts(*(params[name] for name in names)), routing)
        return jnp.mean((x + out - y) ** 2) + 0.01 * balance_loss(routing)

    def loss(params, model_state, batch, key):
        rows = batch["x"], batch["y"]
        if num_groups == 1:
            value = loss_of(params, *rows)
        else:  # one program for all of them
            groups = [jnp.stack(jnp.split(x, num_groups)) for x in rows]
            value = jax.lax.map(lambda group: loss_of(params, *group), groups).mean()
        return Loss(value, batch["weight"].sum(), model_state, {})

    return Model(
        init=lambda key: (init(key), {}),
        loss=loss,
        bind=lambda params, model_state: None,
        logical=lambda params: LOGICAL,
        separable=separable,
    )


def make_batch(step):
    rng = np.random.default_rng(step)
    x, y = rng.normal(size=(2, TOKENS, WIDTH)).astype(np.float32)
    return {"x": x, "y": y, "weight": np.ones(TOKENS, np.float32)}


def outcomes(by_token, x, cotangent, experts, logits, router, **settings):
    """Outputs and gradients of `apply_experts`, and those of `by_token`."""

    def loss(function, x, experts, logits):
        out = function(x, experts, route(logits, router), **settings)
        return (out * cotangent).sum(), out

    def differentiate(function):
        own = functools.partial(loss, function)
        return jax.jit(jax.value_and_grad(own, argnums=(0, 1, 2), has_aux=True))

    return tuple(
        differentiate(function)(x, experts, logits)
        for function in (apply_experts, by_token)
    )
