"""Optimizers that keep second moments take no step that Adam could not take."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.reference import raw_moments
from tests.support import rules
from tests.support.refusals import refusal
from zjax.optim.build import make_optimizer
from zjax.optim.onebit import WARM_UP, AdamSteps, next_steps, scale_by_onebit_adam
from zjax.optim.phases import make_phases
from zjax.optim.zero_one_adam import LOCAL, MERGED, ONE_BIT, VARIANCE, zero_one_adam
from zjax.settings import schema

STEPS = AdamSteps(0.9, 0.99, 1e-8)
RARE, LARGE = jnp.array([1e-6, 1.0]), jnp.array([1.0, 1.0])
"""Gradients when second moments are kept, and later."""


def test_replicas_of_1_bit_adam_send_bounded_steps():
    """Fails if a token that was rare in the warm-up moves by a million rates."""
    tx = scale_by_onebit_adam(STEPS)
    _, state = tx.update(RARE, tx.init(RARE), phase=WARM_UP)
    sent = next_steps(LARGE, state, STEPS)
    assert sent[0] == pytest.approx(STEPS.bound)
    assert STEPS.bound == pytest.approx(1.0)


@pytest.mark.parametrize("phase", [ONE_BIT, LOCAL])
def test_steps_of_0_1_adam_are_bounded(phase):
    tx = zero_one_adam(lambda step: 0.5, STEPS, lambda params: 0.0)
    _, state = tx.update(RARE, tx.init(RARE), RARE, phase=VARIANCE)
    updates, _ = tx.update(LARGE, state, RARE, phase=phase)
    assert updates[0] == pytest.approx(-0.5 * STEPS.bound)


def test_steps_by_moments_of_all_gradients_are_those_of_adam():
    """Fails if the bound cuts steps that Adam takes while gradients grow."""
    steps = AdamSteps(0.9, 0.95, 1e-8)
    tx = zero_one_adam(lambda step: 1.0, steps, lambda params: 0.0)
    state = tx.init(RARE)
    for number in range(150):
        grads = LARGE * (steps.b2 / steps.b1) ** number
        updates, state = tx.update(grads, state, RARE, phase=VARIANCE)
    assert updates[0] < -1.15 < -steps.bound


FREEZE, NUM_STEPS = 4, 9
RAW = {
    "schedule": "constant",
    "num_warmup_steps": 0,
    "b2": 0.999,
    "bias_correction": False,
    "peak_learning_rate": 0.01,
    "weight_decay": 0.1,
}


def raw_steps(name, grads, params):
    """Returns the parameters after each step of one replica, whose messages arrive."""
    steps = {"freeze_step": FREEZE, "local_step_scaler": 99}
    optimizer = rules.optimizer(name, **RAW, **steps)
    config = schema.Config(num_steps=NUM_STEPS, optimizer=optimizer)
    tx, phases = make_optimizer(config), make_phases(config)
    state, found = tx.init(params), []
    for number, grad in enumerate(grads, start=1):
        phase = phases.at(number) if phases else ""
        kind = {"phase": LOCAL if phase == MERGED else phase} if phases else {}
        message = phases.by_name[phase].message if phases else None
        sent = message({"w": grad}, state) if message else {"w": grad}
        updates, state = tx.update(sent, state, params, **kind)
        if phase == MERGED:
            moved = {"w": -updates["w"]}
            updates, state = tx.update(moved, state, params, phase=MERGED)
        params = optax.apply_updates(params, updates)
        found.append(params["w"])
    return np.stack(found)


@pytest.mark.parametrize(
    "name", ["adamw", "lamb", "onebit_adam", "onebit_lamb", "zero_one_adam"]
)
def test_without_bias_correction_moments_stay_raw_through_the_freeze(name):
    """Fails if a step after the freeze is 1 / sqrt(1 - b2**4) = 15.8 times smaller."""
    rng = np.random.default_rng(1)
    params = rng.normal(size=(2, 3)).astype(np.float32)
    grads = rng.uniform(0.5, 1.0, (NUM_STEPS, 2, 3)).astype(np.float32)
    freezes = name not in ("adamw", "lamb")
    expected = raw_moments.updates(
        np.float64(grads), np.float64(params), rate=0.01, decay=0.1,
        freeze_step=FREEZE if freezes else NUM_STEPS, trust="lamb" in name,
    )  # fmt: skip
    found = raw_steps(name, jnp.asarray(grads), {"w": jnp.asarray(params)})
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)


def test_the_bound_of_raw_steps_clips_what_that_of_corrected_ones_clips():
    raw = dataclasses.replace(STEPS, corrects_bias=False)
    momentum, second = jnp.array([0.9, 1.1, -9.0]), 0.01 * jnp.ones(3)
    corrected = STEPS.of_momentum(momentum, second, 10**6, 1)
    assert corrected == pytest.approx([0.9, 1.0, -1.0])
    found = raw.of_momentum(momentum, second, 10**6, 1)
    assert found == pytest.approx([9.0, 10.0, -10.0])


def test_raw_moments_are_refused_beside_rules_without_the_correction():
    given = ["optimizer.rule=lion", "optimizer.rule.bias_correction=False"]
    start = "optimizer.rule.bias_correction=False has no effect with "
    assert refusal(given, 1).startswith(start)
