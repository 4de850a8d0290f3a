"""Updates that are delayed by one step, against a queue that holds one gradient."""

import itertools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zjax
from tests.support import small_run
from tests.support.first_state import first_weights
from tests.support.offload import (
    GPT,
    LLAMA,
    Perceptron,
    make_batch,
    make_config,
    memories,
    start,
    train,
    weights_of,
)
from zjax.config.check import check_config
from zjax.errors import CheckpointError, ConfigError, PlanError
from zjax.models.build import make_model
from zjax.replicas.state import saved_state

NUM_IMMEDIATE, NUM_STEPS, CLIP_NORM = 2, 6, 0.05


def delayed(memory="pinned_host", **sections):
    zero = {"delay_updates_from": NUM_IMMEDIATE + 1} | sections.pop("zero", {})
    optimizer = {"clip_norm": CLIP_NORM} | sections.pop("optimizer", {})
    return make_config(memory, zero=zero, optimizer=optimizer, **sections)


def spoilt(batch, is_spoilt):
    """A batch whose loss is not a number, if it is spoilt."""
    factor = np.float32(np.nan if is_spoilt else 1)
    return batch | {"weights": batch["weights"] * factor}


def queued(config, *, spoilt_step=None, flush=False):
    """Weights after some steps, on one device and with nothing but optax.

    `flush` empties the queue at the end.
    """
    model = make_model(config)
    params = jax.tree.map(jnp.asarray, first_weights(model.init))
    given = config.optimizer
    tx = optax.chain(
        optax.clip_by_global_norm(given.clip_norm),
        optax.adamw(
            zjax.make_schedule(config),
            b1=given.rule.b1,
            b2=given.rule.b2,
            eps=given.rule.eps,
            weight_decay=0.0,
        ),
    )
    opt_state, queue = tx.init(params), []
    differentiate = jax.jit(
        jax.grad(lambda p, batch: model.loss(p, (), batch, None).value)
    )

    @jax.jit
    def update(grads, opt_state, params):
        updates, opt_state = tx.update(grads, opt_state, params)
        return opt_state, optax.apply_updates(params, updates)

    def apply(grads, opt_state, params):
        is_finite = all(np.isfinite(x).all() for x in jax.tree.leaves(grads))
        return update(grads, opt_state, params) if is_finite else (opt_state, params)

    for step in range(NUM_STEPS):
        batch = spoilt(make_batch(step), step == spoilt_step)
        queue.append(differentiate(params, batch))
        if step != NUM_IMMEDIATE:
            opt_state, params = apply(queue.pop(0), opt_state, params)
    if flush:
        _, params = apply(queue.pop(), opt_state, params)
    return jax.tree.map(np.asarray, params), queue


def assert_close(found, expected, rtol=2e-4, atol=2e-6):
    """Compares stored with logical arrays: the rest of what is stored is padding."""
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(
            x[tuple(map(slice, y.shape))], y, rtol, atol
        ),
        found,
        expected,
    )


def test_gradients_are_applied_one_step_late():
    """Of blocks and gradients on the host, in two microbatches of stage 3."""
    zero = {"parameter_memory": "pinned_host", "gradient_memory": "pinned_host"}
    config = delayed(num_microbatches=2, model=LLAMA, stage=3, zero=zero)
    state, _ = train(start(config), NUM_STEPS)
    expected, queue = queued(config)
    assert len(queue) == 1
    assert_close(weights_of(state), expected)


def test_first_delayed_step_changes_no_weight():
    """Fails if delaying does nothing."""
    config = delayed(zero={"gradient_memory": "pinned_host"})
    run = start(config)
    before, _ = train(run, NUM_IMMEDIATE)
    weights = weights_of(before)
    assert before.pending == ()
    after, metrics = run.step(before, make_batch(NUM_IMMEDIATE))
    jax.tree.map(np.testing.assert_array_equal, weights_of(after), weights)
    assert int(after.step) == NUM_IMMEDIATE + 1 and float(metrics["grad_norm"]) > 0
    assert memories(after.pending.grads) == {"pinned_host"}


def test_no_update_waits_for_the_norm():
    """Fails if clipping holds the updates back until all gradients are there."""
    run = start(delayed())
    train_step = run.step.executor.step
    programs, groups = train_step.backward.programs, train_step.groups
    events = []

    def noted(name, function):
        def call(*args):
            events.append(name)
            return function(*args)

        return call

    programs.block_backward = noted("backward", programs.block_backward)
    for i, group in enumerate(groups):
        update = group.update._replace(update=noted("update", group.update.update))
        groups[i] = group._replace(update=update)
    updates, backward = ["update"] * len(groups), ["backward"] * GPT.num_layers
    state, _ = train(run, NUM_IMMEDIATE)
    assert events == NUM_IMMEDIATE * [*backward, *updates]
    del events[:]
    state, _ = run.step(state, make_batch(NUM_IMMEDIATE))
    assert events == backward
    del events[:]
    run.step(state, make_batch(NUM_IMMEDIATE + 1))
    assert sorted(events) == sorted([*backward, *updates])
    assert events[:3] == ["update", "backward", "update"]


def test_settling_applies_what_is_pending_once():
    config = delayed()
    run = start(config)
    state, _ = train(run, NUM_STEPS)
    settled = run.step.settle(state)
    expected, _ = queued(config, flush=True)
    assert_close(weights_of(settled), expected)
    assert settled.pending == () and int(settled.step) == NUM_STEPS
    again = run.step.settle(settled)
    assert again is settled
    run.step(again, make_batch(0))


def test_gradient_that_is_not_finite_is_dropped_when_its_turn_comes():
    config = delayed()
    run = start(config)
    state = run.state
    for step in range(NUM_STEPS):
        state, _ = run.step(state, spoilt(make_batch(step), step == NUM_IMMEDIATE + 1))
    expected, _ = queued(config, spoilt_step=NUM_IMMEDIATE + 1)
    assert_close(weights_of(state), expected)
    assert int(state.num_skipped) == 1


def test_a_run_resumed_is_the_run_that_saved(tmp_path):
    settings = (
        "model.dropout_rate=0.0",
        "model.remat=full",
        "zero.offload=pinned_host",
        f"zero.offload.delay_updates_from={NUM_IMMEDIATE + 1}",
        "checkpoint.every_steps=4",
        "optimizer.schedule=constant",
    )
    whole = small_run.fit(tmp_path / "whole", *settings)
    small_run.fit(tmp_path / "parts", *settings, "num_steps=4")
    parts = small_run.fit(tmp_path / "parts", *settings)
    assert whole.state.pending == ()
    jax.tree.map(
        np.testing.assert_array_equal, weights_of(parts.state), weights_of(whole.state)
    )


def test_state_with_a_gradient_pending_is_not_saved():
    run = start(delayed())
    state, _ = train(run, NUM_IMMEDIATE + 1)
    with pytest.raises(CheckpointError) as error:
        saved_state(state, run.plan)
    assert str(error.value) == (
        "state.pending='gradient' is not applied yet, and a checkpoint does not hold "
        "it; save what step.settle(state) gives"
    )


def test_any_model_can_be_delayed():
    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(16, 24)), "y": rng.normal(size=(16, 1))}
    batch = jax.tree.map(lambda x: x.astype(np.float32), batch)

    def loss_fn(model, batch, key):
        return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

    settings = {
        "zero": {"offload": {"kind": "pinned_host", "delay_updates_from": 2}},
        "precision": {"compute_dtype": "float32"},
    }
    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))
    run = zjax.initialize(Perceptron(), tx, loss_fn, batch, settings)
    state, seen = run.state, []
    for _ in range(4):
        state, _ = run.step(state, batch)
        seen.append(weights_of(state))
    changed = [
        any(np.any(x != y) for x, y in zip(*map(jax.tree.leaves, pair), strict=True))
        for pair in itertools.pairwise(seen)
    ]
    assert changed == [False, True, True]


def test_settings_of_delays_that_mean_nothing():
    config = delayed(zero={"delay_updates_from": 0})
    with pytest.raises(ConfigError) as error:
        check_config(config, 8)
    assert str(error.value) == (
        "zero.offload.delay_updates_from=0 is out of range; use 1 or more, or -1 for "
        "never"
    )


def test_a_checkpoint_is_as_good_as_was_evaluated(tmp_path):
    """Fails if what is pending is applied between the two."""
    trainer = small_run.make_trainer(
        tmp_path,
        "model.dropout_rate=0.0",
        "model.remat=full",
        "zero.offload=pinned_host",
        f"zero.offload.delay_updates_from={NUM_IMMEDIATE + 1}",
        "num_steps=4",
        small_run.EVALUATED,
    )
    trainer.fit()
    saved = json.loads((trainer.store.directory / "4/index/metadata").read_text())
    assert trainer.evaluate()["eval_loss"] == saved["loss"]
    trainer.close()


def test_delay_that_gains_nothing_is_refused():
    config = delayed(
        optimizer={"clip_norm": math.inf}, precision={"on_nonfinite": "update"}
    )
    with pytest.raises(PlanError) as error:
        start(config)
    assert str(error.value) == (
        "zero.offload.delay_updates_from=3 gains nothing, as no update waits for all "
        "gradients; leave it at -1"
    )
