"""Checkpoints of 0/1 Adam, in each of its phases."""

import dataclasses
import logging

import jax
import numpy as np
import pytest

import zjax
from tests.support import models, runs
from zjax.optim.build import make_optimizer
from zjax.run.initialize import make_run as make_planned_run
from zjax.settings import schema

ZERO_ONE = schema.Optimizer(
    rule=schema.ZeroOneAdam(
        freeze_step=6, var_update_scaler=2, local_step_scaler=2, local_step_clipper=4
    ),
    schedule=schema.Constant(num_warmup_steps=0),
)


def make_run(replica=4, optimizer=ZERO_ONE):
    config = runs.make_config(
        0, mesh=schema.Mesh(replica=replica), optimizer=optimizer, num_steps=24
    )
    model = models.make_mlp()
    tx = make_optimizer(config, model)
    return make_planned_run(config, model, tx, devices=jax.devices()[:replica])


def after(run, number, state=None):
    first = 0 if state is None else int(state.step)
    return runs.train(run, number, first=first, state=state)[1]


@pytest.mark.parametrize("number", [5, 6, 14], ids=["one-bit", "freeze", "interval"])
def test_a_run_goes_on_bit_for_bit(number, tmp_path):
    """Step 14 is the second of an interval of four."""
    run = make_run()
    state = after(run, number)
    zjax.save(tmp_path, state, run)
    expected = jax.tree.map(np.asarray, after(run, 6, state))
    other = make_run()
    state, _ = zjax.restore(tmp_path, other)
    if number == 14:
        assert (np.asarray(state.extra.replicas.opt_state.rate_sum) > 0).all()
    state = after(other, 6, state)
    jax.tree.map(np.testing.assert_array_equal, state, expected)


def test_errors_of_gradients_are_not_those_of_movements(tmp_path, caplog):
    """Fails if a freeze that moved before the saved step keeps them."""
    run = make_run()
    state = after(run, 5)
    assert any(np.asarray(x).any() for x in jax.tree.leaves(state.extra.errors))
    zjax.save(tmp_path, state, run)
    rule = dataclasses.replace(ZERO_ONE.rule, freeze_step=4)
    other = make_run(optimizer=dataclasses.replace(ZERO_ONE, rule=rule))
    with caplog.at_level(logging.WARNING):
        state, _ = zjax.restore(tmp_path, other)
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(state.extra.errors))
    assert "errors of the codec start at 0: none were saved for these" in caplog.text


def test_another_number_of_replicas_meets_at_the_anchor(tmp_path, caplog):
    """Fails if rates are counted whose steps are lost with the replicas."""
    run = make_run()
    zjax.save(tmp_path, after(run, 14), run)
    other = make_run(2)
    with caplog.at_level(logging.WARNING):
        state, _ = zjax.restore(tmp_path, other)
    text = "errors of the codec start at 0: none were saved for these messages"
    assert text in caplog.text
    assert "4 replicas were saved: 2 replicas continue from where they" in caplog.text
    replicas = state.extra.replicas
    assert not np.asarray(replicas.opt_state.rate_sum).any()
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(state.extra.errors))
    assert np.asarray(replicas.opt_state.mu["up"]).any()
    for name, anchor in state.master.items():
        assert (np.asarray(replicas.master[name]) == np.asarray(anchor)[None]).all()
    state = after(other, 4, state)
    assert np.isfinite(np.asarray(state.master["up"])).all()
