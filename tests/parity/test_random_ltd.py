"""Every mesh and memory drops the tokens that one device drops."""

import functools

import jax
import numpy as np
import pytest

from tests.support import small_run
from tests.support.cases import some_by_hand
from zjax.initialize import make_run
from zjax.models.build import make_model
from zjax.optim.build import make_optimizer
from zjax.sharding import plan
from zjax.sharding.layers import put_together

SETTINGS = (
    "model.num_layers=4",
    "model.positions=rotary",
    "model.dropout_rate=0.1",
    "model.remat=none",
    "num_microbatches=2",
    "random_ltd.pacing.start=8",
    "random_ltd.pacing.multiple=4",
    "num_steps=2",
    "optimizer.name=sgd",
    "optimizer.num_warmup_steps=1",
)
CASES = {
    "layerwise, stage 3": ("layerwise", 8, "zero.stage=3"),
    "span, tensors, a loop": (
        "span",
        4,
        "mesh.tensor=2",
        "model.layers_per_scan=1",
        "model.remat=full",
    ),
    "layerwise, blocks from the host": (
        "layerwise",
        2,
        "zero.stage=3",
        "zero.optimizer_memory=pinned_host",
        "zero.parameter_memory=pinned_host",
    ),
    "layerwise, two layers in a loop": ("layerwise", 1, "model.layers_per_scan=2"),
    "span, stage 0": ("span", 8, "zero.stage=0"),
}
BY_HAND = {"layerwise, two layers in a loop", "span, stage 0"}
"""What other cases hold among more."""


@pytest.fixture(autouse=True)
def small_arrays_move(monkeypatch):
    monkeypatch.setattr(plan, "MIN_MOVED_BYTES", 1)


def train(form, num_devices, *overrides):
    """Losses and weights of two steps, with 8 and 12 of 16 tokens."""
    config = small_run.make_config(
        "runs/none", *SETTINGS, f"random_ltd.form={form}", *overrides
    )
    model = make_model(config)
    run = make_run(
        config,
        model,
        make_optimizer(config, model),
        devices=jax.devices()[:num_devices],
    )
    tokens = np.random.default_rng(0).integers(0, 61, (16, 16), np.int32)
    batch = {"tokens": tokens, "targets": np.roll(tokens, -1, 1)}
    state, losses = run.state, []
    for _ in range(2):
        state, metrics = run.step(state, batch)
        losses.append(float(metrics["loss"]))
    weights = put_together(run.step.parameters(state))
    return losses, jax.tree.map(np.asarray, weights)


@functools.cache
def on_one_device(form):
    return train(form, 1)


@pytest.mark.parametrize("name", some_by_hand(CASES, BY_HAND))
def test_training_equals_one_device(name):
    """Fails if a row draws by its device, or a layer draws the tokens of another."""
    form, num_devices, *overrides = CASES[name]
    losses, weights = train(form, num_devices, *overrides)
    wanted_losses, wanted = on_one_device(form)
    np.testing.assert_allclose(losses, wanted_losses, rtol=1e-5)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=2e-5),
        weights,
        wanted,
    )
