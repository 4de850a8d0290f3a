"""Second moments that no gradient has updated are not kept in silence."""

import numpy as np
import pytest

from tests.support import models, runs
from zjax.config import schema
from zjax.errors import NonFiniteError
from zjax.optim.build import make_optimizer

FREEZE = 2


def make_run(name):
    settings = {
        "optimizer": schema.Optimizer(
            name=name, freeze_step=FREEZE, num_warmup_steps=1
        ),
        "mesh": schema.Mesh(replica=2),
        "num_steps": 6,
    }
    tx = make_optimizer(runs.make_config(0, **settings))
    return runs.make_small_run(tx, 0, num_devices=2, **settings)


def after_warm_up(run, num_skipped):
    """The state after the warm-up, of which the first steps have no finite loss."""
    state = run.state
    for step in range(FREEZE):
        batch = models.make_batch(step)
        if step < num_skipped:
            batch["x"][0] = np.nan
        state, _ = run.step(state, batch)
    assert int(state.num_skipped) == num_skipped
    return state


@pytest.mark.parametrize("name", ["onebit_adam", "onebit_lamb", "zero_one_adam"])
def test_a_warm_up_of_skipped_steps_ends_the_run(name):
    """Without second moments no parameter would move again."""
    run = make_run(name)
    state = after_warm_up(run, FREEZE)
    with pytest.raises(NonFiniteError) as error:
        run.step(state, models.make_batch())
    assert str(error.value) == (
        "optimizer.freeze_step=2 ends a warm-up whose steps were all skipped, and "
        "nothing would move; use more, or a smaller precision.loss_scale.initial"
    )


def test_one_step_of_the_warm_up_is_enough():
    run = make_run("onebit_adam")
    state = after_warm_up(run, FREEZE - 1)
    _, metrics = run.step(state, models.make_batch())
    assert metrics["skipped_steps"] == FREEZE - 1
