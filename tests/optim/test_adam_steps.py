"""Optimizers that keep second moments take no step that Adam could not take."""

import jax.numpy as jnp
import pytest

from zjax.optim.adam_steps import AdamSteps
from zjax.optim.intervals import LOCAL, ONE_BIT, VARIANCE
from zjax.optim.onebit_adam import WARM_UP, next_steps, scale_by_onebit_adam
from zjax.optim.zero_one_adam import zero_one_adam

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
