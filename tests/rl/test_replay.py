"""Replay: the trainer computes the experts that the sampler chose, layer by layer."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tests.rl.test_policy import ADVANTAGES, ROLLOUTS, make_config
from tests.support import policies
from tests.support.first_state import first_state
from zjax import rl
from zjax.run.build import make_run
from zjax.sharding import plan

EXPERTS = 4
MIXTURES = (
    "model.num_layers=2 "
    "model.moe=token_choice model.moe.num_experts=4 model.moe.top_k=2 "
)
OBJECTIVE = rl.Objective(temperature=policies.TEMPERATURE)


def with_experts(seed=0, num_mixtures=2):
    """Rollouts with two experts of a token and mixture: of each second token random."""
    rng, rollouts = np.random.default_rng(seed), []
    for x in ROLLOUTS:
        shape = (len(x.prompt_ids) + len(x.ids) - 1, num_mixtures, EXPERTS)
        experts = rng.random(shape).argsort(-1)[..., :2].astype(np.uint8)
        # Mixtures of unequal load, so that no layer can pass for another one.
        experts[::2] = np.arange(2 * num_mixtures).reshape(num_mixtures, 2)
        rollouts.append(types.SimpleNamespace(**vars(x) | {"experts": experts}))
    return rollouts


def batch_of(rollouts):
    return rl.pack(rollouts, ADVANTAGES, length=16, num_rows=8).batch


def start(settings, batch, objective=OBJECTIVE):
    config = make_config(f"{MIXTURES} {settings}")
    mesh = config.mesh
    number = mesh.data * mesh.tensor * mesh.expert * mesh.pipeline
    model, devices = rl.policy_model(config, objective), jax.devices()[:number]
    given = {"devices": devices, "batch": batch, "restore": first_state(config, model)}
    return make_run(config, model, optax.sgd(0.0), **given)


def loads(metrics):
    """The load of each mixture, in the order of the layers."""
    names = sorted(name for name in metrics if name.split("/")[0] == "load")
    return np.concatenate([np.asarray(metrics[name]) for name in names])


def expected_loads(rollouts, batch):
    """Tokens of each expert by the record; the last token of a text has none."""
    counts = np.zeros((2, EXPERTS), int)
    for i, x in enumerate(rollouts):
        if not np.isnan(ADVANTAGES[i]):
            for mixture in range(2):
                ids = x.experts[:, mixture].ravel()
                counts[mixture] += np.bincount(ids, minlength=EXPERTS)
    return counts


@pytest.mark.parametrize(
    "settings",
    [
        "mesh.data=1 num_microbatches=2",
        "mesh.data=2 mesh.expert=2 zero.stage=3",
        "mesh.data=1 model.layers_per_scan=1 model.remat=full",
        "mesh.data=1 model.moe.every=2 model.moe.first_dense=1 model.num_layers=5",
        "mesh.data=2 zero.stage=2 zero.offload=pinned_host "
        "zero.offload.parameter_memory=pinned_host model.remat=full",
        pytest.param(
            "mesh.pipeline=2 mesh.data=1 num_microbatches=2", marks=pytest.mark.slow
        ),
    ],
    ids=["microbatches", "experts split", "loop", "groups", "host", "pipeline"],
)
def test_each_layer_computes_the_experts_of_the_record(settings, monkeypatch):
    monkeypatch.setattr(plan, "MIN_MOVED_BYTES", 0)
    rollouts = with_experts()
    batch = batch_of(rollouts)
    run = start(settings, batch)
    _, metrics = run.step(run.state, batch)
    found, recorded = loads(metrics), expected_loads(rollouts, batch)
    # The router chooses for the last token of each text alone.
    assert (found >= recorded).all()
    num_texts = np.isfinite(ADVANTAGES).sum()
    np.testing.assert_array_equal((found - recorded).sum(1), 2 * num_texts)


def test_the_choice_of_the_router_replayed_changes_nothing():
    """By log-probabilities, and other experts change them."""
    plain = batch_of(ROLLOUTS)
    run = start("mesh.data=1", plain)
    before = rl.logprobs_of(run, run.state, plain)
    chosen = own_choice(run, plain)
    same = plain | {"experts": chosen}
    np.testing.assert_allclose(
        rl.logprobs_of(run, run.state, same), before, rtol=1e-6, atol=1e-6
    )
    unknown = plain | {"experts": np.full_like(chosen, -1)}
    np.testing.assert_array_equal(rl.logprobs_of(run, run.state, unknown), before)
    others = plain | {"experts": ((chosen + 1) % EXPERTS).astype(np.int16)}
    moved = rl.logprobs_of(run, run.state, others)
    assert abs(moved - before).max() > 1e-6


def own_choice(run, batch):
    """The experts that the run's routers choose, int16[B, L, mixtures, 2]."""
    stack = run.model.stack
    given = {name: jnp.asarray(batch[name]) for name in ("tokens", "segment_ids")}
    graph, _ = nnx.split(run.bind(run.state).blocks)

    @jax.jit
    def choose(params):
        embed, segments, _ = stack.split(params)
        carry, context = stack.embed(embed, given, None)
        found = []
        for number in range(2):
            layer = jax.tree.map(lambda x, i=number: x[i], segments[0])
            found.append(nnx.merge(graph, layer).chosen_experts(carry, context))
            carry, _ = stack.segments[0].block(layer, carry, context, None)
        return jnp.stack(found, 2)

    return np.asarray(choose(run.step.parameters(run.state))).astype(np.int16)
