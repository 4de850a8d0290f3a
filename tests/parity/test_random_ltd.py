"""Every mesh and memory drops the tokens that one device drops.

Over a sequence axis that is one device that draws by parts of the sequence.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import small_run
from tests.support.cases import some_by_hand
from tests.support.trees import assert_close
from zjax.models.build import make_model
from zjax.observe.collectives import list_collectives
from zjax.ops import tokens
from zjax.ops.tokens import draw_subset
from zjax.optim.build import make_optimizer
from zjax.parallel.ring import zigzag
from zjax.run.batch import with_dropping
from zjax.run.initialize import make_run
from zjax.sharding import plan
from zjax.sharding.layers import put_together
from zjax.stack import dropping
from zjax.typing import Dropping

SETTINGS = (
    "model.num_layers=4",
    "model.positions=rotary",
    "model.dropout_rate=0.1",
    "model.remat=none",
    "num_microbatches=2",
    "random_ltd.pacing.start=8",
    "random_ltd.pacing.multiple=8",
    "num_steps=2",
    "optimizer.rule=sgd",
    "optimizer.schedule.num_warmup_steps=1",
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
        "zero.offload=pinned_host",
        "zero.offload.parameter_memory=pinned_host",
    ),
    "span, blocks from the host": (
        "span",
        2,
        "zero.offload=pinned_host",
        "model.remat=full",
        "model.activation_memory=pinned_host",
    ),
    "layerwise, two layers in a loop": ("layerwise", 1, "model.layers_per_scan=2"),
    "span, stage 0": ("span", 8, "zero.stage=0"),
    "layerwise, heads by all-to-all": ("layerwise", 4, "mesh.sequence=2"),
    "span, a ring": ("span", 2, "mesh.sequence=2", "model.sequence_attention=ring"),
}
BY_HAND = {
    "layerwise, stage 3",
    "layerwise, two layers in a loop",
    "span, blocks from the host",
    "span, stage 0",
    "span, a ring",
}
"""What other cases hold among more."""


@pytest.fixture(autouse=True)
def small_arrays_move(monkeypatch):
    monkeypatch.setattr(plan, "MIN_MOVED_BYTES", 1)


def make(form, num_devices, *overrides):
    """A run and its batch."""
    settings = [x for x in SETTINGS if form != "none" or "pacing" not in x]
    config = small_run.make_config(
        "runs/none", *settings, f"random_ltd={form}", *overrides
    )
    model = make_model(config)
    run = make_run(
        config,
        model,
        make_optimizer(config, model),
        devices=jax.devices()[:num_devices],
    )
    tokens = np.random.default_rng(0).integers(0, 61, (16, 16), np.int32)
    return run, {"tokens": tokens, "targets": np.roll(tokens, -1, 1)}


def train(form, num_devices, *overrides):
    """Losses and weights of two steps with 8 of 16 tokens, which is one program."""
    run, batch = make(form, num_devices, *overrides)
    state, losses = run.state, []
    for _ in range(2):
        state, metrics = run.step(state, batch)
        losses.append(float(metrics["loss"]))
    weights = put_together(run.step.parameters(state))
    return losses, jax.tree.map(np.asarray, weights)


def draw_as_a_ring(*args, length, **settings):
    order = jnp.asarray(zigzag(length, 2))
    return jnp.sort(order[draw_subset(*args, length=length, **settings)], axis=1)


@functools.cache
def on_one_device(form, num_parts, is_ring):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokens, "open_size", lambda axis: num_parts)
        if is_ring:
            patch.setattr(dropping, "draw_subset", draw_as_a_ring)
            # Tokens of a ring are taken from anywhere in the row.
            patch.setattr(tokens, "_by_part", by_row)
        return train(form, 1)


def by_row(function, indices, *arrays):
    return jax.vmap(function)(indices, *arrays)


@pytest.mark.parametrize("name", some_by_hand(CASES, BY_HAND))
def test_training_equals_one_device(name):
    """Fails if a row draws by its device, or a layer draws the tokens of another."""
    form, num_devices, *overrides = CASES[name]
    losses, weights = train(form, num_devices, *overrides)
    num_parts = 2 if "mesh.sequence=2" in overrides else 1
    is_ring = "model.sequence_attention=ring" in overrides
    wanted_losses, wanted = on_one_device(form, num_parts, is_ring)
    np.testing.assert_allclose(losses, wanted_losses, rtol=1e-5)
    assert_close(weights, wanted, rtol=1e-4, atol=2e-5)


def test_kept_tokens_stay_on_their_devices():
    """Fails if a subset gathers the stream over the sequence axis."""
    sent = {}
    _, num_devices, *settings = CASES["layerwise, heads by all-to-all"]
    for form in ("none", "layerwise"):
        run, batch = make(form, num_devices, *settings)
        if form != "none":
            batch = with_dropping(batch, Dropping(num_kept=8))
        text = run.step.compile(batch, "train").as_text()
        sent[form] = sum(x.elements * x.times for x in list_collectives(text))
    assert 0 < sent["layerwise"] < sent["none"]
