"""Training on rounded matrices takes the steps of NumPy's rounding on one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import zjax
from tests.ops.test_rounding import oracle as rounded_by_numpy
from tests.parity import test_lora as lora
from zjax.models import layers
from zjax.settings.quantize import Rule

GROUP = 32
RULES = [
    {"pattern": "attention/key", "weights": "compute"},
    {"pattern": "mlp", "weights": "int3", "group_size": GROUP},
    {"weights": "int4", "group_size": GROUP},
]
MOE = {"kind": "token_choice", "num_experts": 4, "top_k": 2, "balance_loss": 0.0}
INPUTS = {"query": 1, "value": 1, "key": 1, "out": 2, "up": 1, "gate": 1, "down": 1}


def make_config(rules=RULES, adapters=None, **settings):
    quantize = {"rules": rules} if rules else None
    return lora.make_config(lora=adapters, quantize=quantize, **settings)


def by_numpy(params):
    """Rounds the matrices of blocks as `RULES` say, layer by layer."""

    def one(keys, x):
        names = [key.key for key in keys]
        if names[-1] != "kernel" or "blocks" not in names or "router" in names:
            return x
        name, depth = names[-2], 2 if "experts" in names else 1
        kind = {"attention": "int4", "mlp": "int3"}[names[names.index("blocks") + 1]]
        if name == "key":
            return x
        stack = np.asarray(x).reshape(-1, *x.shape[depth:])
        rows = int(np.prod(x.shape[depth : depth + INPUTS[name]]))
        found = [rounded_by_numpy(k.reshape(rows, -1), kind, rows)[0] for k in stack]
        return jnp.asarray(np.stack(found).reshape(x.shape))

    return jax.tree_util.tree_map_with_path(one, params)


@functools.cache
def expected(with_experts=False):
    """Losses with and without rounding: gradients at rounded values, on the masters."""
    shape = lora.SHAPE | ({"moe": MOE} if with_experts else {})
    plain = lora.make_model(make_config(None, model=shape))
    batch = jax.tree.map(jnp.asarray, lora.make_batch())
    differentiate = jax.jit(
        jax.value_and_grad(lambda params: plain.loss(params, {}, batch, None).value)
    )
    losses = {}
    for change in (by_numpy, lambda params: params):
        params = lora.first_params(make_config(None, model=shape))
        found = losses.setdefault(change is by_numpy, [])
        for _ in range(lora.STEPS):
            value, grads = differentiate(change(params))
            params = jax.tree.map(lambda x, g: x - lora.RATE * g, params, grads)
            found.append(float(value))
    return losses[True], losses[False]


CASES = {
    "stage 0": {"zero": {"stage": 0}},
    "stage 1": {"zero": {"stage": 1, "min_shard_elements": 0}},
    "stage 2, microbatches": {
        "zero": {"stage": 2, "min_shard_elements": 0},
        "num_microbatches": 2,
    },
    "stage 3, scan, remat": {
        "zero": {"stage": 3, "min_shard_elements": 0},
        "model": lora.SHAPE | {"layers_per_scan": 1, "remat": "full"},
    },
    "tensor": {"mesh": {"tensor": 4}},
    "pipeline": {"mesh": {"pipeline": 2}, "num_microbatches": 2},
    "offload": {
        "zero": {
            "stage": 3,
            "min_shard_elements": 0,
            "offload": {"kind": "pinned_host", "parameter_memory": "pinned_host"},
        }
    },
}


@pytest.mark.parametrize("case", CASES)
def test_steps_are_those_of_rounded_matrices(case):
    """Fails if a device rounds by a part of a group, or a gradient stops or doubles."""
    run = lora.run_of(make_config(**CASES[case]))
    losses = lora.losses_of(run, lora.make_batch())
    here, unrounded = expected()
    np.testing.assert_allclose(losses, here, rtol=2e-6)
    assert losses[0] - losses[-1] > 0.1
    assert np.abs(np.subtract(losses, unrounded)).max() > 1e-4


def test_a_run_goes_on_on_another_mesh(tmp_path):
    """Fails if a shard of a mesh is rounded, or rounded matrices are saved."""
    zero, batch = {"stage": 3, "min_shard_elements": 0}, lora.make_batch()
    meshes = {"data": 8}, {"data": 4, "tensor": 2}
    first, second = (lora.run_of(make_config(zero=zero, mesh=mesh)) for mesh in meshes)
    losses, state = [], first.state
    for step in range(lora.STEPS):
        if step == lora.STEPS // 2:
            zjax.save(str(tmp_path), state, first)
            state, _ = zjax.restore(str(tmp_path), second)
        run = first if step < lora.STEPS // 2 else second
        state, metrics = run.step(state, batch)
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses, expected()[0], rtol=2e-6)


@pytest.mark.parametrize("mesh", [{}, {"expert": 2, "tensor": 2}])
def test_experts_are_rounded_one_by_one(mesh):
    """Fails if experts are not rounded, or share scales."""
    shape = lora.SHAPE | {"moe": MOE}
    run = lora.run_of(make_config(model=shape, mesh=mesh))
    losses = lora.losses_of(run, lora.make_batch())
    here, unrounded = expected(with_experts=True)
    np.testing.assert_allclose(losses, here, rtol=1e-5)
    assert np.abs(np.subtract(losses, unrounded)).max() > 1e-4


def test_frozen_matrices_are_rounded_beside_adapters():
    """Fails if adapters are rounded, or the matrices beside them are not."""
    adapters = {"rank": lora.RANK, "alpha": lora.ALPHA}
    config = make_config(adapters=adapters, zero={"stage": 0})
    plain = lora.make_model(make_config(None))
    batch = jax.tree.map(jnp.asarray, lora.make_batch())
    losses, _ = lora.oracle(
        by_numpy(lora.first_params(config)),
        "lora",
        lambda merged: plain.loss(merged, {}, batch, None).value,
    )
    found = lora.losses_of(lora.run_of(config), lora.make_batch())
    np.testing.assert_allclose(found, losses, rtol=1e-5)


@pytest.mark.parametrize("mesh", [{}, {"tensor": 2}])
def test_tokens_are_rounded_with_a_scale_each(mesh):
    """Fails if activations are not rounded, or devices round parts of a token."""
    rules = [{"weights": "int8", "group_size": 0, "activations": "float8"}]
    found = lora.losses_of(
        lora.run_of(make_config(rules, mesh=mesh)), lora.make_batch()
    )
    weights = [rules[0] | {"activations": "compute"}]
    one = activations_on_one_device()
    np.testing.assert_allclose(found, one, rtol=3e-6)
    without = lora.losses_of(lora.run_of(make_config(weights)), lora.make_batch())
    assert np.abs(np.subtract(found, without)).max() > 5e-5


@functools.cache
def activations_on_one_device():
    """Losses of plain functions on one device."""
    rules = [{"weights": "int8", "group_size": 0, "activations": "float8"}]
    config = make_config(rules)
    model, params = lora.make_model(config), lora.first_params(config)
    batch = jax.tree.map(jnp.asarray, lora.make_batch())
    step = jax.jit(jax.value_and_grad(lambda p: model.loss(p, {}, batch, None).value))
    losses = []
    for _ in range(lora.STEPS):
        value, grads = step(params)
        params = jax.tree.map(lambda x, g: x - lora.RATE * g, params, grads)
        losses.append(float(value))
    return losses


@pytest.mark.parametrize("names", [("embed", "mlp"), ("mlp", "embed"), (None, None)])
def test_a_layer_multiplies_rounded_tokens(names):
    """Fails if a layer that is split by columns, rows or not at all skips rounding."""
    inputs, outputs = (
        ((name, size),) for name, size in zip(names, (16, 6), strict=True)
    )
    layer = layers.Linear(inputs, outputs, use_bias=False, rngs=nnx.Rngs(0))
    layer.rounding = Rule(weights="int4", group_size=8, activations="int8")
    x = np.asarray(jax.random.normal(jax.random.key(0), (2, 3, 16)))
    rows = rounded_by_numpy(x.reshape(6, 16).T, "int8", 16)[0].T
    kernel = rounded_by_numpy(np.asarray(layer.kernel[...]), "int4", 8)[0]
    found = np.asarray(layer(jnp.asarray(x))).reshape(6, 6)
    np.testing.assert_allclose(found, rows @ kernel, rtol=1e-4, atol=1e-6)
    assert np.abs(found - x.reshape(6, 16) @ kernel).max() > 1e-5
