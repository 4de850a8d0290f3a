"""What one step does to the state, and what it leaves alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.support import models, runs
from tests.support.trees import assert_close
from zjax.run.build import make_run
from zjax.settings import schema

FLOAT16 = schema.Precision(
    compute_dtype="float16", loss_scale=schema.LossScale(initial=2.0**10, window=2)
)


def copy(tree):
    return jax.tree.map(np.asarray, tree)


def poisoned(step=0):
    batch = models.make_batch(step)
    batch["x"][3, 5] = np.inf
    return batch


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16", "float16"])
def test_step_that_is_not_finite_changes_only_counters(compute_dtype):
    """Fails if a NaN reaches the weights, the moments, the average or the schedule."""
    run = runs.make_small_run(
        optax.adam(1e-2),
        precision=schema.Precision(compute_dtype=compute_dtype),
        optimizer=schema.Optimizer(ema_decay=0.9),
    )
    _, state = runs.train(run, 2)
    before = copy(state)
    after, metrics = run.step(state, poisoned())
    assert metrics["skipped_steps"] == 1
    assert (int(after.step), int(after.num_skipped)) == (3, 1)
    for name in ("master", "opt_state", "model_state", "ema"):
        jax.tree.map(
            np.testing.assert_array_equal, getattr(after, name), getattr(before, name)
        )


def test_steps_that_update_regardless_skip_none():
    """Fails if `on_nonfinite="update"` counts a step as skipped that it took: schedule
    and average would lag behind the weights."""
    precision = schema.Precision(compute_dtype="float32", on_nonfinite="update")
    run = runs.make_small_run(optax.sgd(0.1), precision=precision)
    state, metrics = run.step(run.state, poisoned())
    assert metrics["skipped_steps"] == 0
    assert (int(state.step), int(state.num_skipped)) == (1, 0)
    assert np.isnan(state.master["up"]).any()


def test_step_without_a_finite_loss_or_a_trained_row_is_skipped():
    """Fails if only gradients are looked at: a loss may overflow in a term that has
    none, and weights decay by a batch of padding."""

    def loss(params, model_state, batch, key):
        out = models.loss(params, model_state, batch, key)
        offset = jax.lax.stop_gradient(jnp.max(batch["offset"]))
        return out._replace(value=out.value + offset)

    model = dataclasses.replace(models.make_mlp(), loss=loss)
    run = runs.make_small_run(optax.adamw(1e-2, weight_decay=0.5), model=model)
    batch = models.make_batch() | {"offset": np.zeros(models.BATCH, np.float32)}
    state, metrics = run.step(run.state, batch)
    assert metrics["skipped_steps"] == 0
    before = copy((state.master, state.opt_state))
    batch["offset"][5] = np.inf
    state, metrics = run.step(state, batch)
    assert np.isfinite(metrics["grad_norm"])
    assert metrics["skipped_steps"] == 1
    batch["offset"][5], batch["weight"][:] = 0, 0
    state, metrics = run.step(state, batch)
    assert (metrics["weight"], metrics["grad_norm"]) == (0, 0)
    assert metrics["skipped_steps"] == 2
    after = copy((state.master, state.opt_state))
    jax.tree.map(np.testing.assert_array_equal, after, before)


def test_gradients_are_unscaled_with_the_scale_they_were_made_with():
    """Fails if a step whose scale doubles divides by the new scale."""
    scaled = runs.make_small_run(optax.sgd(0.5), precision=FLOAT16)
    fixed = schema.LossScale(initial=2.0**10, window=0)
    precision = schema.Precision(compute_dtype="float16", loss_scale=fixed)
    plain = runs.make_small_run(optax.sgd(0.5), precision=precision)
    losses, state = runs.train(scaled, 8)
    assert float(state.scaler.scale) > 2.0**10
    expected, _ = runs.train(plain, 8)
    np.testing.assert_allclose(losses, expected, rtol=2e-3)


def test_optimizers_are_told_the_loss_itself():
    """Fails if a rule that reads the loss, as Polyak's, gets 1,024 times as much."""

    def keep_value(updates, state, params=None, *, value, **extra):
        return updates, value

    told = optax.GradientTransformationExtraArgs(lambda _: jnp.zeros(()), keep_value)
    run = runs.make_small_run(optax.chain(told, optax.sgd(0.1)), precision=FLOAT16)
    state, metrics = run.step(run.state, models.make_batch())
    assert state.opt_state[0] == metrics["loss"]
    assert metrics["loss_scale"] == 2.0**10


def test_overflow_halves_the_scale_and_the_next_step_goes_on():
    run = runs.make_small_run(optax.sgd(0.5), precision=FLOAT16)
    state, _ = run.step(run.state, poisoned())
    state, metrics = run.step(state, poisoned())
    assert float(state.scaler.scale) == 2.0**9
    assert metrics["loss_scale"] == 2.0**10
    state, metrics = run.step(state, models.make_batch())
    assert np.isfinite(metrics["loss"])
    assert (int(state.step), int(state.num_skipped)) == (3, 2)


@pytest.mark.parametrize("stage", [0, 3])
def test_norm_is_that_before_clipping_and_the_step_is_clipped(stage):
    limit = 0.25
    settings = schema.Optimizer(clip_norm=limit)
    run = runs.make_small_run(optax.sgd(1.0), stage, optimizer=settings)
    before = copy(run.state.master)
    batch = models.make_batch()
    grads = jax.grad(lambda p: models.loss(p, {}, batch, None).value)(
        models.init(jax.random.key(0))
    )
    norm = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(grads)))
    state, metrics = run.step(run.state, batch)
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
    assert norm > limit
    expected = before["up"] - grads["up"] * limit / (norm + 1e-6)
    np.testing.assert_allclose(state.master["up"], expected, rtol=1e-5, atol=1e-7)


def test_average_follows_the_parameters():
    """Fails if the average is not updated, or not used by evaluation."""
    settings = schema.Optimizer(ema_decay=0.05)  # below the ramp, which starts at 0.1
    run = runs.make_small_run(optax.sgd(0.5), optimizer=settings)
    start = copy(run.state.master["up"])
    state, _ = run.step(run.state, models.make_batch())
    expected = 0.05 * start + 0.95 * np.asarray(state.master["up"])
    np.testing.assert_allclose(state.ema["up"], expected, rtol=1e-5, atol=1e-7)
    batch = models.make_batch(1)
    evaluated = run.evaluate(state, batch)["loss"]
    params = {
        name: jnp.asarray(x)[:7] if name == "bias" else jnp.asarray(x)
        for name, x in copy(state.ema).items()
    }
    alone = models.loss(params, {}, batch, None).value
    np.testing.assert_allclose(evaluated, alone, rtol=1e-5)


def test_skipped_steps_do_not_ramp_up_the_average():
    """Fails if the decay counts steps that were skipped: the first that is applied
    moves the average by 9 / 10, and as the third step it would by 9 / 12."""
    settings = schema.Optimizer(ema_decay=0.999)
    run = runs.make_small_run(optax.sgd(0.5), optimizer=settings)
    start = copy(run.state.master["up"])
    state, _ = run.step(run.state, poisoned())
    state, _ = run.step(state, poisoned())
    state, metrics = run.step(state, models.make_batch())
    assert metrics["skipped_steps"] == 2
    moved = np.asarray(state.master["up"]) - start
    np.testing.assert_allclose(state.ema["up"] - start, 0.9 * moved, rtol=1e-4)


def test_learning_rate_is_that_of_the_applied_step():
    config = runs.make_config()
    schedule = optax.linear_schedule(1.0, 0.0, 10)
    run = make_run(config, models.make_mlp(), optax.sgd(schedule), schedule=schedule)
    state, metrics = run.step(run.state, models.make_batch())
    assert metrics["learning_rate"] == 1.0
    state, metrics = run.step(state, poisoned())
    assert metrics["learning_rate"] == np.float32(0.9)
    _, metrics = run.step(state, models.make_batch())
    assert metrics["learning_rate"] == np.float32(0.9)


def test_two_programs_equal_one():
    """Fails if the seam between gradients and update changes what a step does."""
    losses, states = [], []
    for apart in (False, True):
        run = runs.make_small_run(optax.adam(1e-2), num_microbatches=2)
        state, programs = run.state, run.step.programs
        for step in range(3):
            batch = run.step.place_batch(models.make_batch(step))
            if apart:
                grads, loss = programs["gradients"](state, batch)
                state, metrics = programs["update"](state, grads, loss, batch)
            else:
                state, metrics = programs["train"](state, batch)
        losses.append(float(metrics["loss"]))
        states.append(copy(state.master))
    np.testing.assert_allclose(*losses, rtol=1e-6)
    assert_close(*states, rtol=1e-5, atol=1e-7)


def test_random_key_of_a_step_does_not_depend_on_the_mesh():
    """Fails if dropout differs between meshes, or does not differ between steps."""

    def loss(params, model_state, batch, key):
        out = models.loss(params, model_state, batch, key)
        drawn = jnp.float32(0) if key is None else jax.random.uniform(key)
        return out._replace(metrics={"drawn": drawn})

    model = models.make_mlp()
    model = type(model)(**{**vars(model), "loss": loss})
    draws = []
    for num_devices, stage in ((1, 0), (8, 3)):
        run = runs.make_small_run(
            optax.sgd(0.1), stage, model=model, num_devices=num_devices
        )
        state, first = run.step(run.state, models.make_batch())
        _, second = run.step(state, models.make_batch())
        draws.append((float(first["drawn"]), float(second["drawn"])))
    assert draws[0] == draws[1]
    assert draws[0][0] != draws[0][1]


def test_two_runs_are_bitwise_equal():
    states = []
    for _ in range(2):
        run = runs.make_small_run(optax.adam(1e-2), num_microbatches=2)
        states.append(runs.train(run, 3)[1])
    jax.tree.map(np.testing.assert_array_equal, *map(copy, states))
