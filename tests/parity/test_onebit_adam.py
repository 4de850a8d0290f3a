"""1-bit Adam takes the steps of explicit workers, and sends a bit where it sent 16."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from tests.reference.onebit_adam import OnebitAdam
from tests.support import models, pipelines, rules, runs
from tests.support.crossing import SCALARS, crossing_bytes
from tests.support.replicas import (
    REPLICAS,
    grads_of_replicas,
    make_batch,
    make_model,
)
from zjax.optim.build import make_optimizer
from zjax.optim.phases import make_phases
from zjax.run.initialize import make_run
from zjax.settings import schema

FREEZE, STEPS = 20, 50
RATE, DECAY = 1e-2, 0.1


def settings(**changes):
    values = {
        "rule": "onebit_adam",
        "peak_learning_rate": RATE,
        "schedule": "constant",
        "num_warmup_steps": 0,
        "freeze_step": FREEZE,
        "clip_norm": 2.0,
        "weight_decay": DECAY,
    }
    return rules.optimizer(**values | changes)


def make_onebit_run(model=None, num_devices=REPLICAS, mesh=None, **changes):
    changes.setdefault("optimizer", settings())
    mesh = mesh or schema.Mesh(replica=REPLICAS)
    config = runs.make_config(0, mesh=mesh, num_steps=STEPS, **changes)
    model = model or models.make_mlp()
    tx = make_optimizer(config, model)
    return make_run(config, model, tx, devices=jax.devices()[:num_devices])


def copies(x):
    return [np.asarray(shard.data) for shard in x.addressable_shards]


def emulator(state):
    flat, unravel = ravel_pytree(jax.tree.map(np.asarray, state.master))
    decayed = ravel_pytree(
        jax.tree.map(lambda x: jnp.full(x.shape, x.ndim > 1, "f4"), state.master)
    )[0]
    workers = OnebitAdam(
        flat,
        decayed,
        num_workers=REPLICAS,
        size=state.extra.worker.shape[-1],
        freeze_step=FREEZE,
        rate=RATE,
        decay=DECAY,
        clip=2.0,
    )

    def grads(step):
        params = unravel(workers.params)
        found = grads_of_replicas(params, make_batch(step))
        return np.stack([ravel_pytree(g)[0] for g in _split(found)])

    return workers, grads


def _split(tree):
    return [jax.tree.map(lambda x, i=i: x[i], tree) for i in range(REPLICAS)]


def test_fifty_steps_are_those_of_explicit_workers():
    """Fails without error feedback, with a sum for a mean, or with moving moments."""
    run = make_onebit_run(make_model())
    state = run.state
    workers, grads = emulator(state)
    moments = []
    for step in range(STEPS):
        workers.step(grads(step))
        state, _ = run.step(state, make_batch(step))
        for leaf in jax.tree.leaves((state.master, state.opt_state)):
            first, *others = copies(leaf)
            for other in others:
                np.testing.assert_array_equal(first, other)
        found = ravel_pytree(state.master)[0]
        np.testing.assert_allclose(
            found, workers.params, rtol=1e-5, atol=1e-5, err_msg=f"step {step}"
        )
        moments.append(np.asarray(ravel_pytree(state.opt_state[0].nu)[0]))
    assert (moments[FREEZE - 2] != moments[FREEZE - 1]).any()
    np.testing.assert_array_equal(moments[FREEZE - 1], moments[-1])
    errors = np.asarray(state.extra.worker)[:, 0]
    size = errors.shape[-1]
    np.testing.assert_allclose(errors, workers.workers.worker_errors, atol=1e-4)
    np.testing.assert_allclose(
        np.asarray(state.extra.server).reshape(REPLICAS, size // REPLICAS),
        workers.workers.server_errors,
        atol=1e-4,
    )


def padded_size(run):
    return run.state.extra.worker.shape[-1]


def num_parameters(run):
    return sum(x.size for x in jax.tree.leaves(run.state.master))


def test_a_compressed_step_sends_two_bits_per_number():
    """Fails if gradients cross replicas, too."""
    run = make_onebit_run()
    count = padded_size(run)
    sent = crossing_bytes(run, "compressed")
    assert sent.pop("u8") == pytest.approx(count / 4, rel=0.01)
    assert set(sent) == {SCALARS}
    sent = crossing_bytes(run, "warm_up")
    assert sent["u32"] == pytest.approx(8 * num_parameters(run), rel=0.05)
    assert set(sent) == {"u32", SCALARS}


def test_a_run_sends_what_its_share_of_warm_up_says():
    """Per number, padding of so few aside; fails if a phase sends more, or lasts
    longer."""
    run = make_onebit_run(precision=schema.Precision(compute_dtype="bfloat16"))
    phases = make_phases(run.config)
    warm, compressed = (
        crossing_bytes(run, name)[dtype]
        for name, dtype in (("warm_up", "u16"), ("compressed", "u8"))
    )
    warm /= num_parameters(run)
    sizes = {
        "warm_up": warm,
        "compressed": compressed / run.state.extra.worker.shape[-1],
    }
    sent = sum(sizes[phases.at(step)] for step in range(1, STEPS + 1))
    share = FREEZE / STEPS
    expected = 1 / (share + (1 - share) / 16)
    assert STEPS * warm / sent == pytest.approx(expected, rel=0.02)


MESHES = {
    "data": schema.Mesh(replica=REPLICAS),
    "tensor": schema.Mesh(replica=REPLICAS, tensor=2),
    "microbatches": schema.Mesh(replica=REPLICAS),
}


@pytest.mark.parametrize("case", MESHES)
def test_axes_inside_a_replica_do_not_change_the_warm_up(case):
    """Fails if a replica's own devices count as replicas."""
    microbatches = 2 if case == "microbatches" else 1
    run = make_onebit_run(
        num_devices=8, mesh=MESHES[case], num_microbatches=microbatches
    )
    plain = make_onebit_run()
    losses, state = runs.train(run, FREEZE)
    expected, other = runs.train(plain, FREEZE)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    later, state = runs.train(run, 10, first=FREEZE, state=state)
    expected, _ = runs.train(plain, 10, first=FREEZE, state=other)
    np.testing.assert_allclose(later, expected, rtol=2e-2)
    for leaf in jax.tree.leaves(state.master):
        by_index = {}
        for shard in leaf.addressable_shards:
            by_index.setdefault(str(shard.index), []).append(np.asarray(shard.data))
        for first, *others in by_index.values():
            for other_copy in others:
                np.testing.assert_array_equal(first, other_copy)


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
