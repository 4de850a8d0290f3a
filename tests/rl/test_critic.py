"""Values of tokens: a head on the policy's blocks, or a critic of its own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zjax
from tests.rl.test_policy import ADVANTAGES, OLD, ROLLOUTS, make_config
from tests.support import policies, small_run
from tests.support.first_state import first_state
from tests.support.trees import stacked, unpadded
from zjax import rl
from zjax.run.build import make_run

OLD_VALUES = [0.1 * np.arange(len(x)) for x in OLD]
RETURNS = [np.sin(np.arange(len(x))) for x in OLD]
VALUE = rl.Value(weight=0.5, clip=0.3)
PPO = rl.Objective(value=VALUE, temperature=policies.TEMPERATURE)
KEPT = [i for i in range(len(ROLLOUTS)) if i != 4]


def make_batch():
    packed = rl.pack(ROLLOUTS, ADVANTAGES, length=16, num_rows=8)
    return packed.with_arrays(old_logprobs=OLD, values=OLD_VALUES, returns=RETURNS)


def start(make, settings="mesh.data=1"):
    """A run whose weights are not drawn, and whose values are not 0."""
    config = make_config(f"{settings} model.value_head=True")
    devices = jax.devices()[: config.mesh.data * config.mesh.tensor]
    model = make(config)
    batch = make_batch().batch
    given = {"devices": devices, "batch": batch, "restore": first_state(config, model)}
    return make_run(config, model, optax.sgd(1.0), **given), batch


def params_of(run, state):
    return stacked(unpadded(state.master, run.plan.master))


def values_by_hand(model, params, rollouts=ROLLOUTS):
    """The product of the head's vector with the last hidden state of each token."""
    tokens, stack = jnp.asarray(policies.padded(rollouts)), model.stack
    embed, segments, head = stack.split(jax.tree.map(jnp.asarray, params))
    carry, context = stack.embed(embed, {"tokens": tokens}, None)
    for number in range(stack.segments[0].num_blocks):
        block = jax.tree.map(lambda x, i=number: x[i], segments[0])
        carry, _ = stack.segments[0].block(block, carry, context, None)
    hidden, _ = stack.factors(head, carry)
    values = hidden @ params["head"]["value"]
    sizes = [(len(x.prompt_ids) - 1, len(x.ids)) for x in rollouts]
    return [row[m : m + n] for row, (m, n) in zip(values, sizes, strict=True)]


def loss_by_hand(model, params):
    """The mean loss of values over the tokens that count."""
    total, count, found = 0.0, 0, values_by_hand(model, params)
    for i in KEPT:
        near = jnp.clip(found[i], OLD_VALUES[i] - 0.3, OLD_VALUES[i] + 0.3)
        errors = [jnp.square(x - RETURNS[i]) for x in (found[i], near)]
        total += jnp.maximum(*errors).sum() / 2
        count += len(near)
    return total / count


def policy(config):
    return rl.policy_model(config, PPO)


def critic(config):
    return rl.critic_model(config, VALUE)


def test_values_are_products_with_hidden_states():
    run, batch = start(policy, "mesh.data=2 mesh.tensor=2 zero.stage=3")
    found = np.asarray(rl.values_of(run, run.state, batch))
    params, unpacked = params_of(run, run.state), make_batch().unpack(found)
    by_hand = jax.jit(functools.partial(values_by_hand, run.model))(params)
    for i in KEPT:
        np.testing.assert_allclose(unpacked[i], by_hand[i], rtol=1e-4, atol=1e-5)


def test_a_critic_of_its_own_learns_values():
    run, batch = start(critic, "mesh.data=2 zero.stage=3 num_microbatches=2")
    before, model = params_of(run, run.state), run.model
    loss = functools.partial(loss_by_hand, model)
    expected, gradient = jax.jit(jax.value_and_grad(loss))(before)
    state, metrics = run.step(run.state, batch)
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-4)
    np.testing.assert_allclose(metrics["value_loss"], expected, rtol=1e-4)
    jax.tree.map(
        lambda x, y, z: np.testing.assert_allclose(x - y, z, rtol=2e-3, atol=1e-5),
        before,
        params_of(run, state),
        jax.tree.map(np.asarray, gradient),
    )


def test_a_policy_and_values_share_blocks():
    """The loss is the sum of both; the critic's gradient reaches the blocks."""
    run, batch = start(policy)
    loss = jax.jit(functools.partial(loss_by_hand, run.model))
    expected = loss(params_of(run, run.state))
    plain = rl.policy_model(run.config, rl.Objective(temperature=PPO.temperature))
    params = jax.tree.map(jnp.asarray, params_of(run, run.state))
    alone = jax.jit(plain.loss)(params, {}, jax.tree.map(jnp.asarray, batch), None)
    state, metrics = run.step(run.state, batch)
    total = alone.value + 0.5 * expected
    np.testing.assert_allclose(metrics["loss"], total, rtol=1e-4)
    np.testing.assert_allclose(metrics["value_loss"], expected, rtol=1e-4)
    assert "entropy" in metrics
    moved = params_of(run, state)["head"]["value"] - np.asarray(params["head"]["value"])
    assert abs(moved).max() > 1e-3


def test_a_critic_starts_from_a_model_without_values(tmp_path):
    """Weights of another seed than the critic's, which it would draw itself."""
    saved = small_run.make_trainer(tmp_path / "sft", "seed=1", num_devices=1)
    with saved.loader:
        saved.save()
    saved.close()
    config = small_run.make_config(
        tmp_path / "critic",
        "model.value_head=True",
        "model.dropout_rate=0",
        f"checkpoint.init_from={tmp_path / 'sft'}",
    )
    rollouts = policies.make_rollouts(shapes=[(3, 4)] * 16)
    packed = rl.pack(rollouts, [1.0] * 16, length=16, num_rows=16)
    zeros = [np.zeros(4)] * 16
    batch = packed.with_arrays(values=zeros, returns=zeros).batch
    model, devices = rl.critic_model(config, VALUE), jax.devices()[:1]
    run = make_run(config, model, optax.sgd(1.0), devices=devices, batch=batch)
    found = params_of(run, run.state)
    np.testing.assert_array_equal(found["head"].pop("value"), 0)
    jax.tree.map(np.testing.assert_array_equal, found, small_run.arrays(saved))


def test_models_without_values_are_refused():
    config = make_config("mesh.data=1")
    for make, text in (
        (policy, "model.value_head=False has no values for the objective; use True"),
        (critic, "model.value_head=False has no values for a critic; use True"),
    ):
        with pytest.raises(zjax.errors.ConfigError) as error:
            make(config)
        assert str(error.value) == text
    plain = rl.policy_model(config, rl.Objective())
    devices, batch = jax.devices()[:1], make_batch().batch
    given = {"devices": devices, "batch": batch, "restore": first_state(config, plain)}
    run = make_run(config, plain, optax.sgd(1.0), **given)
    with pytest.raises(zjax.errors.ModelError) as error:
        rl.values_of(run, run.state, batch)
    assert str(error.value) == (
        "model='given' is no stack with values; use a decoder with "
        "model.value_head=True, or set it in the zjax.Stack"
    )
