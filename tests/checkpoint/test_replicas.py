"""Checkpoints of replicas that step apart, and of what their codecs lost."""

import dataclasses

import jax
import numpy as np
import optax
import pytest

import zjax
from tests.support import models, runs
from tests.support.refusals import checkpoint_error
from zjax.errors import CheckpointError
from zjax.optim.build import make_optimizer
from zjax.run.build import make_run as make_planned_run
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
    with checkpoint_error(
        f"communication.local_steps.{name}={getattr(ROUNDS, name)} is not {value}, "
        "with which step 5 was saved, and a fragment is on its way; continue with "
        f"{value}"
    ):
        zjax.restore(tmp_path, run)
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


def make_coded_run(number, *, stage=0, mesh=None, codec="onebit", **settings):
    return runs.make_small_run(
        optax.sgd(0.5),
        stage,
        num_devices=number,
        mesh=mesh or schema.Mesh(replica=number),
        communication=schema.Communication(codec=codec),
        **settings,
    )


@pytest.mark.parametrize("number", [4, 2])
def test_errors_are_kept_for_the_same_replicas_alone(number, tmp_path, caplog):
    """Fails if errors are lost, or given to replicas that did not make them."""
    first = make_coded_run(4)
    _, state = runs.train(first, 2)
    zjax.save(tmp_path, state, first)
    restored, _ = zjax.restore(tmp_path, make_coded_run(number))
    told = [r.getMessage() for r in caplog.records if "codec" in r.getMessage()]
    for leaf, saved in zip(
        jax.tree.leaves(restored.extra), jax.tree.leaves(state.extra), strict=True
    ):
        expected = saved if number == 4 else np.zeros(leaf.shape, np.float32)
        np.testing.assert_array_equal(leaf, expected)
    text = "errors of the codec start at 0: none were saved for these messages"
    assert told == ([] if number == 4 else [text])
    assert np.abs(np.asarray(state.extra.worker)).max() > 0


TWO_LEVELS = schema.Mesh(replica=2, data=2)


@pytest.mark.parametrize(
    "changes",
    [
        {"stage": 0},
        {"mesh": schema.Mesh(replica=2, data=1, tensor=2), "stage": 2},
        {"codec": "int8", "stage": 2},
    ],
    ids=["stage", "mesh", "codec"],
)
def test_errors_of_other_numbers_start_at_0(changes, tmp_path, caplog):
    """Fails if a buffer of the same size gives errors to other parameters."""
    first = make_coded_run(4, stage=2, mesh=TWO_LEVELS)
    _, state = runs.train(first, 2)
    zjax.save(tmp_path, state, first)
    other = make_coded_run(4, **({"mesh": TWO_LEVELS} | changes))
    restored, _ = zjax.restore(tmp_path, other)
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(restored.extra))
    assert "errors of the codec start at 0: none were saved for these" in caplog.text


ZERO_ONE = schema.Optimizer(
    rule=schema.ZeroOneAdam(
        freeze_step=6, var_update_scaler=2, local_step_scaler=2, local_step_clipper=4
    ),
    schedule=schema.Constant(num_warmup_steps=0),
)


def make_zero_one_run(replica=4, optimizer=ZERO_ONE):
    config = runs.make_config(
        0, mesh=schema.Mesh(replica=replica), optimizer=optimizer, num_steps=24
    )
    model = models.make_mlp()
    tx = make_optimizer(config, model)
    return make_planned_run(config, model, tx, devices=jax.devices()[:replica])


@pytest.mark.parametrize("number", [5, 6, 14], ids=["one-bit", "freeze", "interval"])
def test_a_run_goes_on_bit_for_bit(number, tmp_path):
    """Step 14 is the second of an interval of four."""
    run = make_zero_one_run()
    state = after(run, number)
    zjax.save(tmp_path, state, run)
    expected = jax.tree.map(np.asarray, after(run, 6, state))
    other = make_zero_one_run()
    state, _ = zjax.restore(tmp_path, other)
    if number == 14:
        assert (np.asarray(state.extra.replicas.opt_state.rate_sum) > 0).all()
    state = after(other, 6, state)
    jax.tree.map(np.testing.assert_array_equal, state, expected)


def test_errors_of_gradients_are_not_those_of_movements(tmp_path, caplog):
    """Fails if a freeze that moved before the saved step keeps them."""
    run = make_zero_one_run()
    state = after(run, 5)
    assert any(np.asarray(x).any() for x in jax.tree.leaves(state.extra.errors))
    zjax.save(tmp_path, state, run)
    rule = dataclasses.replace(ZERO_ONE.rule, freeze_step=4)
    other = make_zero_one_run(optimizer=dataclasses.replace(ZERO_ONE, rule=rule))
    state, _ = zjax.restore(tmp_path, other)
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(state.extra.errors))
    assert "errors of the codec start at 0: none were saved for these" in caplog.text


def test_another_number_of_replicas_meets_at_the_anchor(tmp_path, caplog):
    """Fails if rates are counted whose steps are lost with the replicas."""
    run = make_zero_one_run()
    zjax.save(tmp_path, after(run, 14), run)
    other = make_zero_one_run(2)
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
