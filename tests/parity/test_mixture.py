"""Built-in models with experts compute what one device computes, and move biases."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import features
from tests.support.trees import assert_close
from zjax.moe.balance import move_bias
from zjax.sharding.naming import path_of


def make_batch(config, step):
    """Tokens of equal weight, so that a mean over rows is one over tokens."""
    batch = features.make_batch(config, step)
    return {name: batch[name] for name in ("tokens", "targets")}


def start(settings, number=4):
    model = features.LLAMA + features.EXPERTS + "model.num_layers=2 model.moe.every=2 "
    return features.start(features.config_of(model + settings), number)


def test_a_loss_per_sequence_is_a_mean_over_sequences():
    """Fails if balance losses are those of a device's or a microbatch's tokens."""
    balanced = (
        "model.moe.balance_scope=sequence model.moe.balance_loss=0.1 "
        "model.moe.residual=True "
    )
    found = []
    for number, settings in ((1, ""), (4, "zero.stage=3 num_microbatches=2")):
        run = start(balanced + settings, number)
        state, losses = run.state, []
        for step in range(features.STEPS):
            state, metrics = run.step(state, make_batch(run.config, step))
            losses.append(float(metrics["loss"]))
        found.append((losses, features.weights_of(run, state)))
    (losses, weights), (expected, others) = found
    np.testing.assert_allclose(losses, expected, rtol=2e-5)
    assert_close(weights, others, rtol=1e-4, atol=5e-6)


@pytest.mark.parametrize(
    "moe",
    [
        "token_choice model.moe.top_k=1 model.moe.drop=position "
        "model.moe.min_capacity=2 model.moe.balance_loss=0",
        "expert_choice model.moe.min_capacity=1",
    ],
    ids=["drops", "expert-choice"],
)
def test_devices_that_send_rows_train_as_devices_with_all_experts(moe):
    """Tokens have no expert or several; each device routes its own in both runs."""
    model = f"model.num_layers=1 model.moe={moe} model.moe.num_experts=4 zero.stage=1 "
    runs = [features.config_of(model + f"mesh.expert={n}") for n in (4, 1)]
    found, expected = (features.train(features.start(config))[1] for config in runs)
    np.testing.assert_allclose(found.losses, expected.losses, rtol=2e-5)
    assert_close(found.weights, expected.weights, rtol=2e-4, atol=5e-6)


def router_biases(params):
    """Biases of each segment, float32[layers, experts]."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    named = [(path_of(keys), x) for keys, x in leaves]
    return [np.asarray(x) for path, x in named if path.endswith("mlp/router/bias")]


def test_a_bias_follows_the_load_of_the_global_batch():
    """Fails for a load of one device or microbatch, or one that does not arrive."""
    pyramid = "model.moe.num_experts=(2,4) model.moe.every=1 model.moe.bias_rate=0.01 "
    run = start(pyramid + "mesh.expert=2 zero.stage=2 num_microbatches=2")
    state, before = run.state, router_biases(run.step.parameters(run.state))
    for step in range(2):
        state, metrics = run.step(state, make_batch(run.config, step))
        loads = [np.asarray(x) for n, x in metrics.items() if n.split("/")[0] == "load"]
        after = router_biases(run.step.parameters(state))
        for bias, load, moved in zip(before, loads, after, strict=True):
            tokens = features.ROWS * run.config.data.length * 2
            np.testing.assert_array_equal(load.sum(1), tokens)
            bias = jnp.asarray(bias).reshape(load.shape)
            expected = move_bias(bias, jnp.asarray(load), 0.01)
            np.testing.assert_array_equal(moved.reshape(load.shape), expected)
        assert np.ptp(loads[-1])
        before = after
