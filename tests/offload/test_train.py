"""Steps whose state rests on the host compute what others do, or are refused."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zjax
from tests.support.offload import (
    GPT,
    LLAMA,
    STEPS,
    Perceptron,
    make_batch,
    make_config,
    memories,
    on_device,
    start,
    train,
    weights_of,
)
from tests.support.trees import assert_close
from zjax.errors import ConfigError, PlanError
from zjax.models.build import make_model
from zjax.optim.build import make_optimizer
from zjax.run.build import make_run


@functools.cache
def trained(config, tx, num_devices):
    """Metrics and weights, which many cases are compared with."""
    state, metrics = train(start(config, tx, jax.devices()[:num_devices]))
    return metrics, weights_of(state)


def assert_same_run(run, tx=None):
    """Fails if streaming changes what a step computes; returns the last state."""
    metrics, weights = trained(on_device(run.config), tx, run.mesh.size)
    state, found = train(run)
    for x, y in zip(found, metrics, strict=True):
        assert x.keys() == y.keys()
        np.testing.assert_allclose([*x.values()], [y[n] for n in x], 1e-5, 1e-6)
    assert_close(weights_of(state), weights, rtol=1e-4, atol=2e-6)
    return state


def test_optimizers_of_the_users_see_layers_as_without_offload():
    """Fails if a norm per array is taken over a stack, or clipping per group."""
    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.lamb(1e-2))
    # Without biases: that of keys has no gradient but rounding, which a norm enlarges.
    optimizer = {"clip_norm": math.inf}
    config = make_config("pinned_host", model=LLAMA, optimizer=optimizer)
    assert_same_run(start(config, tx), tx)


def test_evaluation_and_generation_use_the_parameters_in_use():
    host = {"parameter_memory": "pinned_host"}
    configs = [make_config("device"), make_config("pinned_host", zero=host)]
    losses, scores = [], []
    for config in configs:
        run = start(config)
        state, _ = train(run, 2)
        losses.append(float(run.step.evaluate(state, make_batch(9))["loss"]))
        scores.append(np.asarray(run.bind(state)(jnp.ones((1, 4), jnp.int32))))
    np.testing.assert_allclose(*losses, rtol=1e-5)
    np.testing.assert_allclose(*scores, rtol=1e-4, atol=1e-5)


def test_any_model_can_be_offloaded():
    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(16, 24)), "y": rng.normal(size=(16, 1))}
    batch = jax.tree.map(lambda x: x.astype(np.float32), batch)

    def loss_fn(model, batch, key):
        return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

    found = []
    for memory in (None, "pinned_host"):
        zero = {"stage": 2, "min_shard_elements": 0, "offload": memory}
        settings = {
            "zero": zero,
            "precision": {"compute_dtype": "float32"},
            "num_microbatches": 2,
        }
        tx = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))
        run = zjax.initialize(Perceptron(), tx, loss_fn, batch, settings)
        state = run.state
        for _ in range(STEPS):
            state, metrics = run.step(state, batch)
        found.append((float(metrics["loss"]), weights_of(state)))
    assert memories(state.master) <= {"pinned_host"}
    np.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-6)
    assert_close(found[0][1], found[1][1], rtol=1e-5, atol=1e-6)


def test_optimizer_that_reads_the_loss_again_is_refused():
    config = make_config("pinned_host", optimizer={"clip_norm": math.inf})
    with pytest.raises(PlanError) as error:
        start(config, optax.lbfgs(1e-2))
    assert "evaluates the loss within its update" in str(error.value) or (
        "cannot run group by group" in str(error.value)
    )


def test_settings_that_offload_cannot_use():
    model = dataclasses.replace(GPT, layers_per_scan=1)
    config = make_config(
        "pinned_host",
        model=model,
        precision={"compute_dtype": "bfloat16", "reduce_dtype": "float32"},
        optimizer={"ema_decay": 0.9},
        zero={"parameter_memory": "pinned_host"},
    )
    with pytest.raises(ConfigError) as error:
        zjax.config.check.check_config(config, 8)
    assert str(error.value) == (
        "precision.reduce_dtype='float32' is not built for "
        "zero.offload='pinned_host'; use 'compute', or keep the state on the "
        "devices\n"
        "optimizer.ema_decay=0.9 stores a copy on the devices, despite "
        "zero.offload.parameter_memory='pinned_host'; use 0, or keep the parameters on "
        "the "
        "devices too\n"
        "model.layers_per_scan=1 has no effect with "
        "zero.offload='pinned_host', which runs blocks one by one; use 0"
    )


def test_model_state_beside_a_stack_is_refused():
    """Fails if statistics silently stay as they start."""
    config = make_config("pinned_host")
    model = make_model(config)
    statistics = {"norm": {"mean": jnp.zeros(2)}}
    other = dataclasses.replace(
        model, init=lambda key: (model.init(key)[0], statistics)
    )
    with pytest.raises(PlanError) as error:
        make_run(config, other, make_optimizer(config, other))
    assert str(error.value) == (
        "zero.offload='pinned_host' never updates the model state norm/mean, "
        "which no Stack takes; use 'device', or a model without model state"
    )
