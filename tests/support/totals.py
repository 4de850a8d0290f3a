"""A model whose blocks count tokens by expert, and move a bias by these counts.

An expert is chosen by arithmetic that no order of operations rounds differently.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import zjax
from tests.support import two_segments
from tests.support.first_state import placed
from zjax.moe.balance import move_bias
from zjax.ops.keys import fold_in

ROWS, LENGTH, WIDTH, RATE = 64, 4, 8, 0.0625
SEGMENTS = {"few": (2, 3), "many": (3, 5)}
"""Number of blocks, and of experts."""


def embed(params, batch, key):
    return batch["x"] @ params["embed"], (batch["tokens"], batch["weights"])


def choose(token, bias, numpy=jnp):
    """The expert with the best score of a token: a fraction of 16, and its bias."""
    scores = token * (numpy.arange(len(bias)) + 3) % 17
    return numpy.argmax(numpy.float32(scores) / 16 + bias)


def block(params, x, context, key):
    tokens, weights = context
    bias = params["router"]["bias"]
    assert bias.dtype == jnp.float32
    chosen = jax.vmap(jax.vmap(lambda token: choose(token, bias)))(tokens)
    scales = (1 + chosen[..., None] / 4).astype(x.dtype)
    chosen = jax.nn.one_hot(chosen, len(bias), dtype=jnp.int32)
    load = (chosen * (weights > 0)[..., None]).sum((0, 1), dtype=jnp.int32)
    x = x + jnp.tanh(x @ params["w"]) * scales
    return x, zjax.Auxiliary(metrics={"size": jnp.abs(x).mean()}, totals={"load": load})


def head(params, x, batch):
    error = jnp.square(x @ params["head"] - batch["y"])[..., 0]
    weights = batch["weights"]
    return (weights * error).sum(), weights.sum(), {}


def split(params):
    segments = tuple(params[name] for name in SEGMENTS)
    return {"embed": params["embed"]}, segments, {"head": params["head"]}


def join(embed, segments, head):
    return {**embed, **dict(zip(SEGMENTS, segments, strict=True)), **head}


def move(bias, totals):
    return move_bias(bias, totals["load"], RATE)


def make_segment(num_blocks, num_experts):
    return zjax.Segment(
        block, num_blocks, totals={"load": (num_experts,)}, moves={"router/bias": move}
    )


def init(key, only=None):
    square = (WIDTH, WIDTH)
    params = {
        "embed": jax.random.normal(fold_in(key, 0), square),
        "head": jax.random.normal(fold_in(key, 1), (WIDTH, 1)),
    }
    for name, (number, size) in SEGMENTS.items():
        layers = jnp.arange(number) if only is None else only[None]
        biases = jnp.outer(layers, 2 + jnp.arange(size)) % 7 / 16

        def draw(layer, size=size):
            return 0.3 * jax.random.normal(fold_in(fold_in(key, size), layer), square)

        router = {"bias": jnp.float32(biases)}
        params[name] = {"router": router, "w": jax.vmap(draw)(layers)}
    return params


def logical(params):
    ends = {"embed": (None, None), "head": (None, None)}
    blocks = {"router": {"bias": ("layers", None)}, "w": ("layers", None, None)}
    return ends | dict.fromkeys(SEGMENTS, blocks)


def make_model(**changes):
    segments = tuple(make_segment(*shape) for shape in SEGMENTS.values())
    stack = zjax.Stack(embed, segments, head, split, join)
    model = dataclasses.replace(
        two_segments.make_model(stack=stack),
        init=lambda key: (init(key), {}),
        logical=logical,
        init_layer=init,
    )
    return dataclasses.replace(placed(model), **changes)


def make_batch(step):
    """Tokens of which some do not count, among them all of a device's microbatch."""
    rng = np.random.default_rng(step)
    weights = rng.integers(0, 4, (ROWS, LENGTH)) > 0
    weights[1:16:2] = False
    return {
        "x": rng.normal(size=(ROWS, LENGTH, WIDTH)).astype(np.float32),
        "y": rng.normal(size=(ROWS, LENGTH, 1)).astype(np.float32),
        "tokens": rng.integers(0, 1000, (ROWS, LENGTH)).astype(np.int32),
        "weights": weights.astype(np.float32),
    }


def load_by_hand(bias, batch):
    """Tokens of each expert, int[E], counted one by one."""
    load = np.zeros(len(bias), int)
    for token, weight in zip(
        batch["tokens"].ravel(), batch["weights"].ravel(), strict=True
    ):
        if weight:
            load[choose(token, bias, np)] += 1
    return load


def moved_by_hand(bias, load):
    """The next bias, float32[E]."""
    direction = np.sign(load.mean() - load)
    centred = np.float32(direction) - np.float32(direction.sum()) / np.float32(
        len(bias)
    )
    return bias + np.float32(RATE) * np.float32(centred)
