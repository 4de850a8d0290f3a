"""Every stage, mesh and accumulation computes what one device computes."""

import numpy as np
import optax
import pytest

from tests.support import runs
from zjax.settings import schema

MESHES = {
    "data8": schema.Mesh(),
    "replica2-data4": schema.Mesh(replica=2, data=4),
    "data4-tensor2": schema.Mesh(data=4, tensor=2),
}


@pytest.fixture(scope="module")
def alone():
    return runs.train(runs.make_small_run(optax.sgd(0.5), 0, num_devices=1), 10)


@pytest.mark.parametrize("num_microbatches", [1, 4])
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("mesh", MESHES)
def test_losses_and_weights_equal_one_device(alone, mesh, stage, num_microbatches):
    run = runs.make_small_run(
        optax.sgd(0.5), stage, mesh=MESHES[mesh], num_microbatches=num_microbatches
    )
    losses, state = runs.train(run, 10)
    np.testing.assert_allclose(losses, alone[0], rtol=1e-5, atol=1e-6)
    for name in ("up", "down"):
        np.testing.assert_allclose(
            state.master[name], alone[1].master[name], rtol=1e-5, atol=1e-6
        )
