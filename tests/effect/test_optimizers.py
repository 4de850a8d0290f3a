"""Every optimizer of optax under every stage: the same steps, a share of the state."""

import functools

import jax
import numpy as np
import optax
import pytest

from tests.support import models, optimizers, runs
from tests.support.cases import some_by_hand
from zjax.errors import PlanError
from zjax.sharding import memory
from zjax.sharding.placement import array_bytes

N = 8


def whole_leaves_bytes(rows):
    """Bytes of the leaves that no device may hold a mere share of: small ones."""
    return sum(
        row.device_bytes for row in jax.tree.leaves(rows) if row.shape in ((), (1,))
    )


@functools.cache
def losses_on_one_device(name):
    run = runs.make_small_run(optimizers.OPTIMIZERS[name](), 0, num_devices=1)
    return runs.train(run, 2)[0]


@functools.cache
def bytes_of_whole_state(name):
    plan = runs.make_small_plan(optimizers.OPTIMIZERS[name](), 0)
    return memory.tree_bytes(plan.opt_state)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", optimizers.OPTIMIZERS)
def test_every_stage_keeps_a_share_of_the_state(name, stage):
    """Fails if the state of an optimizer is not found, or not split."""
    full = bytes_of_whole_state(name)
    rows = runs.make_small_plan(optimizers.OPTIMIZERS[name](), stage).opt_state
    split = [row for row in jax.tree.leaves(rows) if row.shape not in ((), (1,))]
    integers = [row for row in split if not np.issubdtype(row.dtype, np.floating)]
    whole = whole_leaves_bytes(rows) + sum(row.device_bytes for row in integers)
    padding = sum(
        array_bytes(row.stored_shape, row.stored_dtype)
        - array_bytes(row.shape, row.stored_dtype)
        for row in jax.tree.leaves(rows)
    )
    share = (full + padding) / N
    assert memory.tree_bytes(rows) <= whole + share


@pytest.mark.parametrize(
    "name", some_by_hand(optimizers.OPTIMIZERS, optimizers.ELEMENTWISE)
)
def test_stage_3_takes_the_steps_of_one_device(name):
    """Fails if an update is computed from a share as if it were the whole."""
    run = runs.make_small_run(optimizers.OPTIMIZERS[name](), 3)
    losses, _ = runs.train(run, 2)
    np.testing.assert_allclose(losses, losses_on_one_device(name), rtol=1e-4)


@pytest.mark.filterwarnings("ignore:.*seed.* is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", optimizers.REFUSED)
def test_what_cannot_work_is_refused_by_name(name):
    tx = optimizers.REFUSED[name][0]()
    with pytest.raises(PlanError) as error:
        runs.make_small_plan(tx, 2)
    (problem,) = error.value.problems
    function = name.removeprefix("contrib.").partition("(")[0]
    inside = {"dpsgd": "differentially_private_aggregate", "sophia": "hutchinson"}
    assert inside.get(function, function) in str(problem.value)
    assert problem.field == "optimizer"


def test_frozen_parameters_cost_no_optimizer_memory():
    """Fails if a frozen parameter has moments, or moves."""
    labels = {"up": "frozen", "down": "trained", "bias": "trained"}
    tx = optax.multi_transform(
        {"trained": optax.adam(1e-2), "frozen": optax.set_to_zero()}, labels
    )
    run = runs.make_small_run(tx, 2)
    shapes = [row.shape for row in jax.tree.leaves(run.plan.opt_state)]
    assert (models.WIDTH, models.HIDDEN) not in shapes
    assert shapes.count((models.HIDDEN, models.WIDTH)) == 2
    before = np.asarray(run.state.master["up"])
    _, state = runs.train(run, 2)
    np.testing.assert_array_equal(state.master["up"], before)


def test_state_leaf_of_another_shape_takes_no_parameters_place():
    """Fails if a factored moment is given the spec of its parameter."""
    tx = optax.adafactor(1e-2, min_dim_size_to_factor=8)
    rows = jax.tree.leaves(runs.make_small_plan(tx, 2).opt_state)
    factored = {row.shape: tuple(row.spec) for row in rows if row.path.endswith("up")}
    assert factored[models.WIDTH,] == ("data",)
    assert factored[models.HIDDEN,] == ("data",)
