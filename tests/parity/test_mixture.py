"""Built-in models with experts: every placement computes what one device computes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.support import language, offload
from tests.support.cases import some_by_hand
from zjax.moe.balance import move_bias
from zjax.settings import schema
from zjax.sharding import plan as plans
from zjax.sharding.naming import path_of

MOE = schema.TokenChoice(num_experts=4, every=2, top_k=2, residual=True)
PER_SEQUENCE = dataclasses.replace(MOE, balance_scope="sequence", balance_loss=0.1)
GPT = dataclasses.replace(language.GPT, remat="full", moe=PER_SEQUENCE)
"""A dense layer and one with experts, whose loss is a mean over sequences."""
FOUR = dataclasses.replace(GPT, num_layers=4)
STEPS = 3


def make_batch(step):
    """Rows of equal weight, so that a mean over rows is one over tokens."""
    batch = offload.make_batch(step)
    return batch | {"weights": np.ones_like(batch["weights"])}


def train(stage=0, num_devices=1, model=GPT, **sections):
    config = offload.make_config("device", stage, model=model, **sections)
    run = offload.start(config, optax.sgd(0.5), jax.devices()[:num_devices])
    state, losses = run.state, []
    for step in range(STEPS):
        state, metrics = run.step(state, make_batch(step))
        losses.append(float(metrics["loss"]))
    return np.array(losses), offload.weights_of(state)


@functools.cache
def alone(model=GPT):
    return train(model=model)


def assert_equal(found, model=GPT):
    losses, params = alone(model)
    np.testing.assert_allclose(found[0], losses, rtol=2e-5)

    def compare(x, expected):
        shape = tuple(map(slice, expected.shape))
        np.testing.assert_allclose(x[shape], expected, rtol=1e-4, atol=1e-6)

    jax.tree.map(compare, found[1], params)


@pytest.mark.parametrize("stage", some_by_hand(range(4), {0, 1, 2}))
def test_stages(stage):
    assert_equal(train(stage, 4))


@pytest.mark.parametrize("num_microbatches", some_by_hand((2, 4), {2}))
def test_accumulation(num_microbatches):
    assert_equal(train(num_microbatches=num_microbatches))


@pytest.mark.slow
def test_a_loop_at_stage_3():
    """Fails if the compiler shards tokens that experts sort."""
    model = dataclasses.replace(FOUR, layers_per_scan=1)
    assert_equal(train(3, 4, model), FOUR)


@pytest.mark.slow
def test_pipeline():
    """Each stage has a dense layer and one with experts."""
    sections = {"mesh": schema.Mesh(pipeline=2), "num_microbatches": 4}
    assert_equal(train(1, 4, FOUR, **sections), FOUR)


BIASED = dataclasses.replace(MOE, bias_rate=0.01, residual=False)
PYRAMID = schema.TokenChoice(num_experts=(2, 4), bias_rate=0.01)
RUNS = {
    "expert": (GPT, PYRAMID, "device", {"mesh": schema.Mesh(expert=2)}),
    "tokens split": (
        GPT,
        BIASED,
        "device",
        {"mesh": schema.Mesh(sequence=2, tensor=2)},
    ),
    "pipeline": (
        FOUR,
        BIASED,
        "device",
        {"mesh": schema.Mesh(pipeline=2), "num_microbatches": 4},
    ),
    "host": (GPT, BIASED, "pinned_host", {"num_microbatches": 2}),
    "backward": (
        GPT,
        BIASED,
        "pinned_host",
        {"mesh": schema.Mesh(expert=2), **offload.UNDER_BACKWARD},
    ),
}


def router_biases(params):
    """Those of each segment, float32[layers, experts]."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    named = [(path_of(keys), x) for keys, x in leaves]
    return [np.asarray(x) for path, x in named if path.endswith("mlp/router/bias")]


@pytest.mark.parametrize("name", some_by_hand(RUNS, {"pipeline", "backward"}))
def test_a_bias_follows_the_load_of_the_global_batch(name, monkeypatch):
    """Fails for a load of one device or microbatch, or one that does not arrive."""
    monkeypatch.setattr(plans, "MIN_MOVED_BYTES", 16)
    model, moe, memory, sections = RUNS[name]
    model = dataclasses.replace(model, moe=moe)
    config = offload.make_config(memory, 2, model=model, **sections)
    run = offload.start(config, optax.sgd(0.5), jax.devices()[:4])
    state, before = run.state, router_biases(run.step.parameters(run.state))
    for step in range(2):
        state, metrics = run.step(state, make_batch(step))
        loads = [np.asarray(x) for n, x in metrics.items() if n.split("/")[0] == "load"]
        after = router_biases(run.step.parameters(state))
        for bias, load, moved in zip(before, loads, after, strict=True):
            tokens = offload.ROWS * offload.LENGTH * moe.top_k
            np.testing.assert_array_equal(load.sum(1), tokens)
            bias = jnp.asarray(bias).reshape(load.shape)
            expected = move_bias(bias, jnp.asarray(load), 0.01)
            np.testing.assert_array_equal(moved.reshape(load.shape), expected)
        assert np.ptp(loads[-1])
        before = after
