"""Runs that cannot go on from a state say so."""

import dataclasses

import numpy as np
import pytest

from tests.support import models, rules, runs
from zjax.errors import NonFiniteError, StateError
from zjax.optim.build import make_optimizer
from zjax.settings import schema

FREEZE = 2


def make_run(name, freeze_step=FREEZE, communication=None, **changes):
    changes |= {"freeze_step": freeze_step, "num_warmup_steps": 1}
    optimizer = rules.optimizer(name, **changes)
    settings = {
        "communication": communication or schema.Communication(),
        "optimizer": optimizer,
        "mesh": schema.Mesh(replica=2),
        "num_steps": 8,
    }
    tx = make_optimizer(runs.make_config(0, **settings))
    return runs.make_small_run(tx, 0, num_devices=2, **settings)


def after_warm_up(run, num_skipped):
    """The state after the warm-up, of which the first steps have no finite loss."""
    state = run.state
    for step in range(FREEZE):
        batch = models.make_batch(step)
        if step < num_skipped:
            batch["x"][0] = np.nan
        state, _ = run.step(state, batch)
    assert int(state.num_skipped) == num_skipped
    return state


@pytest.mark.parametrize("name", ["onebit_adam", "onebit_lamb", "zero_one_adam"])
def test_a_warm_up_of_skipped_steps_ends_the_run(name):
    """Without second moments no parameter would move again."""
    run = make_run(name)
    state = after_warm_up(run, FREEZE)
    with pytest.raises(NonFiniteError) as error:
        run.step(state, models.make_batch())
    assert str(error.value) == (
        "optimizer.rule.freeze_step=2 ends a warm-up whose updates of second moments "
        "were "
        "all skipped, and nothing would move; use more, or a smaller "
        "precision.loss_scale.initial"
    )


def test_steps_without_second_moments_are_no_warm_up():
    """Fails if a step in one bit counts as one that updates second moments."""
    changes = {"var_update_scaler": 1}
    run = make_run("zero_one_adam", FREEZE + 1, **changes)
    state = after_warm_up(run, FREEZE)
    state, metrics = run.step(state, models.make_batch(FREEZE))
    assert metrics["skipped_steps"] == FREEZE
    for later in (run, make_run("zero_one_adam", FREEZE, **changes)):
        with pytest.raises(NonFiniteError, match="updates of second moments were all"):
            later.step(state, models.make_batch())


def test_one_step_of_the_warm_up_is_enough():
    run = make_run("onebit_adam")
    state = after_warm_up(run, FREEZE - 1)
    _, metrics = run.step(state, models.make_batch())
    assert metrics["skipped_steps"] == FREEZE - 1


def test_rounds_do_not_begin_later_than_they_began():
    """Replicas share parameters after an exchange, but not the moments of Adam."""
    rounds = schema.LocalSteps(num_steps=2, num_synchronous_steps=2)
    run = make_run("adam", 0, communication=schema.Communication(local_steps=rounds))
    _, state = runs.train(run, 4)
    rounds = dataclasses.replace(rounds, num_synchronous_steps=6)
    communication = schema.Communication(local_steps=rounds)
    later = make_run("adam", 0, communication=communication)
    with pytest.raises(StateError) as error:
        later.step(state, models.make_batch(4))
    assert str(error.value) == (
        "communication.local_steps.num_synchronous_steps=6 joins replicas at step 5 "
        "that have stepped apart; use 4 or less, or a state whose replicas are equal"
    )
    _, state = runs.train(make_run("adam", 0, communication=communication), 2)
    runs.train(later, 2, first=2, state=state)


def test_replicas_that_stepped_apart_do_not_step_together():
    """Fails if a later freeze lets them differ to the end of the run."""
    scaler = {"local_step_scaler": 1, "local_step_clipper": 2}
    run = make_run("zero_one_adam", **scaler)
    _, state = runs.train(run, 5)
    later = make_run("zero_one_adam", 7, **scaler)
    with pytest.raises(StateError) as error:
        later.step(state, models.make_batch(5))
    assert str(error.value) == (
        "optimizer.rule.freeze_step=7 joins replicas at step 6 that have stepped "
        "apart; "
        "use 5 or less, or a state whose replicas are equal"
    )
    _, state = runs.train(run, 1, first=5, state=state)
    _, state = runs.train(later, 1, first=6, state=state)
    for x in (state.master, state.extra.replicas.master):
        first, last = (np.asarray(s.data) for s in x["up"].addressable_shards)
        np.testing.assert_array_equal(first, last)
