"""Stages of a pipeline drop the tokens and the layers that a plain loop drops."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import pipelines, small_run
from tests.support.cases import some_by_hand
from tests.support.trees import assert_close
from zjax.models.build import make_model
from zjax.ops import tokens
from zjax.ops.keys import fold_name
from zjax.ops.tokens import draw_subset
from zjax.optim.build import make_optimizer
from zjax.run import step as steps
from zjax.run.initialize import make_run
from zjax.sharding.layers import layers_of
from zjax.stack.dropping import split_dropping
from zjax.typing import Loss

SETTINGS = (
    "model.positions=rotary",
    "model.dropout_rate=0.1",
    "model.remat=none",
    "num_microbatches=2",
    "num_steps=2",
    "optimizer.rule=sgd",
    "optimizer.peak_learning_rate=0.1",
    "optimizer.schedule.num_warmup_steps=1",
    "zero.min_shard_elements=0",
)
TOKENS = "random_ltd.pacing.start=8", "random_ltd.pacing.multiple=8"
LAYERS = "layer_drop.theta=0.5", "layer_drop.gamma=5"
CASES = {
    "layerwise, stage 3, tensors": (
        {"num_layers": 6, "whole": (0, 2, 3, 5)},
        "random_ltd=layerwise",
        "mesh.pipeline=2",
        "mesh.tensor=2",
        "zero.stage=3",
    ),
    "layerwise, stages that are not full, a sequence": (
        {"num_layers": 5, "whole": (0, 1, 3, 4), "num_parts": 2},
        "random_ltd=layerwise",
        "mesh.pipeline=2",
        "mesh.sequence=2",
        "model.remat=full",
    ),
    "span, weights apart": (
        {"num_layers": 6, "whole": (0, 2, 3, 5)},
        "random_ltd=span",
        "mesh.pipeline=2",
        "pipeline=zb_h1",
    ),
    "span, chunks": (
        {"num_layers": 12, "whole": (0, 2, 3, 5, 6, 8, 9, 11)},
        "random_ltd=span",
        "mesh.pipeline=2",
        "pipeline=interleaved",
    ),
    "layers, chunks": (
        {"num_layers": 4},
        *LAYERS,
        "mesh.pipeline=2",
        "pipeline=interleaved",
    ),
    "layers and tokens, stages that are not full": (
        {"num_layers": 3, "whole": (0, 2)},
        "random_ltd=layerwise",
        *LAYERS,
        "mesh.pipeline=2",
        "pipeline.recompute=False",
        "zero.stage=2",
    ),
}
BY_HAND = {
    "layerwise, stages that are not full, a sequence",
    "layerwise, stage 3, tensors",
    "span, chunks",
    "layers, chunks",
    "span, weights apart",
}
"""What other cases hold in part."""


def make(model, num_devices, *overrides):
    """A run and its batch."""
    config = small_run.make_config("runs/none", *SETTINGS, *overrides)
    devices = jax.devices()[:num_devices]
    tx = make_optimizer(config, model(config))
    run = make_run(config, model(config), tx, devices=devices)
    tokens = np.random.default_rng(0).integers(0, 61, (16, 16), np.int32)
    return run, {"tokens": tokens, "targets": np.roll(tokens, -1, 1)}


def train(model, num_devices, *overrides):
    """Losses and weights of two steps, with 8 of 16 tokens."""
    run, batch = make(model, num_devices, *overrides)
    state, losses = run.state, []
    for _ in range(2):
        state, metrics = run.step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, pipelines.whole(state.master, run.plan.master)


def plainly(config, *, whole=()):
    """The model with a loss that is a loop over its layers and nothing else."""
    model = make_model(config)
    stack, number = model.stack, config.model.num_layers
    rows = jnp.arange(8)[:, None]

    def loss(params, model_state, batch, key):
        batch, left_out = split_dropping(batch)
        embed, (blocks,), head = stack.split(params)
        key = fold_name(key, "loss")
        x, context = stack.embed(embed, batch, jax.random.fold_in(key, 0))
        for i, layer in enumerate(layers_of(blocks, number)):
            own, before = jax.random.fold_in(key, i + 1), x
            if i in whole or not left_out.num_kept:
                x, _ = stack.segments[0].block(layer, x, context, own)
            else:
                draws = jax.random.fold_in(key, 2) if left_out.once else own
                size = {"num_rows": 8, "length": 16, "num_kept": left_out.num_kept}
                indices = draw_subset(draws, **size)
                narrow = stack.take_tokens(context, indices)
                new, _ = stack.segments[0].block(layer, x[rows, indices], narrow, own)
                x = x.at[rows, indices].set(new)
            if left_out.theta is not None:
                p = 1 - (i + 1) / number * (1 - left_out.theta)
                runs = jax.random.bernoulli(fold_name(own, "layer"), p)
                x = before + jnp.where(runs, (x - before) / p, 0)
        total, weight, _ = stack.head(head, x, batch)
        return Loss(total / weight, weight, model_state, {})

    return dataclasses.replace(model, loss=loss)


@pytest.mark.parametrize("name", some_by_hand(CASES, BY_HAND))
def test_training_equals_a_loop_over_layers(name, monkeypatch):
    """Fails if a slot is whole or cut in one stage alone, draws by its slot, chunk or
    device, or if layers that fill up a stage run."""
    known, *settings = CASES[name]
    if any("random_ltd" in setting for setting in settings):
        settings += TOKENS
    layers = f"model.num_layers={known['num_layers']}"
    losses, weights = train(make_model, 8, layers, *settings)
    of_one = [x for x in settings if x.startswith(("random_ltd", "layer_drop"))]
    monkeypatch.setattr(steps, "check_model", lambda *_: None)
    monkeypatch.setattr(tokens, "open_size", lambda _: known.get("num_parts", 1))
    model = functools.partial(plainly, whole=known.get("whole", ()))
    wanted_losses, wanted = train(model, 1, layers, *of_one)
    np.testing.assert_allclose(losses, wanted_losses, rtol=1e-5)
    assert_close(weights, wanted, rtol=1e-4, atol=2e-5)
