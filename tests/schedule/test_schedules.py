"""Learning rates against their closed forms."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.reference import schedules as reference
from tests.support import rules
from zjax.schedule import learning_rate
from zjax.settings import schema

PEAK = 3e-4


def make(kind, num_steps, num_warmup=100, final=0.0, decay_fraction=0.2):
    optimizer = rules.optimizer(
        schedule=kind,
        num_warmup_steps=num_warmup,
        peak_learning_rate=PEAK,
        final_fraction=final,
        decay_fraction=decay_fraction,
    )
    config = schema.Config(num_steps=num_steps, optimizer=optimizer)
    return jax.jit(jax.vmap(learning_rate.make_schedule(config)))


@pytest.mark.parametrize("num_warmup", [0, 1, 100])
@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "wsd"])
def test_schedule_equals_its_closed_form(kind, num_warmup):
    shape = dict(num_warmup=num_warmup, final=0.1, decay_fraction=0.25)
    steps = range(1200)
    got = make(kind, 1000, **shape)(jnp.arange(1200))
    want = [reference.fraction(s, kind=kind, num_steps=1000, **shape) for s in steps]
    np.testing.assert_allclose(got, PEAK * np.array(want), rtol=1e-5, atol=PEAK * 1e-6)


def test_a_log_warmup_is_that_of_deepspeed():
    """Its scheduler steps after the optimizer: update n has the rate of step n - 1."""
    optimizer = schema.Optimizer(
        schedule=schema.Constant(num_warmup_steps=100, warmup="log"),
        peak_learning_rate=PEAK,
    )
    rate = learning_rate.make_schedule(
        schema.Config(num_steps=300, optimizer=optimizer)
    )
    theirs = [0.0, *(min(1.0, math.log(n) / math.log(100)) for n in range(1, 300))]
    got = jax.vmap(rate)(jnp.arange(300))
    np.testing.assert_allclose(
        got, PEAK * np.array(theirs), rtol=1e-5, atol=PEAK * 1e-6
    )


def test_linear_decay_meets_the_golden_values():
    """Warm-up 100, zero at step 1000."""
    steps = jnp.array([0, 50, 99, 100, 550, 1000, 2000])
    got = make("linear", 1001)(steps) / PEAK
    np.testing.assert_allclose(got, [0, 0.5, 0.99, 1, 0.5, 0, 0], atol=1e-6)


@pytest.mark.parametrize("kind", ["linear", "cosine", "wsd"])
def test_last_step_has_exactly_the_final_rate(kind):
    got = make(kind, 1000, final=0.1)(jnp.array([998, 999, 1000]))
    final = np.float32(PEAK * 0.1)
    assert got[1] == got[2] == final
    assert got[0] > final


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "wsd"])
def test_warmup_ends_exactly_at_the_peak(kind):
    assert make(kind, 1000)(jnp.array([100]))[0] == np.float32(PEAK)


def test_an_open_warmup_takes_a_tenth_of_a_short_run():
    steps = [schema.Cosine().warmup_steps(total) for total in (5, 20, 999, 4_000)]
    assert steps == [0, 2, 99, 100]


@pytest.mark.parametrize("kind", ["linear", "wsd", "warmup_decay_lr"])
def test_a_trial_has_the_first_rates_of_the_whole_run(kind, caplog):
    """A run that ends in its warm-up is told so."""
    learning_rate._log_unreached.cache_clear()
    steps = jnp.arange(20)
    np.testing.assert_array_equal(make(kind, 20)(steps), make(kind, 1_000)(steps))
    assert caplog.messages == [
        "optimizer.schedule.num_warmup_steps=100 exceeds num_steps=20: the learning "
        "rate does not reach its peak"
    ]


def test_wsd_that_decays_longer_than_there_is_starts_at_the_peak():
    got = make("wsd", 201, decay_fraction=1.0)(jnp.array([100, 150, 200])) / PEAK
    np.testing.assert_allclose(got, [1, 0.5, 0], atol=1e-6)


def test_schedule_is_float32_from_python_and_from_traced_counts():
    schedule = learning_rate.make_schedule(schema.Config())
    assert schedule(3).dtype == jnp.float32
    assert jax.eval_shape(schedule, jnp.int32(3)).dtype == jnp.float32
    np.testing.assert_allclose(schedule(3), 9e-6, rtol=1e-5)


def test_schedule_without_a_step_after_warmup_still_rises():
    rise = schema.Optimizer(schedule=schema.Cosine(num_warmup_steps=4))
    config = schema.Config(num_steps=3, optimizer=rise)
    schedule = learning_rate.make_schedule(config)
    np.testing.assert_allclose(schedule(2), 0.5 * 3e-4, rtol=1e-6)
