"""A loss term and a metric in the head of a built-in model act on every mesh."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zjax
from tests.support import features
from zjax.sharding import plan as plans

HOST = features.HOST + "zero.stage=1"
MESHES = {
    "data": "mesh.tensor=2 zero.stage=3",
    "pipeline": "mesh.pipeline=2 mesh.data=1 num_microbatches=2",
    "pinned_host": HOST,
}


def with_entropy(model):
    """The model with a bonus for entropy, as in the documents."""

    def head(params, carry, batch):
        loss, weight, metrics = model.stack.head(params, carry, batch)
        hidden, matrix = model.stack.factors(params, carry)
        logits = (hidden @ matrix.T).astype(jnp.float32)
        entropies = -(jax.nn.softmax(logits) * jax.nn.log_softmax(logits)).sum(-1)
        entropy = (entropies * batch["weights"]).sum()
        return loss - 0.5 * entropy, weight, metrics | {"entropy": entropy}

    return zjax.with_stack(model, head=head)


def start(settings, change=with_entropy, number=8):
    config = features.config_of(settings)
    return features.start(config, min(number, features.num_devices(config)), change)


def train(run):
    """Loss, accuracy and entropy of three steps."""
    state, found = run.state, []
    for step in range(features.STEPS):
        state, metrics = run.step(state, features.make_batch(run.config, step))
        found.append([float(metrics[x]) for x in ("loss", "accuracy", "entropy")])
    return found


@functools.cache
def on_one_device():
    return train(start("model.layers_per_scan=1", number=1))


@pytest.mark.parametrize("name", MESHES)
def test_a_changed_head_trains_as_on_one_device(name, monkeypatch):
    """Fails if a pipeline or offload runs the head that the model had before."""
    monkeypatch.setattr(plans, "MIN_MOVED_BYTES", 64)
    found = train(start(MESHES[name]))
    np.testing.assert_allclose(found, on_one_device(), rtol=2e-5)


def with_loss(model):
    def loss(*arguments):
        return model.loss(*arguments)

    return dataclasses.replace(model, loss=loss)


def with_stack(model):
    return dataclasses.replace(model, stack=with_entropy(model).stack)


REMEDY = "; change the stack by zjax.with_stack, or set stack=None"
REFUSALS = {
    "own loss, pipeline": (
        with_loss,
        MESHES["pipeline"],
        "model.loss='loss' is not the loss of model.stack, which mesh.pipeline=2 trains"
        + REMEDY,
    ),
    "own loss, pinned_host": (
        with_loss,
        HOST,
        "model.loss='loss' is not the loss of model.stack, which "
        "zero.offload='pinned_host' trains" + REMEDY,
    ),
    "own stack": (
        with_stack,
        "",
        "model.loss='StackLoss' is the loss of another stack than model.stack; "
        "change both by zjax.with_stack",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_loss_that_a_run_would_not_train_is_refused(name):
    change, settings, message = REFUSALS[name]
    with pytest.raises(zjax.ModelError) as error:
        start(settings, change)
    assert str(error.value) == message


def test_a_stack_is_changed_only_where_the_loss_is_its_own():
    model = with_loss(zjax.make_model(features.config_of("")))
    with pytest.raises(zjax.ModelError) as error:
        with_entropy(model)
    assert str(error.value) == (
        "model.loss='loss' is not the loss of a stack, whose functions could "
        "change; give a model of zjax.make_model, or loss=zjax.loss_of(stack)"
    )
