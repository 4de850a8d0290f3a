"""Small models as plain functions, and batches for them."""

import jax
import jax.numpy as jnp
import numpy as np

from zjax.typing import Loss, Model

WIDTH, HIDDEN, BATCH = 16, 64, 32


def init(key):
    up, down = jax.random.split(key)
    return {
        "up": 0.1 * jax.random.normal(up, (WIDTH, HIDDEN)),
        "down": 0.1 * jax.random.normal(down, (HIDDEN, WIDTH)),
        "bias": jnp.zeros((7,)),
    }


def apply(params, x):
    hidden = jax.nn.gelu(x @ params["up"]) @ params["down"]
    return hidden.at[:, :7].add(params["bias"][None])


def loss(params, model_state, batch, key):
    error = (apply(params, batch["x"]) - batch["y"]).astype(jnp.float32) ** 2
    weight = batch["weight"].astype(jnp.float32)
    total = jnp.sum(weight)
    value = jnp.sum(error * weight[:, None]) / (WIDTH * jnp.maximum(total, 1))
    return Loss(value, total, model_state, {"error": value})


def make_mlp():
    """A two-layer network whose bias of 7 divides over no mesh."""
    return Model(
        init=lambda key: (init(key), {}),
        loss=loss,
        bind=lambda params, model_state: lambda x: apply(params, x),
        logical=lambda params: {
            "up": ("embed", "mlp"),
            "down": ("mlp", "embed"),
            "bias": (None,),
        },
        cast=("x",),
    )


def make_batch(step=0, batch=BATCH):
    rng = np.random.default_rng(step)
    return {
        "x": rng.normal(size=(batch, WIDTH)).astype(np.float32),
        "y": rng.normal(size=(batch, WIDTH)).astype(np.float32),
        "weight": rng.integers(0, 4, size=batch).astype(np.float32),
    }
