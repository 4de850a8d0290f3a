"""Rows of pre-training beside texts: the ptx term, by global numbers of tokens."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.rl.test_policy import make_config
from tests.support import policies, rl_run
from tests.support.refusals import config_error
from tests.support.trees import stacked, unpadded
from zjax import rl
from zjax.models.build import make_model
from zjax.rl.pretraining import Pretraining
from zjax.run.batch import with_batch_sizes
from zjax.run.build import make_run
from zjax.typing import IGNORED

WEIGHT = 3.0
RL = "rl.rollout.num_prompts=4 rl.rollout.num_samples=2 rl.rollout.max_new_tokens=8"
SETTINGS = f"{RL} rl.pretraining.num_rows=4 model.num_layers=1 mesh.data=1"
PLAIN = rl.Objective(temperature=policies.TEMPERATURE)
MIXED = dataclasses.replace(PLAIN, pretraining_weight=WEIGHT)


def settings_of(text=""):
    return with_batch_sizes(make_config(f"{SETTINGS} {text}"), 1)


@pytest.fixture(scope="module")
def batches():
    """A text in the first of four rows, and the batch with rows of pre-training."""
    rollouts = policies.make_rollouts()[:1]
    packed = rl.pack(rollouts, [0.7], length=16, num_rows=4)
    extended = Pretraining(settings_of()).extend(packed.batch, 5)
    # As answers alone count in conversations: some tokens of text have no loss.
    extended["rl"]["pretraining"][4, :5] = 0
    left = (extended["rl"]["pretraining"] > 0).sum()
    total = packed.batch["rl"]["units"].sum()
    counts = extended["rl"]["pretraining"] > 0
    extended["rl"]["units"][4:] = total / left * counts[4:]
    extended["rl"]["pretraining"][counts] = total / left
    return packed.batch, extended


@pytest.fixture(scope="module")
def oracle(batches):
    """Function of parameters: both means, each over its own tokens, added."""
    plain, extended = (jax.tree.map(jnp.asarray, x) for x in batches)
    config = make_config(SETTINGS)
    policy, decoder = rl.policy_model(config, PLAIN), make_model(config)

    def loss(params):
        logits = decoder.bind(params, {})(extended["tokens"][4:])
        found = jax.nn.log_softmax(logits)
        targets = extended["targets"][4:]
        chosen = jnp.take_along_axis(found, jnp.maximum(targets, 0)[..., None], -1)
        counts = extended["rl"]["pretraining"][4:] > 0
        mean = -(chosen[..., 0] * counts).sum() / counts.sum()
        return policy.loss(params, {}, plain, None).value + WEIGHT * mean, mean

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


@pytest.mark.parametrize("mesh", ["num_microbatches=1", "num_microbatches=4"])
def test_a_step_adds_the_mean_over_the_tokens_of_pretraining(batches, oracle, mesh):
    """Fails if a mean is of a microbatch, or one of pre-training alone is dropped."""
    config = make_config(f"{SETTINGS} {mesh}")
    model, devices = rl.policy_model(config, MIXED), jax.devices()[:1]
    run = make_run(config, model, optax.sgd(1.0), devices=devices, batch=batches[1])
    before = stacked(unpadded(run.state.master, run.plan.master))
    (loss, mean), gradient = oracle(jax.tree.map(jnp.asarray, before))
    state, metrics = run.step(run.state, batches[1])
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    np.testing.assert_allclose(metrics["pretraining_loss"], mean, rtol=1e-5)
    np.testing.assert_allclose(metrics["ratio"], 1, rtol=1e-6)
    after = stacked(unpadded(state.master, run.plan.master))
    jax.tree.map(
        lambda x, y, z: np.testing.assert_allclose(x - y, z, rtol=2e-3, atol=2e-6),
        *(before, after, gradient),
    )


def test_rows_follow_from_seed_and_step(batches):
    extra, plain = Pretraining(settings_of()), batches[0]
    first, again, other = (extra.extend(plain, step) for step in (0, 0, 1))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert (first["tokens"][4:] != other["tokens"][4:]).any()
    np.testing.assert_array_equal(first["tokens"][:4], plain["tokens"])
    assert not first["weights"][4:].any()
    shares = first["rl"]["pretraining"]
    assert not shares[:4].any()
    np.testing.assert_allclose(shares.sum(), plain["rl"]["units"].sum(), rtol=1e-6)


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_rows_are_learned_beside_texts_without_a_reward(num_microbatches):
    """Fails if a step whose texts have no reward learns nothing, or its rows twice."""
    rollouts = policies.make_rollouts()[:1]
    nothing = rl.pack(rollouts, [np.nan], length=16, num_rows=4).batch
    batch = Pretraining(settings_of()).extend(nothing, 0)
    logits = jax.random.normal(jax.random.key(0), (8, 16, policies.VOCAB))
    sums = np.zeros(2)
    for part in range(num_microbatches):
        rows = slice(part, None, num_microbatches)
        given = jax.tree.map(lambda x, rows=rows: jnp.asarray(x[rows]), batch)
        loss, weight, _ = rl.policy_loss(logits[rows], given, MIXED)
        sums += float(loss * weight), float(weight)
    targets = batch["targets"][4:]
    found = jax.nn.log_softmax(logits[4:])
    chosen = jnp.take_along_axis(found, jnp.maximum(targets, 0)[..., None], -1)[..., 0]
    mean = -chosen[targets != IGNORED].mean()
    np.testing.assert_allclose(sums[0] / sums[1], WEIGHT * mean, rtol=1e-5)
    np.testing.assert_allclose(sums[1], 1, rtol=1e-6)


def test_rows_without_an_answer_leave_the_loss_of_the_policy_as_it_is(batches):
    """Fails if a step whose rows are parts of long prompts counts its texts twice."""
    extra, plain = Pretraining(settings_of()), batches[0]
    read = extra._rows.read
    nothing = {"weights": np.zeros((4, 16), np.float32)}
    extra._rows = SimpleNamespace(read=lambda indices: read(indices) | nothing)
    plain, extended = (
        jax.tree.map(jnp.asarray, x) for x in (plain, extra.extend(plain, 0))
    )
    logits = jax.random.normal(jax.random.key(0), (8, 16, policies.VOCAB))
    loss, weight, metrics = rl.policy_loss(logits, extended, MIXED)
    expected, half, shown = rl.policy_loss(logits[:4], plain, PLAIN)
    np.testing.assert_allclose([loss, weight], [expected, 2 * half], rtol=1e-6)
    np.testing.assert_allclose(metrics["entropy"], shown["entropy"], rtol=1e-6)
    assert metrics["pretraining_loss"] == 0


def test_rows_divide_over_shares_and_microbatches():
    text = "rl.pretraining.num_rows=3 does not divide over 2 shares and microbatches; "
    with config_error(text + "use a multiple of 2, or 0"):
        Pretraining(settings_of("rl.pretraining.num_rows=3 num_microbatches=2"))


@pytest.mark.parametrize(("num_devices", "microbatches"), [(1, 1), (2, 1), (2, 2)])
def test_rows_are_as_many_as_texts_on_any_devices(num_devices, microbatches):
    """Fails if a run that goes on elsewhere reads other rows."""
    given = "rl.pretraining.num_rows=0 rl.pretraining.weight=1.0 mesh.data=-1 "
    config = make_config(f"{SETTINGS} {given} num_microbatches={microbatches}")
    found = Pretraining(with_batch_sizes(config, num_devices))
    assert found.num_rows == found.position["rl.pretraining.num_rows"] == 8


def test_a_run_learns_its_data_beside_its_texts(tmp_path):
    """Fails if no row of data reaches a step, or the rewards alone are learned."""
    rewards = "rl.rewards=[{'function': 'tests.support.rl_rewards:constant'}]"
    given = rewards, "rl.pretraining.weight=2.0", "num_steps=3"
    rl_run.fit(tmp_path, *given, num_devices=1)
    losses = [row["pretraining_loss"] for row in rl_run.records(tmp_path)]
    assert losses[0] == pytest.approx(np.log(257), abs=0.3)
    assert losses[2] < losses[0] - 0.05
