"""Replicas that step apart decide together, at ends of rounds, whether to go on."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.support import models, runs
from zjax.config import load_config
from zjax.errors import NonFiniteError
from zjax.run.monitor import Monitor
from zjax.schedule.training import TrainingSchedule
from zjax.settings import schema

LOWER = "lower optimizer.peak_learning_rate or look at the data"
ROUND = schema.Communication(local_steps=schema.LocalSteps(num_steps=3))


def on_devices(x):
    """The values that different processes would read."""
    return [np.asarray(shard.data).item() for shard in x.addressable_shards]


def test_processes_read_the_same_numbers_at_the_end_of_a_round():
    """Fails if a replica alone tells of its NaN, or if others never learn of it.

    Fails, too, if steps of one replica hide behind those that another one skipped.
    """
    run = runs.make_small_run(
        optax.sgd(0.1), 0, mesh=schema.Mesh(replica=8), communication=ROUND
    )
    state, told = run.state, []
    for step in range(1, 7):
        batch = models.make_batch(step)
        if step == 2:
            batch["y"][0] = np.nan  # of the first replica
        if step == 5:
            batch["y"][-1] = np.nan  # of the last replica
        state, metrics = run.step(state, batch)
        told.append(on_devices(metrics["skipped_steps"]))
        if step % 3 == 0:
            for name, x in metrics.items():
                assert len(set(on_devices(x))) == 1, name
        elif step not in (2, 5):
            assert len(set(on_devices(metrics["loss"]))) == 8
    assert told == [[x] * 8 for x in (0.0, 0.0, 1.0, 1.0, 1.0, 2.0)]
    assert int(state.num_skipped) == 2


def counting_loss(params, model_state, batch, key):
    """Also tells how many rows count, and adds up their weights."""
    out = models.loss(params, model_state, batch, key)
    rows = jnp.sum(batch["weight"] > 0)
    total = {"rows": rows, "none": rows == 0}
    return out._replace(metrics={"rows_in_mean": rows}, totals=(total,))


def test_metrics_at_the_end_of_a_round_are_those_of_all_rows():
    """Fails if replicas without weight count, or for metrics of one replica."""
    model = dataclasses.replace(models.make_mlp(), loss=counting_loss)
    batch = models.make_batch()
    batch["weight"] *= np.arange(models.BATCH) < 12  # of the first three replicas
    told = {}
    for length in (1, 2):
        run = runs.make_small_run(
            optax.sgd(0.1),
            0,
            mesh=schema.Mesh(replica=8),
            communication=schema.Communication(
                local_steps=schema.LocalSteps(num_steps=length)
            ),
            model=model,
        )
        _, metrics = run.step(run.state, batch)
        told[length] = {name: on_devices(x) for name, x in metrics.items()}
    together, apart = told[1], told[2]
    weights = apart["weight"]
    assert weights[3:] == [0] * 5
    for name in ("loss", "rows_in_mean"):
        mean = np.average(apart[name], weights=weights)
        np.testing.assert_allclose(together[name], [mean] * 8, rtol=1e-6)
    norm = np.mean(apart["grad_norm"])
    np.testing.assert_allclose(together["grad_norm"], [norm] * 8, rtol=1e-6)
    assert together["weight"] == [sum(weights)] * 8
    assert together["rows"] == [sum(apart["rows"])] * 8
    assert together["none"] == [True] * 8


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
            f"loss=nan is not finite at step 2, whose update was not applied; {LOWER}",
        ),
        (
            "update",
            {"loss": np.nan},
            "loss=nan is not finite at step 2, whose update was applied; go back to "
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
            "communication": {"local_steps": {"num_steps": 3}},
            "precision": {"on_nonfinite": policy},
            "observe": {"plot": False},
        }
    )
    monitor = Monitor(
        config,
        models.make_mlp(),
        last_step=0,
        num_skipped=0,
        has_tokens=False,
        num_devices=1,
        schedule=TrainingSchedule(config),
    )
    with monitor:
        take(monitor, 1)
        take(monitor, 2, loss=np.nan)
        take(monitor, 3, **last)
        with pytest.raises(NonFiniteError) as error:
            take(monitor, 4)
    assert str(error.value) == text
