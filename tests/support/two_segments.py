"""A model of two kinds of blocks, the second of which adds to the loss."""

import jax
import jax.numpy as jnp
import numpy as np

import zjax
from tests.support.first_state import placed
from zjax.ops.keys import fold_in
from zjax.stack.forward import ONE_BY_ONE

WIDTH, ROWS = 8, 16
SEGMENTS = {"narrow": (2, 16), "wide": (3, 24)}
"""Number of blocks, and width of their feed-forward."""


def embed(params, batch, key):
    return batch["x"] @ params["embed"], batch["schedule"]


def narrow(params, x, context, key):
    up = jnp.tanh(x @ params["up"])
    noise = 0 if key is None else jax.random.uniform(key)
    x = x + (1 + noise) * up @ params["down"]
    return x, zjax.Auxiliary(metrics={"up": jnp.mean(jnp.abs(up))})


def wide(params, x, context, key):
    x, auxiliary = narrow(params, x, context, key)
    loss = context["balance"] * jnp.mean(x**2)
    metrics = {"size": jnp.mean(jnp.abs(x)), **auxiliary.metrics}
    return x, zjax.Auxiliary(loss, metrics)


def head(params, x, batch):
    weights = batch["weights"]
    error = jnp.sum((x @ params["head"] - batch["y"]) ** 2, axis=1)
    return (weights * error).sum(), weights.sum(), {"error": (weights * error).sum()}


def split(params):
    segments = tuple(params[name] for name in SEGMENTS)
    return {"embed": params["embed"]}, segments, {"head": params["head"]}


def join(embed, segments, head):
    return {**embed, **dict(zip(SEGMENTS, segments, strict=True)), **head}


def make_stack():
    numbers = (SEGMENTS[block.__name__][0] for block in (narrow, wide))
    segments = tuple(map(zjax.Segment, (narrow, wide), numbers))
    return zjax.Stack(embed, segments, head, split, join)


STACK = make_stack()


def resized(monkeypatch, num_narrow, num_wide):
    """A model of other numbers of blocks."""
    for name, number in (("narrow", num_narrow), ("wide", num_wide)):
        monkeypatch.setitem(SEGMENTS, name, (number, SEGMENTS[name][1]))
    return make_model(stack=make_stack())


def init(key, only=None):
    """Weights of a layer depend on its number alone."""
    params = {
        "embed": jax.random.normal(fold_in(key, 0), (WIDTH, WIDTH)),
        "head": jax.random.normal(fold_in(key, 1), (WIDTH, 1)),
    }
    for name, (number, size) in SEGMENTS.items():
        layers = jnp.arange(number) if only is None else only[None]

        def draw(layer, shape, own):
            own = fold_in(fold_in(key, own), layer)
            return 0.3 * jax.random.normal(own, shape)

        params[name] = {
            "up": jax.vmap(lambda n, s=size: draw(n, (WIDTH, s), s))(layers),
            "down": jax.vmap(lambda n, s=size: draw(n, (s, WIDTH), s + 1))(layers),
        }
    return params


def logical(params):
    blocks = dict.fromkeys(("up", "down"), ("layers", None, None))
    ends = {"embed": (None, None), "head": (None, None)}
    return ends | dict.fromkeys(SEGMENTS, blocks)


def make_model(execution=ONE_BY_ONE, stack=STACK):
    model = zjax.Model(
        init=lambda key: (init(key), {}),
        loss=zjax.loss_of(stack, execution),
        bind=lambda params, model_state: params,
        logical=logical,
        stack=stack,
        separable=True,
        takes_layers_apart=execution == ONE_BY_ONE,
        init_layer=init,
        cast=("x",),
    )
    return placed(model)


def make_batch(weights=None):
    rng = np.random.default_rng(0)
    batch = {
        "x": rng.normal(size=(ROWS, WIDTH)),
        "y": rng.normal(size=(ROWS, 1)),
        "weights": np.ones(ROWS) if weights is None else weights,
    }
    batch = {name: x.astype(np.float32) for name, x in batch.items()}
    return batch | {"schedule": {"balance": np.float32(0.1)}}
