"""Gradients of a separable loss: one device's result, by the stage's communication."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.support import models, runs
from zjax.observe.collectives import list_collectives
from zjax.settings import schema
from zjax.typing import Loss

SPLIT = 2 * models.WIDTH * models.HIDDEN + 8
"""Elements of the two matrices and of the bias of 7, which is padded to 8."""


def separable_model():
    return dataclasses.replace(models.make_mlp(), separable=True)


def make_run(stage, num_microbatches=1, **settings):
    return runs.make_small_run(
        optax.sgd(0.1, momentum=0.9),
        stage,
        model=separable_model(),
        num_microbatches=num_microbatches,
        **settings,
    )


@pytest.fixture(scope="module")
def alone():
    """Losses and parameters of one device, by the path that knows no shares."""
    tx = optax.sgd(0.1, momentum=0.9)
    losses, state = runs.train(runs.make_small_run(tx, 0, num_devices=1), 10)
    return losses, jax.tree.map(np.asarray, state.master)


@pytest.mark.parametrize("mesh", [{}, {"replica": 2}], ids=["data8", "hybrid"])
@pytest.mark.parametrize("num_microbatches", [1, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_ten_steps_equal_one_device(alone, stage, num_microbatches, mesh):
    """Fails if a reduction misses an axis, a mean is of means, or padding leaks."""
    run = make_run(stage, num_microbatches, mesh=schema.Mesh(**mesh))
    losses, state = runs.train(run, 10)
    np.testing.assert_allclose(losses, alone[0], rtol=1e-5)
    for name, expected in alone[1].items():
        found = np.asarray(state.master[name])[: expected.shape[0]]
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


def make_plain_mean_model():
    """Divides by the weight of its rows, whatever that is."""

    def loss(params, model_state, batch, key):
        error = (models.apply(params, batch["x"]) - batch["y"]) ** 2
        weight = batch["weight"].sum()
        value = jnp.sum(error * batch["weight"][:, None]) / (models.WIDTH * weight)
        return Loss(value, weight, model_state, {"error": value})

    return dataclasses.replace(models.make_mlp(), loss=loss)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_devices_without_weight_count_for_nothing(stage):
    """Fails if 0 / 0 on devices that have padding alone makes the whole step NaN."""
    batch = models.make_batch()
    batch["weight"][:] = 0
    batch["weight"][8:10] = 1, 2  # on the third of eight devices
    found = []
    precision = schema.Precision(compute_dtype="float32", reduce_dtype="float32")
    for num_devices in (1, 8):
        run = runs.make_small_run(
            optax.sgd(0.1),
            stage if num_devices > 1 else 0,
            model=make_plain_mean_model(),
            num_devices=num_devices,
            precision=precision,
        )
        state, metrics = run.step(run.state, batch)
        assert metrics["skipped_steps"] == 0
        found.append((metrics["loss"], metrics["error"], metrics["grad_norm"]))
        found[-1] += (np.asarray(state.master["up"]),)
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


def sent(stage, num_microbatches):
    """Elements that cross the devices in one step by operation, scalars aside."""
    run = make_run(stage, num_microbatches)
    text = run.step.compile(models.make_batch()).as_text()
    elements = collections.Counter()
    for each in list_collectives(text):
        if each.elements >= 8:
            elements[each.op] += each.elements * each.times
    return dict(elements)


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_stage_0_adds_once_per_step(num_microbatches):
    expected = SPLIT - 1  # nothing is padded where nothing is split
    assert sent(0, num_microbatches)["all-reduce"] == pytest.approx(expected, abs=1)


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_stage_1_gathers_and_scatters_once_per_step(num_microbatches):
    """Fails if every microbatch is reduced, or if a sum is all-reduced."""
    assert sent(1, num_microbatches) == {
        "all-gather": SPLIT,
        "reduce-scatter": SPLIT,
    }


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_stage_2_scatters_every_microbatch(num_microbatches):
    """Fails if whole gradients are kept to the end of the step."""
    assert sent(2, num_microbatches) == {
        "all-gather": SPLIT,
        "reduce-scatter": SPLIT * num_microbatches,
    }


@pytest.mark.parametrize(("stage", "again"), [(2, 0), (3, 1)])
def test_stage_3_fetches_again_for_the_backward_pass(stage, again):
    """Fails if `down`, which it alone reads again, is kept from the forward pass.

    Counted before the CPU's compiler, which merges the two fetches.
    """
    run = make_run(stage)
    with jax.set_mesh(run.mesh):
        lowered = run.step.programs["gradients"].lower(run.state, models.make_batch())
    gathers = lowered.as_text().count("stablehlo.all_gather")
    assert gathers == len(run.state.master) + again
