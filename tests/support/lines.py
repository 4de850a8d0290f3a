"""A line of small blocks of one's own, of any width and any mathematics."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import zjax
from tests.support.first_state import placed
from zjax.sharding.layers import layers_of
from zjax.typing import Auxiliary, Loss, Model, Segment, Stack

WIDTH, ROWS = 8, 16


def embed(params, batch, key):
    return batch["x"] @ params["embed"], ()


def block(params, x, context, key):
    return x + jnp.tanh(x @ params["w"]), Auxiliary()


def penalised(params, x, context, key):
    """Adds to the mean loss what its stream is large by, and shows its size."""
    added = Auxiliary(0.1 * jnp.mean(x**2), {"size": jnp.mean(jnp.abs(x))})
    return block(params, x, context, key)[0], added


def head(params, x, batch):
    """Has a loss without gradient where rows do not count."""
    counts = jnp.float32(batch["weights"])[:, None]
    error = jnp.where(counts > 0, (x @ params["head"] - batch["y"]) ** 2, 0)
    return (counts * error).sum(), counts.sum(), {}


def make_model(block, num_layers, embed=embed, head=head):
    def split(params):
        return {"embed": params["embed"]}, (params["blocks"],), {"head": params["head"]}

    def init(key):
        keys = jax.random.split(key, 3)
        square = (WIDTH, WIDTH)
        return {
            "embed": jax.random.normal(keys[0], square),
            "blocks": {"w": jax.random.normal(keys[1], (num_layers, *square))},
            "head": jax.random.normal(keys[2], (WIDTH, 1)),
        }, {}

    def loss(params, model_state, batch, key):
        x, context = embed(params, batch, key)
        given = []
        for layer in layers_of(params["blocks"], num_layers):
            x, own = block(layer, x, context, key)
            given.append(own)
        added = [own.loss for own in given if own.loss is not None]
        sizes = [own.metrics["size"] for own in given if own.metrics]
        total, weight, _ = head(params, x, batch)
        mean = total / jnp.where(weight > 0, weight, 1)
        metrics = {"auxiliary_loss": sum(added), "size": sum(sizes) / num_layers}
        return Loss(mean + sum(added), weight, model_state, metrics if added else {})

    model = Model(
        init=init,
        loss=loss,
        bind=lambda params, model_state: functools.partial(embed, params),
        logical=logical,
        stack=Stack(embed, (Segment(block, num_layers),), head, split, join),
        separable=True,
        cast=("x",),
    )
    return placed(model)


def join(embed, segments, head):
    (blocks,) = segments
    return {**embed, "blocks": blocks, **head}


def logical(params):
    names = {"embed": (None, None), "head": (None, None)}
    return names | {"blocks": {"w": ("layers", None, None)}}


def make_batch():
    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(ROWS, WIDTH)), "y": rng.normal(size=(ROWS, 1))}
    batch = {name: x.astype(np.float32) for name, x in batch.items()}
    return batch | {"weights": np.ones(ROWS, np.float32)}


def train(model, batch, devices=None, also=(), **settings):
    """Losses, norms of gradients and other metrics of four steps."""
    fixed = {
        "num_microbatches": 4,
        "optimizer": {"rule": "sgd", "schedule": {"num_warmup_steps": 0}},
        "precision": {"compute_dtype": "float32"},
    }
    if "mesh" in settings:  # one device runs the loop, as the reference
        model = dataclasses.replace(model, loss=zjax.loss_of(model.stack))
    run = zjax.initialize(model, None, None, batch, fixed | settings, devices=devices)
    state, found = run.state, []
    for _ in range(4):
        state, metrics = run.step(state, batch)
        names = ("loss", "grad_norm", *also)
        found.append(tuple(float(metrics[name]) for name in names))
    return found
