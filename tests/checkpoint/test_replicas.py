"""Checkpoints of replicas that step apart."""

import dataclasses
import logging

import jax
import numpy as np
import optax
import pytest

import zjax
from tests.support import models, runs
from zjax.errors import CheckpointError
from zjax.settings import schema

ROUNDS = schema.LocalSteps(num_steps=4, num_fragments=2, delay=1)
STREAMED = schema.Communication(codec="int4", local_steps=ROUNDS)


def make_run(replica=8, stage=0, communication=STREAMED):
    mesh = schema.Mesh(replica=replica)
    tx = optax.adam(0.01)
    return runs.make_small_run(tx, stage, mesh=mesh, communication=communication)


def after(run, number, state=None):
    first = 0 if state is None else int(state.step)
    return runs.train(run, number, first=first, state=state)[1]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Five steps: one of the second round, whose first fragment is on its way."""
    run, directory = make_run(), tmp_path_factory.mktemp("run")
    state = after(run, 5)
    zjax.save(directory, state, run)
    return directory, jax.tree.map(np.asarray, after(run, 6, state))


def test_a_round_goes_on_bit_for_bit(saved):
    directory, expected = saved
    run = make_run()
    state, _ = zjax.restore(directory, run)
    state = after(run, 6, state)
    jax.tree.map(np.testing.assert_array_equal, state, expected)


@pytest.mark.parametrize("replica", [2, 4])
def test_another_number_of_replicas_continues_from_the_anchor(saved, replica, caplog):
    run = make_run(replica, stage=1)
    with caplog.at_level(logging.WARNING):
        state, _ = zjax.restore(saved[0], run)
    number = f"8 replicas were saved: {replica} replicas continue from where they last"
    assert f"{number} met" in caplog.text
    assert (
        "errors of the codec start at 0: none were saved for these messages"
        in caplog.text
    )
    for name, anchor in state.master.items():
        replicas = np.asarray(state.extra.replicas.master[name])
        assert (replicas == np.asarray(anchor)[None]).all()
    moments = state.extra.replicas.opt_state[0]
    assert (np.asarray(moments.count) == 5).all()
    assert np.abs(np.asarray(moments.mu["up"])).max() > 0
    assert np.abs(np.asarray(state.extra.momentum["up"])).max() > 0
    state = after(run, 3, state)
    assert np.isfinite(np.asarray(state.master["up"])).all()


def test_another_codec_starts_without_errors(saved):
    run = make_run(communication=schema.Communication(local_steps=ROUNDS))
    state, _ = zjax.restore(saved[0], run)
    assert int(after(run, 3, state).step) == 8


@pytest.mark.parametrize(("name", "value"), [("delay", 0), ("num_steps", 6)])
def test_other_rounds_are_refused_while_a_fragment_is_on_its_way(name, value, tmp_path):
    """Fails if a mean is merged that was never sent, or that was merged before."""
    old = dataclasses.replace(ROUNDS, **{name: value})
    old = dataclasses.replace(STREAMED, local_steps=old)
    saved, run = make_run(communication=old), make_run()
    zjax.save(tmp_path, after(saved, 5), saved)
    with pytest.raises(CheckpointError) as error:
        zjax.restore(tmp_path, run)
    assert str(error.value) == (
        f"communication.local_steps.{name}={getattr(ROUNDS, name)} is not {value}, "
        "with which step 5 was saved, and a fragment is on its way; continue with "
        f"{value}"
    )
    assert not any(x.is_deleted() for x in jax.tree.leaves(run.state))


def test_errors_of_packed_gradients_start_at_zero_on_another_mesh(tmp_path):
    int8 = schema.Communication(codec="int8")
    run = make_run(communication=int8)
    zjax.save(tmp_path, after(run, 2), run)
    other = make_run(2, communication=int8)
    state, _ = zjax.restore(tmp_path, other)
    assert not np.asarray(state.extra.worker).any()
    assert int(after(other, 1, state).step) == 3


def test_plain_steps_do_not_continue_local_ones(saved, tmp_path):
    plain, local = make_run(communication=schema.Communication()), make_run()
    zjax.save(tmp_path, after(plain, 1), plain)
    for directory, run, has in ((saved[0], plain, "has"), (tmp_path, local, "has no")):
        with pytest.raises(CheckpointError) as error:
            zjax.restore(directory, run)
        assert str(error.value).partition(" ")[2] == (
            f"{has} replicas that take local steps, unlike this run; continue with the "
            "saved communication.local_steps and optimizer.rule, or start a run from "
            "its weights with checkpoint.init_from"
        )


def test_weights_of_a_checkpoint_are_the_anchor(saved):
    """Evaluation and export read them; fails if they were those of a replica."""
    run = make_run()
    state, _ = zjax.restore(saved[0], run)
    weights = run.step.parameters(state)
    jax.tree.map(np.testing.assert_array_equal, weights, state.master)
    batch = models.make_batch(3)
    loss = models.loss(weights, {}, batch, None).value
    np.testing.assert_allclose(run.step.evaluate(state, batch)["loss"], loss, rtol=1e-5)
