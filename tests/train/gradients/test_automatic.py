"""Gradients over microbatches and devices against one batch on one device."""

import jax
import numpy as np
import optax
import pytest

from tests.support import models, runs
from zjax.errors import PlanError
from zjax.settings import schema


def grads_of(run, batch):
    placed = run.step.place_batch(batch)
    return run.step.programs["gradients"](run.state, placed)


def oracle(params, batch):
    """The token-weighted mean over the whole batch, in one piece."""

    def value(params):
        return models.loss(params, {}, batch, None).value

    return jax.value_and_grad(value)(params)


@pytest.mark.parametrize("reduce_dtype", ["compute", "float32"])
@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
@pytest.mark.parametrize("stage", [0, 2])
def test_weighted_mean_over_the_global_batch(stage, num_microbatches, reduce_dtype):
    """Fails if accumulation takes a mean of means: the weights differ by row."""
    precision = schema.Precision(compute_dtype="float32", reduce_dtype=reduce_dtype)
    run = runs.make_small_run(
        optax.sgd(0.1), stage, num_microbatches=num_microbatches, precision=precision
    )
    batch = models.make_batch()
    value, expected = oracle(models.init(jax.random.key(0)), batch)
    grads, loss = grads_of(run, batch)
    np.testing.assert_allclose(loss.value, value, rtol=1e-6)
    np.testing.assert_allclose(loss.metrics["error"], value, rtol=1e-6)
    assert loss.weight == batch["weight"].sum()
    for name, grad in grads.items():
        np.testing.assert_allclose(grad, expected[name], rtol=1e-5, atol=1e-7)


def reduced_dtypes(reduce_dtype):
    """Dtypes of the compiled program's reductions over devices, scalars aside."""
    precision = schema.Precision(compute_dtype="float16", reduce_dtype=reduce_dtype)
    step = runs.make_small_step(optax.sgd(0.1), 0, precision=precision)
    text = step.compile(models.make_batch(), "gradients").as_text()
    reduced = [line for line in text.splitlines() if " all-reduce(" in line]
    results = [line.split(" all-reduce(")[0].split("= ")[1] for line in reduced]
    return {
        r[:3] for line in results for r in line.strip("()").split(", ") if "[]" not in r
    }


def test_reduce_dtype_is_what_crosses_the_devices():
    """Fails if `reduce_dtype` does nothing."""
    assert reduced_dtypes("compute") == {"f16"}
    assert reduced_dtypes("float32") == {"f32"}


def test_batch_that_does_not_divide_is_refused():
    step = runs.make_small_step(optax.sgd(0.1), num_microbatches=2)
    with pytest.raises(PlanError) as error:
        step.compile(models.make_batch(batch=24))
    assert str(error.value).splitlines()[0] == (
        "batch/weight=(24,) does not divide over 8 shares of 2 microbatches; use a "
        "multiple of 16 as its first dim"
    )
    assert len(error.value.problems) == 3


def test_microbatch_without_weight_adds_nothing():
    batch = models.make_batch()
    batch["weight"][:] = 0
    batch["weight"][:4] = 1  # the first device's first microbatch alone
    run = runs.make_small_run(optax.sgd(0.1), num_microbatches=2, num_devices=4)
    value, expected = oracle(models.init(jax.random.key(0)), batch)
    grads, loss = grads_of(run, batch)
    np.testing.assert_allclose(loss.value, value, rtol=1e-6)
    np.testing.assert_allclose(grads["up"], expected["up"], rtol=1e-5, atol=1e-7)
