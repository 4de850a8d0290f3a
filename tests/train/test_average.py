"""Weights of evaluation are the average, where an optimizer or the run keeps one."""

import jax
import numpy as np
import optax
import pytest
from optax import contrib
from safetensors import numpy as safetensors

from tests.support import models, runs
from tests.support.trees import assert_close
from zjax.checkpoint.export import export_safetensors
from zjax.checkpoint.store import Store
from zjax.errors import ConfigError, PlanError
from zjax.replicas.state import saved_rows, saved_state
from zjax.settings import schema
from zjax.sharding import plan as plans
from zjax.train.average import choose_part, parts_of, with_part

NUM_STEPS = 4
BATCH = models.make_batch(99)


def free():
    return contrib.schedule_free_sgd(0.3, warmup_steps=2)


def half_free():
    """The average of one array of three."""
    labels = {"up": "free", "down": "plain", "bias": "plain"}
    return optax.multi_transform({"free": free(), "plain": optax.sgd(0.3)}, labels)


def expected(tx, average):
    """Parameters after some steps of optax alone, and as it evaluates them."""
    params, _ = models.make_mlp().init(jax.random.key(0))
    state = tx.init(params)

    def loss(params, batch):
        return models.loss(params, {}, batch, None).value

    for step in range(NUM_STEPS):
        grads = jax.grad(loss)(params, models.make_batch(step))
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params, average(state, params)


def of_half(state, params):
    inner = state.inner_states["free"].inner_state
    average = contrib.schedule_free_eval_params(inner, {**inner.z, "up": params["up"]})
    return {**params, "up": average["up"]}


def close(found, wanted):
    assert_close(found, wanted, rtol=1e-4, atol=1e-6)


@pytest.fixture(
    params=[
        pytest.param((free, contrib.schedule_free_eval_params, 3, 8), id="stage 3"),
        pytest.param((free, contrib.schedule_free_eval_params, 0, 1), id="one device"),
        pytest.param((half_free, of_half, 1, 8), id="one array of three"),
    ]
)
def trained(request):
    make_tx, average, stage, num_devices = request.param
    run = runs.make_small_run(make_tx(), stage, num_devices=num_devices)
    _, state = runs.train(run, NUM_STEPS)
    return run, state, *expected(make_tx(), average)


def test_schedule_free_weights_are_those_that_optax_evaluates(trained, tmp_path):
    """Fails if evaluation, the bound model or an export takes the trained ones."""
    run, state, raw, average = trained
    assert parts_of(state) == ("schedule_free", "raw")
    close(run.step.parameters(state), average)
    close(run.step.parameters(with_part(state, "raw")), raw)
    for part, params in zip(parts_of(state), (average, raw), strict=True):
        found = run.evaluate(with_part(state, part), BATCH)["loss"]
        wanted = models.loss(params, {}, BATCH, None).value
        np.testing.assert_allclose(found, wanted, rtol=1e-5)
    store = Store(str(tmp_path / "checkpoints"))
    rows = saved_rows(run.plan, run.config)
    store.save(NUM_STEPS, saved_state(state, run.plan), rows, extra={})
    store.close()
    for part, params in (("auto", average), ("raw", raw)):
        path = tmp_path / f"{part}.safetensors"
        export_safetensors(store, str(path), part=part)
        close(safetensors.load_file(path), params)


def test_an_average_whose_parts_rest_elsewhere_is_refused(monkeypatch):
    monkeypatch.setattr(plans, "MIN_MOVED_BYTES", 64)
    zero = schema.Zero(stage=1, offload=schema.PinnedHost())
    run = runs.make_small_run(free(), zero=zero)
    message = (
        "tx='schedule_free' has averaged weights whose parts rest elsewhere; use "
        "zero.offload=None, or part='raw'"
    )
    with pytest.raises(PlanError) as error:
        run.evaluate(run.state, BATCH)
    assert str(error.value) == message
    with pytest.raises(PlanError):
        run.bind(run.state)
    assert float(run.evaluate(with_part(run.state, "raw"), BATCH)["loss"]) > 0


def test_the_average_of_the_run_comes_first():
    optimizer = schema.Optimizer(ema_decay=0.5)
    run = runs.make_small_run(free(), optimizer=optimizer)
    assert parts_of(run.state) == ("ema", "schedule_free", "raw")
    for part in parts_of(run.state):
        assert parts_of(with_part(run.state, part))[0] == part


def test_a_part_that_is_not_kept_is_refused():
    assert choose_part("raw", ("ema", "raw")) == "raw"
    with pytest.raises(ConfigError) as error:
        choose_part("ema", ("raw",))
    assert str(error.value) == (
        "part='ema' is not kept in this run; use auto, or one of raw"
    )
