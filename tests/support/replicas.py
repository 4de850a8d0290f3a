"""A network of few numbers, none of them near the border between two signs."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from zjax.typing import Loss, Model

REPLICAS = 4
WIDTH, HIDDEN = 6, 4


def init(key):
    up, down = jax.random.split(key)
    return {
        "bias": jnp.zeros(WIDTH),
        "down": jax.random.normal(down, (HIDDEN, WIDTH)),
        "up": jax.random.normal(up, (WIDTH, HIDDEN)),
    }


def loss(params, model_state, batch, key):
    out = jnp.tanh(batch["x"] @ params["up"]) @ params["down"] + params["bias"][None]
    weight = batch["weight"]
    total = jnp.sum(weight)
    error = jnp.sum((out - batch["y"]) ** 2 * weight[:, None]) / jnp.maximum(total, 1)
    return Loss(error, total, model_state, {})


def make_model():
    return Model(
        init=lambda key: (init(key), {}),
        loss=loss,
        bind=lambda params, model_state: lambda x: x,
        logical=lambda params: {
            "bias": (None,),
            "down": ("mlp", "embed"),
            "up": ("embed", "mlp"),
        },
        cast=("x",),
    )


def make_batch(step):
    rng = np.random.default_rng(step)
    rows = 8 * REPLICAS
    return {
        "x": rng.normal(size=(rows, WIDTH)).astype(np.float32),
        "y": rng.normal(size=(rows, WIDTH)).astype(np.float32),
        "weight": rng.integers(1, 4, size=rows).astype(np.float32),
    }


@jax.jit
def _grads(params, batch):
    return jax.grad(lambda p: loss(p, {}, batch, None).value)(params)


def grads_of_replicas(params, batch):
    """Gradients [N, ...] of each replica, whose mean is that of the mean loss."""
    parts = [
        {name: np.split(x, REPLICAS)[i] for name, x in batch.items()}
        for i in range(REPLICAS)
    ]
    total = batch["weight"].sum()
    scaled = [
        jax.tree.map(
            lambda g, p=part: np.asarray(g) * (p["weight"].sum() * REPLICAS / total),
            _grads(params, part),
        )
        for part in parts
    ]
    return jax.tree.map(lambda *g: np.stack(g), *scaled)


def grads_of_workers(unravel, params, batch):
    """Flat gradients of each replica at its own flat parameters, float32[N, P]."""
    found = []
    for i, flat in enumerate(params):
        grads = grads_of_replicas(unravel(flat), batch)
        found.append(ravel_pytree(jax.tree.map(lambda g, i=i: g[i], grads))[0])
    return np.stack(found)


def decayed_numbers(master):
    """1 for each number of a matrix, whose weights decay, and 0 for others."""
    return np.concatenate(
        [np.full(x.size, x.ndim > 1, "f4") for x in jax.tree.leaves(master)]
    )


def assert_copies_are_equal(tree):
    """Holds the bits of what several devices store to those of the first of them."""
    for leaf in jax.tree.leaves(tree):
        first_of = {}
        for shard in leaf.addressable_shards:
            first = first_of.setdefault(str(shard.index), shard.data)
            np.testing.assert_array_equal(shard.data, first)


def note_programs(run):
    """Returns a list to which each call of a program of `run` adds the name."""
    calls = []

    def noted(name, program):
        def call(*arguments):
            calls.append(name)
            return program(*arguments)

        return call

    executor = run.step.executor
    executor.programs = {n: noted(n, p) for n, p in executor.programs.items()}
    return calls
