"""Schedulers: each step has the rate and the momentum of DeepSpeed."""

import json
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from zjax.config import check_config, load_config
from zjax.deepspeed import convert
from zjax.optim.build import make_optimizer
from zjax.schedule.learning_rate import cycled_momentum, make_schedule

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "schedules.json"
CASES = json.loads(GOLDEN.read_text())
"""Made by tests/golden/make_schedules.py with DeepSpeed 0.19.8."""
BOUNDS = {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3}
ids = [f"{case['type']}-{number}" for number, case in enumerate(CASES)]
each_case = pytest.mark.parametrize("case", CASES, ids=ids)


def converted(kind, params, rule="AdamW", **of_rule):
    values = {"train_batch_size": 8, "scheduler": {"type": kind, "params": params}}
    values["optimizer"] = {"type": rule, "params": of_rule}
    return convert(values)


def settings(case):
    rate = 1e-3 if case["type"] == "WarmupCosineLR" else 5.0
    found = converted(case["type"], case["params"], lr=rate, betas=[0.5, 0.999])
    assert not found.problems()
    config = load_config({"num_steps": 48}, found.settings)
    check_config(config, num_devices=8)
    return config


@each_case
def test_rates_are_those_of_deepspeed(case):
    rate = jax.jit(jax.vmap(make_schedule(settings(case))))
    got = rate(jnp.arange(len(case["rates"])))
    np.testing.assert_allclose(got, case["rates"], rtol=2e-6, atol=1e-9)


@each_case
def test_momenta_and_betas_are_those_of_deepspeed(case):
    optimizer = settings(case).optimizer
    first, second = map(list, zip(*case["betas"], strict=True))
    if momentum := getattr(optimizer.schedule, "momentum", None):
        rate = cycled_momentum(optimizer.schedule, momentum)
        got = jax.vmap(rate)(jnp.arange(len(first)))
        np.testing.assert_allclose(got, first, rtol=2e-6)
        assert {optimizer.rule.b2} == set(second)
    else:
        assert (optimizer.rule.b1, optimizer.rule.b2) == (0.5, 0.999)


@pytest.mark.parametrize("case", CASES[:3], ids=ids[:3])
def test_updates_are_those_of_deepspeed(case):
    """The optimizer itself has the cycled momentum, its bias correction included."""
    tx = make_optimizer(settings(case))

    def update(carry, step):
        weight, state = carry
        grads = {"w": jnp.full((1,), jnp.cos(jnp.float32(step)))}
        change, state = tx.update(grads, state, weight)
        weight = optax.apply_updates(weight, change)
        return (weight, state), weight["w"][0]

    weight = {"w": jnp.zeros(1)}
    steps = jnp.arange(len(case["weights"]))
    _, got = jax.lax.scan(update, (weight, tx.init(weight)), steps)
    np.testing.assert_allclose(got, case["weights"], rtol=1e-4, atol=1e-7)


def test_what_the_scheduler_replaces_is_told():
    told = {
        row.key: row.note
        for row in converted("OneCycle", BOUNDS, lr=5.0, betas=[0.5, 0.9]).rows
    }
    assert told["optimizer.params.lr"] == "the scheduler sets it"
    assert told["optimizer.params.betas"] == "the scheduler sets them"
    assert told["scheduler.params.cycle_momentum"].endswith(
        "b1 cycles, and b2 is 0.99, in place of betas"
    )


def test_sgd_has_no_betas_that_cycle():
    found = converted("OneCycle", BOUNDS, rule="SGD")
    assert not found.problems()
    assert "optimizer.schedule.cycles_momentum" not in found.settings


def problems(*changes):
    with pytest.raises(ValueError, match=r".") as error:
        check_config(load_config({}, *changes), num_devices=8)
    return str(error.value)


def test_cycles_that_cannot_be_are_refused():
    cycle = "optimizer.schedule=one_cycle"
    assert problems(cycle, "optimizer.schedule.min_learning_rate=1.0") == (
        "optimizer.schedule.min_learning_rate=1.0 exceeds "
        "optimizer.peak_learning_rate=0.0003; use at most 0.0003"
    )
    on = "optimizer.schedule.momentum=cycled_momentum"
    assert problems(cycle, on, "optimizer.schedule.momentum.min_momentum=0.95") == (
        "optimizer.schedule.momentum.min_momentum=0.95 exceeds "
        "optimizer.schedule.momentum.max_momentum=0.9; use at most 0.9"
    )
    grows = "optimizer.schedule.momentum.momentum_decay_rate=0.1"
    assert problems(cycle, on, grows, "num_steps=4011") == (
        "optimizer.schedule.momentum.momentum_decay_rate=0.1 ends at a momentum of 1.8 "
        "after 4011 steps; use less, or fewer num_steps"
    )
    assert problems("optimizer.schedule.growth=2.0") == (
        "optimizer.schedule.growth=2.0 has no effect with "
        "optimizer.schedule='cosine'; leave it out, or set optimizer.schedule to "
        "'range_test'"
    )


def test_a_rate_after_the_end_of_stairs_does_not_overflow():
    config = load_config(
        {},
        "optimizer.schedule=one_cycle",
        "optimizer.schedule.num_rise_steps=2097151",
        "optimizer.schedule.num_rise_stairs=1024",
    )
    rate = make_schedule(config)
    assert math.isclose(rate(jnp.int32(2_097_151)), 3e-4, rel_tol=1e-6)
    assert rate(jnp.int32(2**31 - 1)) == 0
