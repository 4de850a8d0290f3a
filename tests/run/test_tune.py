"""Settings of a model of the user are predicted, tried and chosen."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zjax
from tests.support.refusals import config_error, data_error
from zjax.errors import PlanError
from zjax.estimate.candidates import Candidate
from zjax.run import tune as tuning

WIDTH, ROWS = 512, 32
RULES = (
    {"pattern": "up/kernel", "dims": ("", "mlp")},
    {"pattern": "down/kernel", "dims": ("mlp", "")},
)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def loss_fn(model, batch, key):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def arguments():
    x, y = np.random.default_rng(0).normal(size=(2, ROWS, WIDTH)).astype(np.float32)
    return Net, optax.adam(1e-3), loss_fn, {"x": x, "y": y}


@pytest.fixture
def tried(monkeypatch):
    """Trials whose seconds are a function of the settings."""
    trials = []

    def time_steps(model, tx, loss_fn, batch, config, **options):
        trials.append(config)
        if config.zero.stage == 1:
            raise PlanError(zjax.errors.Problem("it", 1, "breaks", "mend it"))
        return 4.0 - config.zero.stage

    monkeypatch.setattr(tuning, "_time_steps", time_steps)
    return trials


def test_the_fastest_trial_is_returned_and_runs(tried, caplog):
    settings = {"zero": {"stage": 1}, "seed": 7}
    config = zjax.tune(*arguments(), settings, num_trials=5)
    # The given settings come first, fail, and are passed over.
    assert tried[0].zero.stage == 1 and config.zero.stage != 1
    assert {x.seed for x in (config, *tried)} == {7}
    ran = [x.zero.stage for x in tried]
    assert len({*ran}) > 2 and config.zero.stage == max(ran)
    assert "it=1 breaks" in caplog.text and "rows/s" in caplog.text
    run = zjax.initialize(*arguments(), config)
    _, metrics = run.step(run.state, arguments()[-1])
    assert run.config.global_batch_size == ROWS and float(metrics["loss"]) > 0


@pytest.mark.parametrize("mesh", ["auto", {}])
def test_rows_that_the_devices_do_not_divide_are_placed_on_a_mesh(mesh):
    """Fails if the mesh of all devices is checked before others are tried."""
    *others, batch = arguments()
    batch = jax.tree.map(lambda x: x[:12, None], batch)
    settings = {"mesh": {"tensor": 4, "data": 2, "rules": RULES}}
    if mesh == "auto":
        settings["mesh"] |= {"tensor": 0, "data": -1}
    run = zjax.initialize(*others, batch, settings)
    assert run.mesh.shape["tensor"] in (2, 4, 8) and run.mesh.shape["data"] in (1, 2, 4)
    state, _ = run.step(run.state, batch)
    assert int(state.step) == 1


def test_offload_as_given_keeps_what_no_candidate_varies():
    offload = {"kind": "pinned_host", "delay_updates_from": 3}
    config = zjax.load_config({"zero": {"stage": 2, "offload": offload}})
    host, device = (Candidate(1, 2, "", offload=x) for x in ("state", "none"))
    assert host.apply(config).zero.offload == config.zero.offload
    assert device.apply(config).zero.offload is None


@pytest.mark.parametrize("tx", [optax.sgd(0.1), None], ids=["given", "of the config"])
def test_steps_are_taken_and_timed_on_the_devices(tx):
    model, _, *others = arguments()
    config = zjax.tune(model, tx, *others, num_trials=1)
    assert config.global_batch_size == ROWS
    assert config.zero.stage == zjax.Config().zero.stage


def test_memory_is_predicted_from_the_loss_of_the_user():
    """Fails if the built-in model of the config is what is predicted."""
    devices = jax.devices()[:1]
    options = {"replicated": (), "cast": None, "devices": devices}
    config, own = tuning.prepare(*arguments(), {}, **options)
    machine = tuning.this_machine(devices)
    config = tuning.with_batch(config, machine)
    predictor = tuning.Predictor(config, machine, "cpu", own)
    one, all_rows = (predictor.num_bytes(Candidate(n, 1, "")) for n in (1, ROWS))
    weights = 2 * 2 * WIDTH**2
    assert 12 * weights < one < 26 * weights  # masters, moments, gradients, casts
    # Each row saves the input of each product, 2 and 4 bytes of 512 and 1,024 entries.
    assert all_rows - one > (ROWS - 1) * 3 * WIDTH * 2 - 4 * weights
    found = [*tuning.candidates(config, machine, own)]
    assert {x.remat for x in found} == {""}
    assert {x.offload for x in found} == {"none", "state"}


def test_what_no_trial_can_use_is_refused(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with config_error(
        "num_trials=0 tries nothing; use 1\n"
        "processes=2 would time and choose apart; tune in one process, and give all "
        "processes the config"
    ):
        zjax.tune(*arguments(), num_trials=0)
    monkeypatch.undo()
    *others, batch = arguments()
    said = "batch=None has shapes and no values; give arrays, to train on"
    with data_error(said):
        zjax.tune(*others, jax.eval_shape(lambda: batch))


def test_where_every_trial_fails_the_last_reason_is_told(monkeypatch):
    def fail(*_, **__):
        raise PlanError(zjax.errors.Problem("it", 1, "breaks", "mend it"))

    monkeypatch.setattr(tuning, "_time_steps", fail)
    with pytest.raises(PlanError, match="trials=2 fail, the last with: it=1 breaks"):
        zjax.tune(*arguments(), num_trials=2)
