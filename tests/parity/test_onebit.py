"""1-bit Adam and LAMB take the steps of explicit workers, and send a bit for 16."""

import jax
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from tests.reference.onebit_adam import OnebitAdam
from tests.reference.onebit_lamb import OnebitLamb
from tests.support import models, pipelines, rules, runs
from tests.support.crossing import SCALARS, crossing_bytes, is_large
from tests.support.first_state import placed
from tests.support.replicas import (
    REPLICAS,
    assert_copies_are_equal,
    decayed_numbers,
    grads_of_workers,
    make_batch,
    make_model,
)
from tests.support.trees import assert_close
from zjax.observe.collectives import list_collectives
from zjax.optim.build import make_optimizer
from zjax.run.build import make_run
from zjax.schedule.exchange import make_exchanges
from zjax.settings import schema

FREEZE, STEPS = 20, 50
RATE, DECAY = 1e-2, 0.1
CLIP = {"onebit_adam": 2.0, "onebit_lamb": np.inf, "lamb": np.inf}


def settings(rule="onebit_adam", **changes):
    values = {
        "peak_learning_rate": RATE,
        "schedule": "constant",
        "num_warmup_steps": 0,
        "freeze_step": FREEZE,
        "clip_norm": CLIP[rule],
        "weight_decay": DECAY,
    }
    return rules.optimizer(rule, **values | changes)


def make_onebit_run(model=None, num_devices=REPLICAS, mesh=None, **changes):
    changes.setdefault("optimizer", settings())
    mesh = mesh or schema.Mesh(replica=REPLICAS)
    config = runs.make_config(0, mesh=mesh, num_steps=STEPS, **changes)
    model = placed(model or models.make_mlp())
    tx = make_optimizer(config, model)
    return make_run(config, model, tx, devices=jax.devices()[:num_devices])


def make_workers(rule, state):
    """The reference, and what makes the tree of its parameters."""
    flat, unravel = ravel_pytree(jax.tree.map(np.asarray, state.master))
    given = [flat, decayed_numbers(state.master)]
    if rule == "onebit_lamb":
        given.append([x.size for x in jax.tree.leaves(state.master)])
    workers = {"onebit_adam": OnebitAdam, "onebit_lamb": OnebitLamb}[rule](
        *given,
        num_workers=REPLICAS,
        size=state.extra.worker.shape[-1],
        freeze_step=FREEZE,
        rate=RATE,
        decay=DECAY,
        clip=CLIP[rule],
    )
    return workers, unravel


@pytest.mark.parametrize("rule", ["onebit_adam", "onebit_lamb"])
def test_fifty_steps_are_those_of_explicit_workers(rule):
    """Fails without error feedback or trust ratios, with a sum for a mean, with moving
    moments, or with the norms of the steps that are taken."""
    run = make_onebit_run(make_model(), optimizer=settings(rule))
    state = run.state
    workers, unravel = make_workers(rule, state)
    moments = []
    for step in range(STEPS):
        params = [workers.params] * REPLICAS
        workers.step(grads_of_workers(unravel, params, make_batch(step)))
        state, _ = run.step(state, make_batch(step))
        assert_copies_are_equal((state.master, state.opt_state))
        found = ravel_pytree(state.master)[0]
        np.testing.assert_allclose(
            found, workers.params, rtol=1e-5, atol=1e-5, err_msg=f"step {step}"
        )
        if rule == "onebit_adam":
            moments.append(np.asarray(ravel_pytree(state.opt_state[0].nu)[0]))
    if rule == "onebit_lamb":
        kept = [float(x.squeeze()) for x in jax.tree.leaves(state.opt_state[2].norm)]
        np.testing.assert_allclose(kept, workers.norms, rtol=1e-4)
        return
    assert (moments[FREEZE - 2] != moments[FREEZE - 1]).any()
    np.testing.assert_array_equal(moments[FREEZE - 1], moments[-1])
    errors = np.asarray(state.extra.worker)[:, 0]
    np.testing.assert_allclose(errors, workers.workers.worker_errors, atol=1e-4)
    np.testing.assert_allclose(
        np.asarray(state.extra.server).reshape(REPLICAS, -1),
        workers.workers.server_errors,
        atol=1e-4,
    )


def test_the_warm_up_of_lamb_is_lamb():
    states = []
    for rule in ("lamb", "onebit_lamb"):
        run = make_onebit_run(make_model(), optimizer=settings(rule))
        state = run.state
        for step in range(FREEZE):
            state, _ = run.step(state, make_batch(step))
        states.append(jax.tree.map(np.asarray, state.master))
    assert_close(*states, rtol=0, atol=1e-6)


def test_all_layers_leave_in_one_exchange():
    """Fails if each array is sent by itself."""
    run = make_onebit_run(make_model(), optimizer=settings("onebit_lamb"))
    text = run.step.compile(make_batch(0), "compressed").as_text()
    sent = list(filter(is_large, list_collectives(text)))
    assert sorted(each.op for each in sent) == ["all-gather", "all-to-all"]


def padded_size(run):
    return run.state.extra.worker.shape[-1]


def num_parameters(run):
    return sum(x.size for x in jax.tree.leaves(run.state.master))


def test_a_compressed_step_sends_two_bits_per_number():
    """Fails if gradients cross replicas, too."""
    run = make_onebit_run()
    sent = crossing_bytes(run, "compressed")
    assert sent.pop("u8") == pytest.approx(padded_size(run) / 4, rel=0.01)
    assert set(sent) == {SCALARS}
    sent = crossing_bytes(run, "warm_up")
    assert sent["u32"] == pytest.approx(8 * num_parameters(run), rel=0.05)
    assert set(sent) == {"u32", SCALARS}


def test_a_run_sends_what_its_share_of_warm_up_says():
    """Per number, padding of so few aside; fails if a phase sends more, or lasts
    longer."""
    run = make_onebit_run(precision=schema.Precision(compute_dtype="bfloat16"))
    exchanges = make_exchanges(run.config)
    warm, compressed = (
        crossing_bytes(run, name)[dtype]
        for name, dtype in (("warm_up", "u16"), ("compressed", "u8"))
    )
    warm /= num_parameters(run)
    sizes = {"warm_up": warm, "compressed": compressed / padded_size(run)}
    sent = sum(sizes[exchanges.at(step).phase.name] for step in range(1, STEPS + 1))
    share = FREEZE / STEPS
    expected = 1 / (share + (1 - share) / 16)
    assert STEPS * warm / sent == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("axes", [{"tensor": 2}, {"data": 2}], ids=str)
def test_axes_inside_a_replica_do_not_change_the_warm_up(axes):
    """Fails if a replica's own devices, or microbatches, count as replicas."""
    run = make_onebit_run(
        num_devices=8,
        mesh=schema.Mesh(replica=REPLICAS, **axes),
        num_microbatches=axes.get("data", 1),
    )
    plain = make_onebit_run()
    losses, state = runs.train(run, FREEZE)
    expected, other = runs.train(plain, FREEZE)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    later, state = runs.train(run, 10, first=FREEZE, state=state)
    expected, _ = runs.train(plain, 10, first=FREEZE, state=other)
    np.testing.assert_allclose(later, expected, rtol=2e-2)
    assert_copies_are_equal(state.master)


def test_a_step_that_float16_skips_changes_no_error():
    """Fails if an overflow is fed back into all later steps."""
    run = make_onebit_run(
        precision=schema.Precision(compute_dtype="float16"),
        optimizer=settings(freeze_step=1),
    )
    state = run.state
    for step in range(3):
        state, metrics = run.step(state, models.make_batch(step))
    assert np.abs(np.asarray(state.extra.worker)).max() > 0
    before = jax.tree.map(np.asarray, (state.extra, state.master, state.opt_state))
    batch = models.make_batch(3)
    batch["x"][0] = 6e4
    skipped = metrics["skipped_steps"]
    state, metrics = run.step(state, batch)
    assert metrics["skipped_steps"] == skipped + 1
    after = state.extra, state.master, state.opt_state
    jax.tree.map(np.testing.assert_array_equal, after, before)
    assert state.scaler.last_overflow == 3


@pytest.mark.slow
def test_replicas_of_a_pipeline_learn_as_replicas_of_whole_models():
    """Fails if stages of one replica send to stages of another kind."""
    optimizer = settings(freeze_step=3)
    whole, staged = pipelines.losses_of_replicas(optimizer, 10)
    np.testing.assert_allclose(staged[:4], whole[:4], rtol=1e-5)
    np.testing.assert_allclose(staged, whole, rtol=4e-2)
