"""Sparse attention: every stage and mesh computes what one device computes."""

import dataclasses

import jax
import numpy as np
import pytest

from tests.support import sparse as small
from zjax.config import check_config
from zjax.models.build import make_model
from zjax.observe import CompileReport
from zjax.optim.build import make_optimizer
from zjax.run.initialize import make_run
from zjax.settings import schema
from zjax.sharding import plan as plans

ROWS, STEPS = 8, 3
SLOW = pytest.mark.slow


def make_config(stage, *, zero=None, mesh=None, num_microbatches=1, **model):
    away = {"min_shard_elements": 0} if stage else {}
    return schema.Config(
        global_batch_size=ROWS,
        num_microbatches=num_microbatches,
        num_steps=20,
        mesh=mesh or schema.Mesh(),
        model=dataclasses.replace(small.GPT, num_layers=2, **model),
        data=schema.Data(length=small.LENGTH, source="synthetic"),
        zero=schema.Zero(stage=stage, **away, **(zero or {})),
        precision=schema.Precision(compute_dtype="float32"),
        optimizer=schema.Optimizer(schedule=schema.Cosine(num_warmup_steps=1)),
    )


def make_batch(step):
    rng = np.random.default_rng(step)
    tokens = rng.integers(0, 29, (ROWS, small.LENGTH + 1)).astype(np.int32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def train(config, num_devices, *, evaluates=True):
    """Losses of steps, and of an unseen batch: a further step compiles no program."""
    check_config(config, num_devices)
    model = make_model(config)
    devices = jax.devices()[:num_devices]
    run = make_run(config, model, make_optimizer(config, model), devices=devices)
    state, losses = run.state, []
    with CompileReport() as report:
        for step in range(STEPS):
            batch = make_batch(step)
            with report.watch(step + 1, batch) as compiled:
                state, metrics = run.step(state, batch)
            losses.append(float(metrics["loss"]))
    assert compiled.seconds == 0.0, "plans compile anew with each step"
    unseen = make_batch(STEPS)
    metrics = run.evaluate(state, unseen) if evaluates else run.step(state, unseen)[1]
    return [*losses, float(metrics["loss"])]


@pytest.fixture(scope="module")
def alone():
    losses = train(make_config(0, layers_per_scan=1), 1, evaluates=False)
    assert len(set(losses)) == len(losses)
    return losses


AWAY = {"offload": schema.PinnedHost(parameter_memory="pinned_host")}
HOST = {"remat": "attention", "activation_memory": "pinned_host"}


@pytest.mark.parametrize(
    ("config", "num_devices"),
    [
        pytest.param(make_config(0), 4, id="stage-0", marks=SLOW),
        pytest.param(
            make_config(1, num_microbatches=4), 2, id="stage-1-accumulated", marks=SLOW
        ),
        pytest.param(
            make_config(2, **HOST), 4, id="stage-2-activations-on-the-host", marks=SLOW
        ),
        pytest.param(
            make_config(3, layers_per_scan=1), 8, id="stage-3-loop", marks=SLOW
        ),
        pytest.param(
            make_config(3, mesh=schema.Mesh(tensor=2), num_microbatches=4),
            4,
            id="stage-3-tensor-accumulated",
        ),
        pytest.param(
            make_config(2, zero=AWAY, remat="full"),
            2,
            id="state-on-the-host",
            marks=SLOW,
        ),
    ],
)
def test_losses_are_those_of_one_device(alone, monkeypatch, config, num_devices):
    monkeypatch.setattr(plans, "MIN_MOVED_BYTES", 64)
    found = train(config, num_devices)
    np.testing.assert_allclose(found, alone, rtol=1e-5, atol=1e-6)
