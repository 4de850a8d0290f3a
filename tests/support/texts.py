"""Runs of built-in models over texts that weigh differently."""

import jax
import numpy as np

from zjax.config import check_config
from zjax.models.build import make_model
from zjax.optim.build import make_optimizer
from zjax.run.initialize import make_run

STEPS = 3


def make_batch(config, step):
    """Packed texts with padding, or padded rows of an encoder."""
    rows, length = config.global_batch_size, config.data.length
    rng = np.random.default_rng(step)
    shape = rows, length + 1
    tokens = rng.integers(0, config.model.vocab_size, shape).astype(np.int32)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    if config.model.kind == "encoder":
        return batch | {"lengths": rng.integers(1, length + 1, rows).astype(np.int32)}
    documents = np.sort(rng.integers(1, 4, (rows, length)), 1).astype(np.int32)
    documents[: rows // 2, length // 3 :] = 0
    return batch | {"segment_ids": documents}


def start(config, num_devices):
    check_config(config, num_devices)
    model, devices = make_model(config), jax.devices()[:num_devices]
    return make_run(config, model, make_optimizer(config, model), devices=devices)


def train(config, num_devices, *, evaluates=True):
    """Losses, the loss of an unseen batch, and the weights before that.

    Without dropout, a further step has the loss of an evaluation and no new program.
    """
    run = start(config, num_devices)
    state, losses = run.state, []
    for step in range(STEPS):
        state, metrics = run.step(state, make_batch(config, step))
        losses.append(float(metrics["loss"]))
    weights, unseen = jax.tree.map(np.asarray, state.master), make_batch(config, STEPS)
    metrics = run.evaluate(state, unseen) if evaluates else run.step(state, unseen)[1]
    return np.array([*losses, float(metrics["loss"])]), weights
