"""Replicas that send each other packed gradients take the steps of one device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.support import models, runs
from tests.support.crossing import crossing, is_large
from zjax.settings import schema
from zjax.sharding.mesh import REPLICA
from zjax.train.update import Sent, make_update
from zjax.typing import Loss

MESHES = {
    "replica8": schema.Mesh(replica=8),
    "replica2-data4": schema.Mesh(replica=2),
    "replica4-tensor2": schema.Mesh(replica=4, tensor=2),
}
TOLERANCES = {"bfloat16": 2e-2, "int8": 2e-2}


def make_run(codec, mesh="replica2-data4", stage=0, **settings):
    communication = schema.Communication(codec=codec)
    return runs.make_small_run(
        optax.sgd(0.5),
        stage,
        mesh=MESHES[mesh],
        communication=communication,
        **settings,
    )


@pytest.fixture(scope="module")
def alone():
    return runs.train(runs.make_small_run(optax.sgd(0.5), 0, num_devices=1), 10)


@pytest.mark.parametrize("codec", TOLERANCES)
@pytest.mark.parametrize(
    ("mesh", "stage"),
    [
        ("replica8", 0),
        ("replica2-data4", 3),
        ("replica4-tensor2", 0),
        ("replica4-tensor2", 3),
    ],
)
def test_ten_steps_are_close_to_one_device(alone, mesh, stage, codec):
    """Fails if weights of replicas are ignored, or a sum is taken for a mean."""
    run = make_run(codec, mesh, stage, num_microbatches=2)
    losses, state = runs.train(run, 10)
    np.testing.assert_allclose(losses, alone[0], rtol=TOLERANCES[codec])
    for name in ("up", "down"):
        expected = np.asarray(alone[1].master[name])
        moved = expected - np.asarray(models.init(jax.random.key(0))[name])
        error = np.asarray(state.master[name]) - expected
        assert np.abs(error).max() < TOLERANCES[codec] * np.abs(moved).max()


def test_gradients_cross_replicas_in_the_form_of_the_codec():
    """Fails if the compiler reduces gradients over replicas, too."""
    run = make_run("int8", "replica8")
    sent = list(filter(is_large, crossing(run)))
    assert sorted(each.op for each in sent) == ["all-gather", "all-to-all"]
    assert {each.dtype for each in sent} == {"u8"}


def test_a_gradient_that_is_not_finite_changes_no_error():
    """Fails if one bad step is fed back into all later ones."""
    run = make_run("int8", "replica8")
    batch = models.make_batch()
    state, _ = run.step(run.state, batch)
    before = jax.tree.map(np.asarray, (state.extra, state.master))
    assert np.abs(before[0].worker).max() > 0
    batch["x"][3] = np.inf
    state, metrics = run.step(state, batch)
    assert metrics["skipped_steps"] == 1
    jax.tree.map(np.testing.assert_array_equal, (state.extra, state.master), before)


def by_value(rate):
    """Steps as long as the loss is large, and one that its gradient tells."""

    def update(updates, state, params=None, **extra):
        value, own = jax.value_and_grad(extra["value_fn"])(params)
        return jax.tree.map(lambda g, o: -rate * (g * value + o), updates, own), state

    return optax.GradientTransformationExtraArgs(optax.sgd(rate).init, update)


@pytest.mark.parametrize("separable", [True, False])
def test_the_loss_that_an_optimizer_asks_for_is_that_of_all_replicas(separable):
    """Fails if each replica steps by the loss or the gradient of its own rows."""
    model = dataclasses.replace(models.make_mlp(), separable=separable)
    settings = {"num_devices": 2, "model": model, "mesh": schema.Mesh(replica=2)}
    found, expected = (
        runs.train(
            runs.make_small_run(
                by_value(0.1),
                0,
                communication=schema.Communication(codec=codec),
                **settings,
            ),
            3,
        )
        for codec in ("bfloat16", "none")
    )
    np.testing.assert_allclose(found[0], expected[0], rtol=5e-3)
    for x in jax.tree.leaves(found[1].master):
        first, second = (np.asarray(shard.data) for shard in x.addressable_shards)
        np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize(
    "communication",
    [
        schema.Communication(codec="bfloat16"),
        schema.Communication(local_steps=schema.LocalSteps(num_steps=2)),
    ],
    ids=["codec", "local-steps"],
)
def test_an_optimizer_asks_for_the_loss_that_it_was_given(communication):
    """Fails if replicas draw other numbers when they compute the loss again."""

    def update(updates, state, params=None, **extra):
        change = extra["value_fn"](params) - extra["value"]
        return jax.tree.map(lambda u: u * 0 + change, updates), state

    def loss(params, model_state, batch, key):
        found = mlp.loss(params, model_state, batch, key)
        return found._replace(value=found.value + jax.random.uniform(key))

    mlp = models.make_mlp()
    run = runs.make_small_run(
        optax.GradientTransformationExtraArgs(optax.sgd(0.1).init, update),
        0,
        num_devices=2,
        model=dataclasses.replace(mlp, loss=loss, separable=False),
        mesh=schema.Mesh(replica=2),
        communication=communication,
        num_steps=2,
    )
    before = np.asarray(run.state.master["up"])
    _, state = runs.train(run, 2)
    np.testing.assert_allclose(state.master["up"], before, atol=1e-5)


def test_an_optimizer_with_a_line_search_trains_with_a_codec():
    """Fails if it is told of phases, of which it knows nothing."""
    settings = {"num_devices": 2, "mesh": schema.Mesh(replica=2)}
    communication = schema.Communication(codec="int8")
    run = runs.make_small_run(
        optax.lbfgs(0.1), 0, communication=communication, **settings
    )
    state, first = run.step(run.state, models.make_batch())
    _, second = run.step(state, models.make_batch())
    assert float(second["loss"]) < float(first["loss"])


def test_clipping_reads_the_norm_of_what_arrived():
    """Fails if the norm before the exchange clips: it is 10, and that of the mean 5."""

    def halves(tree, errors, applies):
        return jax.tree.map(lambda x: x / 2, tree), errors

    settings = schema.Optimizer(clip_norm=1.0)
    run = runs.make_small_run(optax.sgd(0.1), 0, optimizer=settings)
    sent = Sent(halves)
    precision = run.config.precision
    update = make_update(
        optax.sgd(0.1), run.plan, run.config.optimizer, precision, None, None, sent
    )
    loss = Loss(jnp.float32(1), jnp.float32(1), (), {}, ())
    clipped = jax.vmap(
        lambda grads: update.clipped(grads, (), (), loss)[:2], axis_name=REPLICA
    )
    grads, norm = clipped({"w": jnp.array([[6.0, 8.0]] * 2)})
    np.testing.assert_allclose(norm, [5.0, 5.0], rtol=1e-6)
    np.testing.assert_allclose(grads["w"], [[0.6, 0.8]] * 2, rtol=1e-5)
