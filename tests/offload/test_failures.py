"""What fails costs nothing; what one step does, the next does not see."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen

import zjax
from tests.support.offload import (
    UNDER_BACKWARD,
    make_batch,
    make_config,
    memories,
    start,
    train,
    weights_of,
)
from tests.support.trees import assert_close
from zjax.errors import PlanError
from zjax.offload.compiled import compile_groups
from zjax.offload.groups import trace
from zjax.run import fused as programs
from zjax.run import step as steps

ON_HOST = {"zero": {"parameter_memory": "pinned_host"}}
UNDER_BACKWARD_ON_HOST = ON_HOST | UNDER_BACKWARD


def copy_of(state):
    return jax.tree.map(np.asarray, state)


def test_a_batch_that_does_not_suit_the_model_leaves_the_state():
    """Fails if arrays are moved, and so consumed, before the batch is looked at."""
    config = make_config("pinned_host", **UNDER_BACKWARD_ON_HOST)
    run = start(config)
    before = copy_of(run.state)
    wrong = make_batch(0) | {"targets": np.zeros((16, 3), np.int32)}
    with pytest.raises((TypeError, ValueError)):
        run.step(run.state, wrong)
    jax.tree.map(np.testing.assert_array_equal, copy_of(run.state), before)
    expected, _ = train(start(config), 1)
    found, _ = train(run, 1)
    jax.tree.map(np.testing.assert_array_equal, copy_of(found), copy_of(expected))


def test_evaluation_after_a_failed_step_reads_the_parameters_of_its_own(monkeypatch):
    """Fails if blocks that a failed pass announced are taken by the next."""
    run = start(make_config("pinned_host", **ON_HOST))
    other = start(dataclasses.replace(run.config, seed=1))
    backward = run.step.executor.step.backward
    with monkeypatch.context() as broken:
        broken.setattr(backward.programs, "head", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run.step(run.state, make_batch(0))
    found = run.step.evaluate(other.state, make_batch(1))["loss"]
    expected = other.step.evaluate(other.state, make_batch(1))["loss"]
    assert float(found) == float(expected)
    assert backward.units.stream.in_flight == 0 or not backward.units.stream.waiting


def test_evaluation_uses_averaged_weights():
    losses = []
    for memory in ("device", "pinned_host"):
        run = start(make_config(memory, optimizer={"ema_decay": 0.5}))
        state, _ = train(run, 2)
        losses.append(float(run.evaluate(state, make_batch(9))["loss"]))
    np.testing.assert_allclose(*losses, rtol=1e-6)


def test_steps_that_nothing_waits_for(monkeypatch):
    """Fails if a step gives up an array that a program in flight still reads."""
    for module in (steps, programs):
        monkeypatch.setattr(module, "is_simulated", lambda mesh: False)
    found = []
    for memory in ("device", "pinned_host"):
        optimizer = {"optimizer": UNDER_BACKWARD["optimizer"]}
        changes = UNDER_BACKWARD_ON_HOST if memory == "pinned_host" else optimizer
        run = start(make_config(memory, **changes), devices=jax.devices()[:1])
        found.append(weights_of(train(run)[0]))
    assert_close(*found, rtol=1e-4, atol=2e-6)


def test_arrays_stay_in_their_places():
    """Fails if a step returns an array, of the model's state or a counter, elsewhere
    than it took it: the next step would compile again."""

    class Normed(linen.Module):
        @linen.compact
        def __call__(self, x, train):
            x = linen.BatchNorm(use_running_average=not train)(linen.Dense(32)(x))
            return linen.Dense(1)(x)

    def loss_fn(model, batch, key):
        return jnp.mean(model(batch["x"], train=model.train) ** 2)

    batch = {"x": np.ones((16, 24), np.float32)}
    settings = {
        "zero": {
            "stage": 2,
            "min_shard_elements": 0,
            "offload": "pinned_host",
        }
    }
    run = zjax.initialize(Normed(), optax.adam(1e-2), loss_fn, batch, settings)
    places = [x.sharding for x in jax.tree.leaves(run.state)]
    state, _ = run.step(run.state, batch)
    assert jax.tree.leaves(state.model_state)
    after = [x.sharding for x in jax.tree.leaves(state)]
    sizes = [x.ndim for x in jax.tree.leaves(state)]
    for one, other, ndim in zip(places, after, sizes, strict=True):
        assert one.is_equivalent_to(other, ndim)
        assert one.memory_kind == other.memory_kind


def test_parts_that_differ_in_what_they_may_use_up_are_compiled_apart():
    """Fails if a part uses up an array that is not its own, as its twin may."""
    program, _ = trace(lambda x, y: (x * 2, y * 2), jnp.ones(4), jnp.ones(4))
    halves = [program.part((), [output]) for output in program.outputs]
    first, second = compile_groups(
        halves, jax.jit, donated=frozenset(program.inputs[:1])
    )
    own, others = jnp.ones(4), jnp.ones(4)
    first({program.inputs[0]: own})
    second({program.inputs[1]: others})
    assert own.is_deleted()
    assert not others.is_deleted()


def test_state_that_belongs_to_no_parameter_stays_on_the_devices():
    """Fails if an array that every group reads rests where no group brings it up."""

    def init(params):
        return {"table": jnp.ones(1 << 12)}

    def update(updates, state, params=None):
        return jax.tree.map(lambda u: u * state["table"][0], updates), state

    tx = optax.chain(optax.GradientTransformation(init, update), optax.adam(1e-2))
    run = start(
        make_config("pinned_host", optimizer={"clip_norm": math.inf}), tx, weights=()
    )
    state, _ = train(run, 2)
    assert memories(state.opt_state[0]) == {"device"}
    assert memories(state.opt_state[1]) == {"pinned_host"}


def test_the_name_of_an_optimizer_that_is_an_object():
    clipped = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2))
    config = make_config("pinned_host", optimizer={"clip_norm": math.inf})
    with pytest.raises(PlanError, match=r"^optimizer='MultiSteps' updates"):
        start(config, optax.MultiSteps(clipped, 2))
