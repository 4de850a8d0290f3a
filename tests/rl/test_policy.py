"""A policy's step equals a plain oracle, on every mesh and with any microbatches."""

import dataclasses
import functools

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zjax
from tests.support import policies
from tests.support.first_state import first_state, first_weights
from tests.support.trees import stacked, unpadded
from zjax import rl
from zjax.models.build import make_model
from zjax.run.build import make_run
from zjax.sharding import plan

ROLLOUTS = policies.make_rollouts()
ADVANTAGES = np.random.default_rng(1).normal(size=len(ROLLOUTS)).astype(np.float32)
ADVANTAGES[4] = np.nan
OLD, REFERENCE = policies.make_values(2), policies.make_values(3)
OBJECTIVE = rl.Objective(
    rl.Clip(high=0.28, bound=3.0),
    kl=rl.Kl(0.1),
    correction=rl.Correction(bound=1.3),
    entropy_weight=0.05,
    temperature=policies.TEMPERATURE,
)
SEQUENCES = dataclasses.replace(
    OBJECTIVE,
    loss=rl.Clip(0.03, 0.04),
    ratios="sequences",
    correction=rl.Correction("sequences", "mask", bound=2.0, lowest=0.3),
)


def make_config(settings=""):
    given = {
        "global_batch_size": 8,
        "zero": {"stage": 0, "min_shard_elements": 0},
        "precision": {"compute_dtype": "float32"},
        "optimizer": {"clip_norm": float("inf")},
        "model": policies.MODEL,
        "data": {"length": policies.LENGTH, "source": "synthetic"},
    }
    return zjax.load_config(given, *settings.split())


def packed(aggregation="token_mean", **settings):
    constant = 12 if aggregation == "constant_mean" else 0
    settings = {"length": 16, "num_rows": 8} | settings
    found = rl.pack(
        ROLLOUTS, ADVANTAGES, aggregation=aggregation, constant=constant, **settings
    )
    return found.with_arrays(old_logprobs=OLD, reference_logprobs=REFERENCE)


def step_of(objective, batch, settings="mesh.data=1"):
    """The metrics and the change of the parameters of one step of descent."""
    config = make_config(settings)
    model = rl.policy_model(config, objective)
    mesh = config.mesh
    number = mesh.data * mesh.tensor * mesh.pipeline * mesh.sequence
    devices = jax.devices()[:number]
    given = {"devices": devices, "batch": batch, "restore": first_state(config, model)}
    run = make_run(config, model, optax.sgd(1.0), **given)
    before = stacked(unpadded(run.state.master, run.plan.master))
    state, metrics = run.step(run.state, batch)
    after = stacked(unpadded(state.master, run.plan.master))
    return metrics, jax.tree.map(np.subtract, before, after), before


def divergence(logprobs, reference):
    """The value of k3 with the gradient of k2."""
    gap = reference - logprobs
    value = jnp.exp(gap) - gap - 1
    return gap**2 / 2 + jax.lax.stop_gradient(value - gap**2 / 2)


def dapo(i, logprobs, entropies):
    ratio, advantage = jnp.exp(logprobs - OLD[i]), ADVANTAGES[i]
    loss = -jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.28) * advantage)
    if advantage < 0:
        loss = jnp.minimum(loss, -3.0 * advantage)
    weight = np.minimum(np.exp(OLD[i] - ROLLOUTS[i].logprobs), 1.3)
    return weight * loss + 0.1 * divergence(logprobs, REFERENCE[i]) - 0.05 * entropies


def gspo(i, logprobs, entropies):
    stop = jax.lax.stop_gradient
    mean = stop(jnp.mean(logprobs - OLD[i]))
    ratio, advantage = jnp.exp(mean + logprobs - stop(logprobs)), ADVANTAGES[i]
    loss = -jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.97, 1.04) * advantage)
    weight = np.exp(np.sum(OLD[i] - ROLLOUTS[i].logprobs))
    weight *= 0.3 <= weight <= 2.0
    return weight * loss + 0.1 * divergence(logprobs, REFERENCE[i]) - 0.05 * entropies


CASES = {
    "token_mean": (OBJECTIVE, dapo),
    "sequence_mean": (SEQUENCES, gspo),
    "constant_mean": (OBJECTIVE, dapo),
}
LENGTHS = [len(x.ids) for i, x in enumerate(ROLLOUTS) if i != 4]


def weight_of(aggregation):
    """What a token adds to the mean of the whole step, by the definitions."""
    match aggregation:
        case "token_mean":
            return lambda n: 1 / sum(LENGTHS)
        case "sequence_mean":
            return lambda n: 1 / (n * len(LENGTHS))
    return lambda n: 1 / (12 * len(LENGTHS))


@functools.cache
def expected(aggregation, layers=""):
    """Loss and gradient of the rollouts that count."""
    token_loss = CASES[aggregation][1]
    kept = [i for i in range(len(ROLLOUTS)) if i != 4]

    def loss_of_kept(i, *args):
        return token_loss(kept[i], *args)

    rollouts = [ROLLOUTS[i] for i in kept]
    config = make_config(layers)
    params = first_weights(make_model(config).init)
    return policies.oracle(
        config, params, rollouts, loss_of_kept, weight_of(aggregation)
    )


def assert_equal(found, expected):
    metrics, gradient, _ = found
    np.testing.assert_allclose(metrics["loss"], expected[0], rtol=2e-5)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=2e-6),
        gradient,
        jax.tree.map(np.asarray, expected[1]),
    )


@pytest.mark.parametrize(
    ("aggregation", "settings"),
    [
        ("constant_mean", "mesh.data=1"),
        ("token_mean", "mesh.data=1 num_microbatches=4"),
        ("sequence_mean", "mesh.data=8 zero.stage=3"),
        ("token_mean", "mesh.data=2 mesh.tensor=2 zero.stage=3 num_microbatches=2"),
    ],
)
def test_a_step_equals_the_oracle(aggregation, settings):
    objective, _ = CASES[aggregation]
    found = step_of(objective, packed(aggregation).batch, settings)
    assert_equal(found, expected(aggregation))


@pytest.mark.parametrize(
    ("settings", "layers"),
    [
        pytest.param(
            "mesh.pipeline=2 mesh.data=2 zero.stage=1 num_microbatches=2 ",
            "model.num_layers=2",
            marks=pytest.mark.slow,
        ),
        ("mesh.sequence=2 mesh.data=2 model.sequence_attention=ring", ""),
        (
            "mesh.data=2 zero.stage=2 zero.offload=pinned_host "
            "zero.offload.parameter_memory=pinned_host model.remat=full",
            "",
        ),
    ],
    ids=["pipeline", "ring", "host"],
)
def test_stacks_train_the_policy(settings, layers, monkeypatch):
    monkeypatch.setattr(plan, "MIN_MOVED_BYTES", 0)
    found = step_of(SEQUENCES, packed("sequence_mean").batch, settings + layers)
    assert_equal(found, expected("sequence_mean", layers))


def test_padding_and_rows_change_nothing():
    """One rollout a row, and rows of padding, are the step of packed rows."""
    batch = packed(num_rows=16, shares_rows=False).batch
    assert (batch["segment_ids"] == 0).all(1).sum() == 8
    assert_equal(
        step_of(OBJECTIVE, batch, "mesh.data=8 global_batch_size=16"),
        expected("token_mean"),
    )


def test_on_policy_ratios_are_exactly_one():
    """Without old log-probabilities, and with gradients: trap 4."""
    found = rl.pack(ROLLOUTS, ADVANTAGES, length=16, num_rows=8)
    objective = rl.Objective(temperature=policies.TEMPERATURE)
    metrics, gradient, _ = step_of(objective, found.batch)
    assert float(metrics["ratio"]) == 1.0
    assert float(metrics["clipped_low"]) == float(metrics["clipped_high"]) == 0.0
    kept = [x for i, x in enumerate(ADVANTAGES) if i != 4]
    mean = np.average(kept, weights=LENGTHS)
    np.testing.assert_allclose(metrics["loss"], -mean, rtol=1e-4)
    assert max(abs(x).max() for x in jax.tree.leaves(gradient)) > 1e-4


class Linen(linen.Module):
    @linen.compact
    def __call__(self, tokens):
        return linen.Dense(policies.VOCAB)(linen.Embed(policies.VOCAB, 8)(tokens))


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(policies.VOCAB, 8, rngs=rngs)
        self.dense = nnx.Linear(8, policies.VOCAB, rngs=rngs)

    def __call__(self, tokens):
        return self.dense(self.embed(tokens))


@pytest.mark.parametrize("make", [Linen, lambda: Nnx], ids=["linen", "nnx"])
def test_models_of_users_take_the_loss(make):
    """Of logits, in one and four microbatches; the loss falls."""
    batch = packed(shares_rows=False, num_rows=16).batch

    def loss_fn(model, batch, key):
        return rl.policy_loss(model(batch["tokens"]), batch, OBJECTIVE)

    losses = []
    for number, devices in ((1, 1), (2, 8)):
        config = {
            "num_microbatches": number,
            "global_batch_size": 16,
            "precision": {"compute_dtype": "float32"},
        }
        run = zjax.initialize(
            make(),
            optax.sgd(0.5),
            loss_fn,
            batch,
            config,
            devices=jax.devices()[:devices],
        )
        state, found = run.state, []
        for _ in range(3):
            state, metrics = run.step(state, batch)
            found.append(float(metrics["loss"]))
        losses.append(found)
    np.testing.assert_allclose(*losses, rtol=1e-4)
    assert losses[0][2] < losses[0][0]


def test_settings_that_make_another_policy_are_refused():
    experts = "model.moe.num_experts=4 model.moe.jitter=0.1 model.moe.drop=position"
    config = make_config(f"model.dropout_rate=0.1 random_ltd=span {experts}")
    with pytest.raises(zjax.errors.ConfigError) as error:
        rl.policy_model(config, OBJECTIVE)
    assert str(error.value).splitlines() == [
        "model.dropout_rate=0.1 changes log-probabilities that the sampler drew tokens "
        "by; use 0",
        "model.moe.jitter=0.1 changes log-probabilities that the sampler drew tokens "
        "by; leave it out",
        "model.moe.drop='position' changes log-probabilities that the sampler drew "
        "tokens by; leave it out",
        "random_ltd='given' changes log-probabilities that the sampler drew tokens by; "
        "leave it out",
    ]
