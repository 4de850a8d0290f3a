"""Trap 1 in a step: microbatches and devices change neither loss nor gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tests.support.rl import ADVANTAGES, MASK, NEW, OLD
from zjax import rl
from zjax.train.microbatches import accumulate
from zjax.typing import Loss

ROWS = np.arange(8) % 6
BATCH = {
    "features": NEW[ROWS],
    "old": OLD[ROWS],
    "advantages": ADVANTAGES[ROWS],
    "mask": MASK[ROWS],
}
"""Sequences of 5, 3, 1, 4, 2, 5, 5 and 3 tokens."""
AGGREGATIONS = {
    "token_mean": rl.token_mean,
    "sequence_mean": rl.sequence_mean,
    "constant_mean": functools.partial(rl.constant_mean, length=5),
}
each = pytest.mark.parametrize("aggregate", AGGREGATIONS.values(), ids=AGGREGATIONS)


def loss_of(aggregate, param, batch):
    """The mean and the weight of a microbatch, as a run takes a loss."""
    mask = batch["mask"]
    ratios = rl.token_ratios(param * batch["features"], batch["old"], mask)
    losses = rl.clip_loss(ratios, batch["advantages"], mask, low=0.2, high=0.28)
    found = aggregate(losses, mask)
    return Loss(found.mean, found.weight, (), {})


def step(aggregate, param, batch, num_microbatches):
    """The gradient and the loss of a step with accumulation."""

    def one(state, microbatch, key):
        def mean(param):
            loss = loss_of(aggregate, param, microbatch)
            return loss.value, loss

        grads, loss = jax.grad(mean, has_aux=True)(param)
        return grads, loss

    parts = jax.tree.map(lambda x: x.reshape(num_microbatches, -1, *x.shape[1:]), batch)
    return accumulate(one, jnp.zeros(()), (), parts, jax.random.key(0))


@each
@pytest.mark.parametrize("num_microbatches", [2, 4, 8])
def test_trap_1_microbatches_change_nothing(aggregate, num_microbatches):
    batch = jax.tree.map(jnp.asarray, BATCH)
    param = jnp.float32(1.01)
    found = step(aggregate, param, batch, num_microbatches)
    expected = step(aggregate, param, batch, 1)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5), found, expected
    )


@each
def test_trap_1_devices_change_nothing(aggregate):
    mesh = jax.make_mesh((8,), ("rows",))
    rows = NamedSharding(mesh, PartitionSpec("rows"))
    param = jnp.float32(1.01)
    compiled = jax.jit(functools.partial(step, aggregate, num_microbatches=1))
    found = compiled(param, jax.device_put(BATCH, rows))
    expected = compiled(param, jax.tree.map(jnp.asarray, BATCH))
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5), found, expected
    )


def test_trap_1_a_mean_of_means_is_another_loss():
    """Fails if these sequences could not tell a local count from a global count."""
    batch = jax.tree.map(jnp.asarray, BATCH)
    halves = [jax.tree.map(lambda x, i=i: x[4 * i : 4 * i + 4], batch) for i in (0, 1)]
    param = jnp.float32(1.01)
    local = sum(loss_of(rl.token_mean, param, half).value for half in halves) / 2
    whole = loss_of(rl.token_mean, param, batch).value
    assert abs(local - whole) > 0.01
