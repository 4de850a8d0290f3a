"""A line of blocks of your own in a pipeline computes what one device computes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zjax
from zjax.sharding.layers import layers_of, side_by_side
from zjax.typing import Loss, Model, Segment, Stack

NUM_LAYERS, WIDTH, ROWS = 5, 8, 16


def embed(params, batch, key):
    return batch["x"] @ params["embed"], ()


def block(params, x, context, key):
    """Has no value, and no gradient, where its weights are 0."""
    w = params["w"]
    return x + jnp.tanh(x @ (w / jnp.linalg.norm(w))), jnp.float32(0)


def head(params, x, batch):
    error = (x @ params["head"] - batch["y"]) ** 2
    return error.sum(), jnp.float32(error.size), {}


def split(params):
    layers = layers_of(params["blocks"], NUM_LAYERS)
    return {"embed": params["embed"]}, (tuple(layers),), {"head": params["head"]}


def join(embed, segments, head):
    (layers,) = segments
    return {**embed, "blocks": side_by_side(layers), **head}


def init(key):
    keys = jax.random.split(key, 3)
    square = (WIDTH, WIDTH)
    return {
        "embed": jax.random.normal(keys[0], square),
        "blocks": {"w": jax.random.normal(keys[1], (NUM_LAYERS, *square))},
        "head": jax.random.normal(keys[2], (WIDTH, 1)),
    }, {}


def loss(params, model_state, batch, key):
    x, context = embed(params, batch, key)
    for layer in layers_of(params["blocks"], NUM_LAYERS):
        x, _ = block(layer, x, context, key)
    total, weight, _ = head(params, x, batch)
    return Loss(total / weight, weight, model_state, {})


def logical(params):
    names = {"embed": (None, None), "head": (None, None)}
    return names | {"blocks": {"w": ("layers", None, None)}}


def make_model():
    return Model(
        init=init,
        loss=loss,
        bind=lambda params, model_state: functools.partial(embed, params),
        logical=logical,
        stack=Stack(embed, (Segment(block, NUM_LAYERS),), head, split, join),
        separable=True,
    )


def train(devices=None, **settings):
    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(ROWS, WIDTH)), "y": rng.normal(size=(ROWS, 1))}
    batch = {name: x.astype(np.float32) for name, x in batch.items()}
    fixed = {
        "num_microbatches": 4,
        "optimizer": {"name": "sgd", "num_warmup_steps": 0},
        "precision": {"compute_dtype": "float32"},
    }
    run = zjax.initialize(
        make_model(), None, None, batch, fixed | settings, devices=devices
    )
    state, losses = run.state, []
    for _ in range(4):
        state, metrics = run.step(state, batch)
        losses.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    return losses


@pytest.mark.parametrize(
    ("stage", "pipeline"),
    [(1, {"schedule": "1f1b"}), (3, {"schedule": "zb_h1", "recompute": False})],
    ids=["1f1b", "weights-apart"],
)
def test_layers_that_fill_up_the_stages_may_have_no_value(stage, pipeline):
    """Fails if 0 / 0 of layers that are none reaches the others: on four stages five
    layers fill two and a half."""
    found = train(
        mesh={"pipeline": 4, "data": 2},
        zero={"stage": stage, "min_shard_elements": 0},
        pipeline=pipeline,
    )
    wanted = train(jax.devices()[:1])
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    assert wanted[-1][0] < wanted[0][0]
