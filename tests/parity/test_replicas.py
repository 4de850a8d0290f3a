"""Replicas that send each other packed gradients take the steps of one device."""

import jax
import numpy as np
import optax
import pytest

from tests.support import models, runs
from tests.support.crossing import crossing, is_large
from zjax.config import schema

MESHES = {
    "replica8": schema.Mesh(replica=8),
    "replica2-data4": schema.Mesh(replica=2),
    "replica4-tensor2": schema.Mesh(replica=4, tensor=2),
}
TOLERANCES = {"bfloat16": 2e-2, "int8": 2e-2}


def make_run(codec, mesh="replica2-data4", stage=0, **settings):
    communication = schema.Communication(codec=codec)
    return runs.make_small_run(
        optax.sgd(0.5),
        stage,
        mesh=MESHES[mesh],
        communication=communication,
        **settings,
    )


@pytest.fixture(scope="module")
def alone():
    return runs.train(runs.make_small_run(optax.sgd(0.5), 0, num_devices=1), 10)


@pytest.mark.parametrize("codec", TOLERANCES)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("mesh", MESHES)
def test_ten_steps_are_close_to_one_device(alone, mesh, stage, codec):
    """Fails if weights of replicas are ignored, or a sum is taken for a mean."""
    run = make_run(codec, mesh, stage, num_microbatches=2)
    losses, state = runs.train(run, 10)
    np.testing.assert_allclose(losses, alone[0], rtol=TOLERANCES[codec])
    for name in ("up", "down"):
        expected = np.asarray(alone[1].master[name])
        moved = expected - np.asarray(models.init(jax.random.key(0))[name])
        error = np.asarray(state.master[name]) - expected
        assert np.abs(error).max() < TOLERANCES[codec] * np.abs(moved).max()


def test_gradients_cross_replicas_in_the_form_of_the_codec():
    """Fails if the compiler reduces gradients over replicas, too."""
    run = make_run("int8", "replica8")
    sent = list(filter(is_large, crossing(run)))
    assert sorted(each.op for each in sent) == ["all-gather", "all-to-all"]
    assert {each.dtype for each in sent} == {"u8"}


def test_a_gradient_that_is_not_finite_changes_no_error():
    """Fails if one bad step is fed back into all later ones."""
    run = make_run("int8", "replica8")
    batch = models.make_batch()
    state, _ = run.step(run.state, batch)
    before = jax.tree.map(np.asarray, (state.extra, state.master))
    assert np.abs(before[0].worker).max() > 0
    batch["x"][3] = np.inf
    state, metrics = run.step(state, batch)
    assert metrics["skipped_steps"] == 1
    jax.tree.map(np.testing.assert_array_equal, (state.extra, state.master), before)
