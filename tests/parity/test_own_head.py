"""A loss term and a metric in the head of a built-in model act on every mesh."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zjax
from tests.support import pipelines
from zjax.settings import schema
from zjax.sharding import plan as plans

MESHES = {
    "data": {"mesh": {"data": 4, "tensor": 2}, "stage": 3},
    "pipeline": {"mesh": {"pipeline": 2, "data": 2, "tensor": 2}},
    "pinned_host": {
        "mesh": {"data": 4, "tensor": 2},
        "offload": schema.PinnedHost(),
    },
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


def make_config(mesh=None, offload=None, **settings):
    config = pipelines.make_config(mesh=mesh, num_layers=2, **settings)
    stage = config.zero.stage
    zero = schema.Zero(stage=stage, min_shard_elements=0, offload=offload)
    return dataclasses.replace(config, zero=zero)


def start(config, change, devices=None):
    model = zjax.make_model(config)
    tx = zjax.make_optimizer(config, model)
    return zjax.make_run(config, change(model), tx, devices=devices)


def train(run, *, evaluates=True):
    """Loss, accuracy and entropy of two steps and of an evaluation or a third step."""
    state, found = run.state, []
    for number in range(2):
        state, metrics = run.step(state, pipelines.make_batch(number))
        found.append(metrics)
    batch = pipelines.make_batch(2)
    found.append(run.evaluate(state, batch) if evaluates else run.step(state, batch)[1])
    names = ("loss", "accuracy", "entropy")
    return [[float(metrics[name]) for name in names] for metrics in found]


@functools.cache
def on_one_device():
    run = start(make_config(stage=0), with_entropy, jax.devices()[:1])
    return train(run, evaluates=False)


@pytest.mark.parametrize("name", MESHES)
def test_a_changed_head_trains_as_on_one_device(name, monkeypatch):
    """Fails if a pipeline or offload runs the head that the model had before."""
    monkeypatch.setattr(plans, "MIN_MOVED_BYTES", 64)
    found = train(start(make_config(**MESHES[name]), with_entropy))
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
        {"mesh": {"pipeline": 2, "data": 4}},
        "model.loss='loss' is not the loss of model.stack, which mesh.pipeline=2 trains"
        + REMEDY,
    ),
    "own loss, pinned_host": (
        with_loss,
        {"offload": schema.PinnedHost()},
        "model.loss='loss' is not the loss of model.stack, which "
        "zero.offload='pinned_host' trains" + REMEDY,
    ),
    "own stack": (
        with_stack,
        {},
        "model.loss='StackLoss' is the loss of another stack than model.stack; "
        "change both by zjax.with_stack",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_loss_that_a_run_would_not_train_is_refused(name):
    change, settings, message = REFUSALS[name]
    with pytest.raises(zjax.ModelError) as error:
        start(make_config(**settings), change)
    assert str(error.value) == message


def test_a_stack_is_changed_only_where_the_loss_is_its_own():
    model = with_loss(zjax.make_model(make_config()))
    with pytest.raises(zjax.ModelError) as error:
        with_entropy(model)
    assert str(error.value) == (
        "model.loss='loss' is not the loss of a stack, whose functions could "
        "change; give a model of zjax.make_model, or loss=zjax.loss_of(stack)"
    )
