"""Experts split over devices equal all experts on one device."""

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest

import zjax
from tests.support import experts, runs
from zjax.run.nonfinite import find_nonfinite
from zjax.settings import schema

STEPS = 3
ROUTERS = {"dropless": experts.DROPLESS, "capacity": experts.CAPACITY}


def make_run(router, mesh, stage, *, num_devices=8, groups=1, **settings):
    separable = settings.pop("separable", True)
    return runs.make_small_run(
        optax.sgd(0.5),
        stage,
        mesh=mesh,
        model=experts.make_model(ROUTERS[router], groups, separable=separable),
        num_devices=num_devices,
        optimizer=schema.Optimizer(clip_norm=0.5),
        **settings,
    )


def train(run, **changes):
    """Losses, norms of gradients, and parameters after some steps."""
    state, curve = run.state, []
    for step in range(STEPS):
        state, metrics = run.step(state, experts.make_batch(step) | changes)
        curve.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    shapes = jax.eval_shape(experts.init, jax.random.key(0))
    params = {
        name: np.asarray(state.master[name])[tuple(map(slice, x.shape))]
        for name, x in shapes.items()
    }
    return np.array(curve), params


@functools.cache
def on_one_device(router, groups=experts.DEVICES, **settings):
    """The same groups of tokens, one after another."""
    return train(make_run(router, None, 0, num_devices=1, groups=groups, **settings))


def assert_equal(found, expected):
    np.testing.assert_allclose(found[0], expected[0], rtol=2e-5)
    for name, x in expected[1].items():
        np.testing.assert_allclose(found[1][name], x, rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize(
    ("router", "mesh", "stage"),
    [
        ("dropless", schema.Mesh(data=4, expert=2), 0),  # E+D
        ("dropless", schema.Mesh(replica=2, data=1, expert=4), 2),
        ("dropless", schema.Mesh(data=1, expert=8), 3),  # E+Z
        ("capacity", schema.Mesh(data=4, expert=2), 3),  # E+D+Z
        ("capacity", schema.Mesh(data=1, expert=8), 1),  # E
    ],
)
def test_steps_are_those_of_one_device(router, mesh, stage):
    """Fails for a gradient averaged by the wrong degree, or a row that is lost."""
    assert_equal(train(make_run(router, mesh, stage)), on_one_device(router))


def test_accumulation_sums_over_all_devices():
    mesh, two = schema.Mesh(data=2, expert=4), {"num_microbatches": 2}
    found = train(make_run("dropless", mesh, 3, **two))
    assert_equal(found, on_one_device("dropless", **two))


@pytest.mark.parametrize(
    ("stage", "reduce_dtype", "groups"), [(3, "compute", 1), (2, "float32", 4)]
)
def test_tensor_ranks_share_the_channels_of_experts(stage, reduce_dtype, groups):
    """E+D+M; gradients reduced by the compiler, or by `shard_map` around the layer."""
    mesh = schema.Mesh(data=2, expert=2, tensor=2)
    precision = schema.Precision(compute_dtype="float32", reduce_dtype=reduce_dtype)
    run = make_run("dropless", mesh, stage, precision=precision)
    assert_equal(train(run), on_one_device("dropless", groups))


def test_experts_of_a_device_without_weight_learn_from_the_others():
    """Fails if gradients are cleared wherever the device's own loss counts nothing."""
    weight = np.ones(experts.TOKENS, np.float32)
    weight[: experts.TOKENS // 8] = 0
    mesh = schema.Mesh(data=4, expert=2)
    precision = schema.Precision(compute_dtype="float32", reduce_dtype="float32")
    found, expected = (
        train(
            make_run("dropless", mesh, 1, separable=separable, precision=precision),
            weight=weight,
        )
        for separable in (False, True)
    )
    assert_equal(found, expected)


def test_a_checkpoint_moves_to_another_degree(tmp_path):
    """Fails if experts are restored onto other devices in another order."""
    before = make_run("dropless", schema.Mesh(data=4, expert=2), 2)
    state, _ = before.step(before.state, experts.make_batch(0))
    zjax.save(str(tmp_path), state, before)
    after = make_run("dropless", schema.Mesh(data=1, expert=8), 3)
    restored, _ = zjax.restore(str(tmp_path), after)
    for name, x in state.master.items():
        size = tuple(map(slice, restored.master[name].shape))
        found = np.asarray(restored.master[name])
        np.testing.assert_array_equal(
            found[tuple(map(slice, x.shape))], np.asarray(x)[size]
        )


def test_a_router_of_nan_is_named_and_its_step_skipped():
    """Fails if experts take tokens whose weights are NaN without a word."""
    run = make_run("dropless", schema.Mesh(data=4, expert=2), 1)
    master = run.state.master | {"router": run.state.master["router"] * np.nan}
    state = dataclasses.replace(run.state, master=master)
    before = np.asarray(state.master["up"])
    batch = run.step.place_batch(experts.make_batch(0))
    after, metrics = run.step(state, batch)
    assert float(metrics["skipped_steps"]) == 1
    np.testing.assert_array_equal(after.master["up"], before)
    weights, gradients = find_nonfinite(run.step, after, batch, 1)
    assert str(weights) == (
        "weights='router' of 6 arrays are not finite at step 1; start again from an "
        "earlier checkpoint"
    )
    assert gradients.field == "gradients"
