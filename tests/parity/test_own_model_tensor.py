"""A Flax model of a user on the tensor axis, by its own metadata or by rules."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tests.support import models
from tests.support.trees import assert_close
from zjax.errors import PlanError
from zjax.observe.collectives import list_collectives, mesh_axes
from zjax.run.initialize import initialize
from zjax.settings import schema
from zjax.sharding import memory

PLACES = {"up": ("embed", "mlp"), "down": ("tensor", None)}


class LinenNet(nn.Module):
    named: bool = False

    @nn.compact
    def __call__(self, x):
        def dense(name, size):
            init = nn.initializers.lecun_normal()
            if self.named and name == "up":
                init = nn.with_logical_partitioning(init, PLACES[name])
            elif self.named:
                init = nn.with_partitioning(init, PLACES[name])
            return nn.Dense(size, use_bias=False, kernel_init=init, name=name)

        hidden = dense("up", models.HIDDEN)(x)
        return dense("down", models.WIDTH)(nn.gelu(hidden))


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        def linear(name, *sizes):
            init = nnx.with_partitioning(nnx.initializers.lecun_normal(), PLACES[name])
            return nnx.Linear(*sizes, use_bias=False, kernel_init=init, rngs=rngs)

        self.up = linear("up", models.WIDTH, models.HIDDEN)
        self.down = linear("down", models.HIDDEN, models.WIDTH)

    def __call__(self, x):
        return self.down(nnx.gelu(self.up(x)))


RULES = (
    schema.DimRule(pattern="up/kernel$", dims=("", "tensor")),
    schema.DimRule(pattern="down/kernel$", dims=("tensor",)),
)


def loss_fn(model, batch, key):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def start(model, mesh, num_devices, **settings):
    config = schema.Config(
        mesh=mesh,
        **settings,
        precision=schema.Precision(compute_dtype="float32"),
        zero=schema.Zero(min_shard_elements=0),
    )
    devices = jax.devices()[:num_devices]
    batch = models.make_batch()
    return initialize(model, optax.sgd(0.1), loss_fn, batch, config, devices=devices)


def train(run):
    state, losses = run.state, []
    for step in range(3):
        state, metrics = run.step(state, models.make_batch(step))
        losses.append(float(metrics["loss"]))
    return losses, jax.tree.map(np.asarray, state.master)


@pytest.mark.parametrize(
    ("model", "rules"),
    [
        pytest.param(LinenNet(named=True), (), id="linen-metadata"),
        pytest.param(NnxNet, (), id="nnx-metadata"),
        pytest.param(LinenNet(), RULES, id="rules"),
    ],
)
def test_own_model_is_split_and_trains_as_on_one_device(model, rules):
    """Fails if metadata or rules are not read, or placed otherwise than they say."""
    run = start(model, schema.Mesh(data=2, tensor=4, rules=rules), 8)
    whole = memory.num_params(run.plan)
    assert memory.tree_bytes(run.plan.compute) == 4 * whole // 4
    losses, weights = train(run)
    expected, expected_weights = train(start(model, schema.Mesh(), 1))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for one, other in zip(
        jax.tree.leaves(weights), jax.tree.leaves(expected_weights), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("model", "rules"),
    [(NnxNet, ()), (LinenNet(), RULES)],
    ids=["nnx-metadata", "linen-rules"],
)
def test_adapters_are_split_as_their_kernels(model, rules):
    """Fails if a rule for kernels leaves adapters whole, or they learn otherwise."""
    adapters = schema.Lora(rank=2, form="dora")
    mesh = schema.Mesh(data=2, tensor=4, rules=rules)
    run = start(model, mesh, 8, lora=adapters)
    plans = {row.path: row.used.spec for row in jax.tree.leaves(run.plan.compute)}
    split = {path for path, spec in plans.items() if "tensor" in spec}
    assert split - {"up/kernel", "down/kernel"} == {
        "up/lora/b",
        "up/lora/magnitude",
        "down/lora/a",
    }
    losses, weights = train(run)
    expected, expected_weights = train(start(model, schema.Mesh(), 1, lora=adapters))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert np.abs(expected_weights["up"]["lora"]["b"]).max() > 1e-3
    assert_close(weights, expected_weights, rtol=1e-4, atol=1e-6)


def test_split_matrices_send_one_sum():
    run = start(LinenNet(), schema.Mesh(data=2, tensor=4, rules=RULES), 8)
    text = run.step.compile(models.make_batch()).as_text()
    found = list_collectives(text)
    along = [c for c in found if mesh_axes(c.groups, run.plan.mesh) == ("tensor",)]
    rows = models.BATCH // 2 * models.WIDTH
    assert [c.op for c in along if c.elements >= rows] == ["all-reduce"]


def test_rules_that_match_nothing_are_refused():
    rules = (schema.DimRule(pattern="attention", dims=("heads",)),)
    with pytest.raises(PlanError) as error:
        start(LinenNet(), schema.Mesh(tensor=4, rules=rules), 8)
    assert str(error.value) == (
        "mesh.rules[0].pattern='attention' matches none of 2 parameters; paths look "
        "like up/kernel, down/kernel"
    )
