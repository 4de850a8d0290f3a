"""What a model carries from step to step, and what a loss is told."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zjax
from tests.support import models, runs
from zjax.settings import schema
from zjax.typing import Loss


def make_counting_model():
    """Counts its microbatches, averages its inputs, and says what key it got."""

    def loss(params, model_state, batch, key):
        out = models.loss(params, {}, batch, key)
        state = {
            "count": model_state["count"] + 1,
            "mean": 0.5 * model_state["mean"] + 0.5 * batch["x"].mean(),
        }
        is_training = jnp.float32(key is not None)
        drawn = is_training if key is None else jax.random.uniform(key)
        metrics = {"training": is_training, "drawn": drawn}
        return Loss(out.value, out.weight, state, metrics)

    start = {"count": jnp.int32(0), "mean": jnp.float32(0)}
    return dataclasses.replace(
        models.make_mlp(), init=lambda key: (models.init(key), start), loss=loss
    )


def test_state_goes_from_microbatch_to_microbatch():
    """Fails if each microbatch starts from the state before the step."""
    run = runs.make_small_run(
        optax.sgd(0.1), model=make_counting_model(), num_microbatches=4
    )
    state, _ = run.step(run.state, models.make_batch())
    assert int(state.model_state["count"]) == 4
    state, _ = run.step(state, models.make_batch())
    assert int(state.model_state["count"]) == 8


def test_step_that_is_skipped_keeps_the_state():
    """Fails if statistics of a batch that is not finite are kept."""
    run = runs.make_small_run(optax.sgd(0.1), model=make_counting_model())
    state, _ = run.step(run.state, models.make_batch())
    before = jax.tree.map(np.asarray, state.model_state)
    batch = models.make_batch()
    batch["x"][0] = np.nan
    state, metrics = run.step(state, batch)
    assert metrics["skipped_steps"] == 1
    jax.tree.map(np.testing.assert_array_equal, before, state.model_state)


def test_evaluation_says_so_and_changes_nothing():
    """Fails if evaluation runs in training mode."""
    run = runs.make_small_run(optax.sgd(0.1), model=make_counting_model())
    assert run.evaluate(run.state, models.make_batch())["training"] == 0
    assert int(run.state.model_state["count"]) == 0
    _, metrics = run.step(run.state, models.make_batch())
    assert metrics["training"] == 1


def test_shares_draw_for_themselves_where_they_have_their_own_gradients():
    """Fails if every share drops the same entries: the mean would be one draw."""
    precision = schema.Precision(compute_dtype="bfloat16", reduce_dtype="float32")
    run = runs.make_small_run(
        optax.sgd(0.1), model=make_counting_model(), precision=precision
    )
    batch = models.make_batch()
    batch["weight"][:] = 1
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), 0), 0)
    draws = [jax.random.uniform(jax.random.fold_in(key, i)) for i in range(8)]
    _, metrics = run.step(run.state, batch)
    np.testing.assert_allclose(metrics["drawn"], np.mean(draws), rtol=1e-5)


def test_frozen_parameters_neither_move_nor_count_in_the_norm():
    """Fails if the gradient of a frozen matrix scales down the others."""
    frozen = schema.ParamGroup(pattern="up", learning_rate_scale=0.0)
    settings = {
        "optimizer": {"name": "sgd", "groups": (frozen,), "num_warmup_steps": 0},
        "precision": {"compute_dtype": "float32"},
    }
    batch = models.make_batch()

    def loss_fn(model, batch, key):
        return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

    run = zjax.initialize((models.init, models.apply), None, loss_fn, batch, settings)
    before = jax.tree.map(np.asarray, run.state.master)
    grads = jax.grad(lambda p: loss_fn(lambda x: models.apply(p, x), batch, None))(
        before
    )
    trained = np.sqrt(sum(np.sum(grads[name] ** 2) for name in ("down", "bias")))
    state, metrics = run.step(run.state, batch)
    np.testing.assert_allclose(metrics["grad_norm"], trained, rtol=1e-5)
    np.testing.assert_array_equal(state.master["up"], before["up"])
    assert not np.array_equal(state.master["down"], before["down"])


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("name", ["sgd", "polyak_sgd", "lbfgs"])
def test_optimizer_that_is_brought_takes_its_own_steps(name, stage):
    """Fails if the step clips, or scales, what an optimizer of the user's gets."""
    make = {
        "sgd": lambda: optax.sgd(0.1),
        "polyak_sgd": lambda: optax.polyak_sgd(),
        "lbfgs": lambda: optax.lbfgs(memory_size=3),
    }[name]

    def loss_fn(model, batch, key):
        return 100 * jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

    batch = models.make_batch()
    network = (models.init, models.apply)
    zero = {"stage": 3, "min_shard_elements": 64} if stage else {"stage": 0}
    settings = {"precision": {"compute_dtype": "float32"}, "zero": zero}
    run = zjax.initialize(network, make(), loss_fn, batch, settings)
    params = jax.tree.map(jnp.asarray, jax.device_get(run.state.master))
    tx = optax.with_extra_args_support(make())

    def value(params):
        return loss_fn(lambda x: models.apply(params, x), batch, None)

    opt_state = tx.init(params)
    expected = []
    for _ in range(3):
        loss, grads = jax.value_and_grad(value)(params)
        updates, opt_state = tx.update(
            grads, opt_state, params, value=loss, grad=grads, value_fn=value
        )
        params = optax.apply_updates(params, updates)
        expected.append(float(loss))
    state, losses = run.state, []
    for _ in range(3):
        state, metrics = run.step(state, batch)
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses, expected, rtol=1e-4)


def test_microbatch_whose_mean_is_over_nothing_adds_nothing():
    """Fails if 0 / 0 of one microbatch makes the whole step NaN."""

    def loss(params, model_state, batch, key):
        error = (models.apply(params, batch["x"]) - batch["y"]) ** 2
        weight = batch["weight"].sum()
        value = jnp.sum(error * batch["weight"][:, None]) / (models.WIDTH * weight)
        return Loss(value, weight, model_state, {})

    model = dataclasses.replace(models.make_mlp(), loss=loss)
    run = runs.make_small_run(
        optax.sgd(0.1), model=model, num_devices=1, num_microbatches=2
    )
    batch = models.make_batch()
    batch["weight"][16:] = 0
    _, metrics = run.step(run.state, batch)
    assert metrics["skipped_steps"] == 0
    assert np.isfinite(metrics["grad_norm"])


def test_average_is_kept_in_float32():
    """Fails if the average rests in bfloat16, where small steps are lost."""
    precision = schema.Precision(master_dtype="bfloat16")
    settings = schema.Optimizer(ema_decay=0.999)
    run = runs.make_small_run(optax.sgd(0.1), precision=precision, optimizer=settings)
    assert run.state.master["up"].dtype == jnp.bfloat16
    state, _ = run.step(run.state, models.make_batch())
    assert state.ema["up"].dtype == jnp.float32
    rows = run.plan.ema["up"]
    assert rows.device_bytes == 4 * models.WIDTH * models.HIDDEN // 8


def test_numbers_per_row_keep_their_precision():
    """Fails if weights above 256 are rounded to bfloat16."""
    run = runs.make_small_run(optax.sgd(0.1), precision=schema.Precision())
    batch = models.make_batch()
    batch["weight"][:] = 257
    _, metrics = run.step(run.state, batch)
    assert metrics["weight"] == 257 * models.BATCH
