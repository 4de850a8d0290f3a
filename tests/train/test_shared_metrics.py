"""Replicas that step apart decide together, at ends of rounds, whether to go on."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.support import models, runs
from zjax.config import load_config, schema
from zjax.errors import NonFiniteError
from zjax.observe.monitor import Monitor

LOWER = "lower optimizer.peak_learning_rate or look at the data"
ROUND = schema.Communication(num_local_steps=3)


def on_devices(x):
    """The values that different processes would read."""
    return [np.asarray(shard.data).item() for shard in x.addressable_shards]


def test_processes_read_the_same_numbers_at_the_end_of_a_round():
    """Fails if a replica alone tells of its NaN, or if others never learn of it."""
    run = runs.make_small_run(
        optax.sgd(0.1), 0, mesh=schema.Mesh(replica=8), communication=ROUND
    )
    state, told = run.state, []
    for step in range(1, 7):
        batch = models.make_batch(step)
        if step == 2:
            batch["y"][0] = np.nan  # of the first replica
        state, metrics = run.step(state, batch)
        told.append(on_devices(metrics["skipped_steps"]))
        if step % 3 == 0:
            for name, x in metrics.items():
                assert len(set(on_devices(x))) == 1, name
        elif step != 2:
            assert len(set(on_devices(metrics["loss"]))) == 8
    assert told == [[0.0] * 8, [0.0] * 8, *[[1.0] * 8] * 4]
    assert int(state.num_skipped) == 1


def test_metrics_at_the_end_of_a_round_are_means():
    """Fails for a sum, or for those of one replica."""
    losses = {}
    for length in (1, 2):
        communication = schema.Communication(num_local_steps=length)
        run = runs.make_small_run(
            optax.sgd(0.1),
            0,
            mesh=schema.Mesh(replica=8),
            communication=communication,
        )
        _, metrics = run.step(run.state, models.make_batch())
        losses[length] = on_devices(metrics["loss"])
    np.testing.assert_allclose(losses[1], np.mean(losses[2]), rtol=1e-6)


def take(monitor, step, **values):
    numbers = {"loss": 2.0, "grad_norm": 1.0, "skipped_steps": 0} | values
    with monitor.step(step, (), {"x": jnp.zeros(2)}) as given:
        given.append({name: jnp.float32(x) for name, x in numbers.items()})


@pytest.mark.parametrize(
    ("policy", "last", "text"),
    [
        (
            "stop",
            {"skipped_steps": 1},
            "skipped_steps=1.0 at step 3: gradients of a replica were not finite; "
            f"{LOWER}",
        ),
        (
            "update",
            {"loss": np.nan},
            "loss=nan is not finite at step 3, whose update was applied; go back to "
            f"the last checkpoint, and {LOWER}",
        ),
    ],
)
def test_a_run_ends_with_a_round(policy, last, text, tmp_path):
    """Fails if a process ends at a step whose loss only it has."""
    config = load_config(
        {
            "directory": str(tmp_path),
            "num_steps": 6,
            "communication": {"num_local_steps": 3},
            "precision": {"on_nonfinite": policy},
            "observe": {"plot": False},
        }
    )
    monitor = Monitor(
        config, last_step=0, num_skipped=0, tokens_per_step=0, num_devices=1
    )
    with monitor:
        take(monitor, 1)
        take(monitor, 2, loss=np.nan)
        take(monitor, 3, **last)
        with pytest.raises(NonFiniteError) as error:
            take(monitor, 4)
    assert str(error.value) == text
