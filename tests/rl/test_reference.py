"""Log-probabilities of a run's weights, and of the policy at the start."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zjax
from tests.rl.test_policy import (
    OBJECTIVE,
    ROLLOUTS,
    make_config,
    packed,
)
from tests.support import policies
from tests.support.first_state import first_state
from tests.support.trees import stacked, unpadded
from zjax import rl
from zjax.run.build import make_run
from zjax.sharding import plan

T = policies.TEMPERATURE


def start(settings="mesh.data=1", objective=OBJECTIVE):
    """A run with a batch for it."""
    config, batch = make_config(settings), packed().batch
    mesh = config.mesh
    devices = jax.devices()[: mesh.data * mesh.tensor * mesh.sequence]
    model = rl.policy_model(config, objective)
    given = {"devices": devices, "batch": batch}
    if not config.lora:  # whose own start changes nothing
        given["restore"] = first_state(config, model)
    return make_run(config, model, optax.sgd(1.0), **given), batch


def by_hand(run, state):
    """Log-probability of each completion's tokens, by all logits of each text."""
    params = stacked(unpadded(state.master, run.plan.master))
    decoder = run.model.bind(jax.tree.map(jnp.asarray, params), {})
    tokens = jnp.asarray(policies.padded(ROLLOUTS))
    logits = jax.jit(lambda tokens: decoder(tokens))(tokens)
    logprobs = np.asarray(jax.nn.log_softmax(logits / T))
    return [
        row[np.arange(len(x.ids)) + len(x.prompt_ids) - 1, x.ids]
        for row, x in zip(logprobs, ROLLOUTS, strict=True)
    ]


@pytest.mark.parametrize(
    "settings",
    [
        "mesh.data=2 num_microbatches=2",
        "mesh.data=2 mesh.tensor=2 zero.stage=3",
        "mesh.data=2 zero.stage=2 zero.offload=pinned_host "
        "zero.offload.parameter_memory=pinned_host model.remat=full",
    ],
    ids=["microbatches", "tensor, ZeRO 3", "host"],
)
def test_logprobs_are_of_the_softmax(settings, monkeypatch):
    monkeypatch.setattr(plan, "MIN_MOVED_BYTES", 0)
    run, batch = start(settings)
    found = rl.logprobs_of(run, run.state, batch, temperature=T)
    assert found.shape == batch["tokens"].shape
    np.testing.assert_array_equal(found[batch["targets"] == -100], 0)
    values = packed().unpack(np.asarray(found))
    for i, expected in enumerate(by_hand(run, run.state)):
        if i != 4:
            np.testing.assert_allclose(values[i], expected, rtol=1e-5, atol=1e-6)


def test_logprobs_are_those_of_the_loss():
    """As old log-probabilities they give ratios of 1, with a second pass."""
    run, _ = start()
    found = packed()
    old = np.asarray(rl.logprobs_of(run, run.state, found.batch, temperature=T))
    batch = found.with_arrays(old_logprobs=old, reference_logprobs=old).batch
    _, metrics = run.step(run.state, batch)
    assert abs(float(metrics["ratio"]) - 1) < 1e-6
    assert float(metrics["kl"]) < 1e-9


@pytest.mark.parametrize("memory", ["device", "pinned_host"])
def test_a_reference_stays_as_it_was(memory):
    run, batch = start("mesh.data=2 zero.stage=3")
    before = rl.logprobs_of(run, run.state, batch, temperature=T)
    reference = rl.Reference(run, run.state, memory=memory)
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(reference._params)}
    assert kinds == {memory}
    sizes = [x.nbytes for x in jax.tree.leaves(reference._params)]
    assert reference.num_bytes == sum(sizes) // 2  # ZeRO 3 splits all of them
    state, _ = run.step(run.state, batch)
    after = rl.logprobs_of(run, state, batch, temperature=T)
    assert abs(after - before).max() > 1e-3
    for _ in range(2):
        found = reference.logprobs(state, batch, temperature=T)
        np.testing.assert_array_equal(found, before)


def held_bytes():
    return sum(x.nbytes for x in jax.live_arrays())


def test_adapters_need_no_second_copy():
    """Effect: bytes are counted, and the base is the policy before training."""
    run, batch = start("mesh.data=1 lora.rank=2")
    before = rl.logprobs_of(run, run.state, batch, temperature=T)
    bytes_before = held_bytes()
    reference = rl.Reference(run, run.state)
    assert held_bytes() == bytes_before
    assert reference.num_bytes == 0
    state, _ = run.step(run.state, batch)
    for _ in range(2):
        state, _ = run.step(state, batch)
    after = rl.logprobs_of(run, state, batch, temperature=T)
    assert abs(after - before).max() > 1e-3
    found = reference.logprobs(state, batch, temperature=T)
    np.testing.assert_array_equal(found, before)


@pytest.mark.parametrize(
    "settings", ["mesh.data=1", "mesh.data=1 zero.offload=pinned_host"]
)
def test_a_copy_has_memory_of_its_own(settings, monkeypatch):
    """A step reuses the memory of the state; bytes are counted."""
    monkeypatch.setattr(plan, "MIN_MOVED_BYTES", 0)
    run, _ = start(settings)
    before = held_bytes()
    reference = rl.Reference(run, run.state)
    assert held_bytes() - before == reference.num_bytes > 0
    state = run.state.master, run.state.params
    own, of_state = (
        {x.unsafe_buffer_pointer() for x in jax.tree.leaves(tree)}
        for tree in (reference._params, state)
    )
    assert len(own) > 5 and own.isdisjoint(of_state)


def test_adapters_that_cannot_be_left_out_are_refused():
    run, _ = start("mesh.data=1 lora.rank=2 lora.form=dora lora.also_train=('norm',)")
    with pytest.raises(zjax.errors.ConfigError) as error:
        rl.Reference(run, run.state)
    problem = "changes the policy where no adapter is left out"
    assert str(error.value).splitlines() == [
        f"lora.form='dora' {problem}; use lora, or no reference",
        f"lora.also_train=('norm',) {problem}; leave it out, or use no reference",
    ]


def test_a_model_without_log_probabilities_is_refused():
    model = zjax.with_stack(
        rl.policy_model(make_config("mesh.data=1"), OBJECTIVE), target_logprobs=None
    )
    config, batch = make_config("mesh.data=1"), packed().batch
    devices = jax.devices()[:1]
    given = {"devices": devices, "batch": batch, "restore": first_state(config, model)}
    run = make_run(config, model, optax.sgd(1.0), **given)
    with pytest.raises(zjax.errors.ModelError) as error:
        rl.logprobs_of(run, run.state, batch)
    assert str(error.value) == (
        "model='given' is no stack with target_logprobs; use a decoder of "
        "zjax.make_model, or set it in the zjax.Stack"
    )
