import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.refusals import config_error
from tests.support.rl import GOLDEN, MASK, assert_gradient, spoiled
from zjax import rl

OLD = np.asarray(GOLDEN["gae"]["values"])
RETURNS = OLD + np.asarray(GOLDEN["gae"]["advantages_before_whitening"])
VALUES = np.asarray(GOLDEN["value_loss_clip_0.2"]["predictions"])


def total(values, old=OLD, returns=RETURNS, clip=0.2):
    given = (jnp.asarray(x) for x in (values, old, returns, MASK))
    losses = rl.value_loss(*given, clip=clip)
    return rl.token_mean(losses, jnp.asarray(MASK)).mean


def test_the_value_is_golden():
    with jax.enable_x64(True):
        found = total(VALUES)
    expected = GOLDEN["value_loss_clip_0.2"]["token_mean"]
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("clip", [0.2, math.inf])
def test_gradients_equal_finite_differences(clip):
    found = assert_gradient(lambda x: total(x, clip=clip), VALUES)
    plain = np.where(MASK, (VALUES - RETURNS) / MASK.sum(), 0)
    is_plain = np.isclose(found, plain)
    assert is_plain.all() == (clip == math.inf)


def test_a_value_that_has_moved_far_enough_rests():
    def loss(value):
        one = jnp.ones((1, 1))
        given = value[None, None], 0 * one, one, one.astype(bool)
        return rl.value_loss(*given, clip=0.2).sum()

    # Towards the return of 1 from 0; away from it the clip does not hold.
    found = [float(jax.grad(loss)(jnp.float32(x))) for x in (0.1, 0.3, -0.3)]
    np.testing.assert_allclose(found, [-0.9, 0.0, -1.3], rtol=1e-6)


def test_the_first_update_is_not_clipped():
    """Fails if equal values stop the gradient."""
    found = jax.grad(total)(jnp.asarray(OLD))
    expected = np.where(MASK, (OLD - RETURNS) / MASK.sum(), 0)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_trap_5_values_outside_the_mask_reach_nothing(value):
    bad = [jnp.asarray(spoiled(x, value)) for x in (VALUES, OLD, RETURNS)]
    found = jax.value_and_grad(total)(*bad)
    expected = jax.value_and_grad(total)(jnp.asarray(VALUES))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_targets_are_not_differentiated():
    found = jax.grad(total, argnums=(1, 2))(*map(jnp.asarray, (VALUES, OLD, RETURNS)))
    assert not any(x.any() for x in found)


def test_a_clip_of_0_is_refused():
    text = "clip=0.0 is not above 0; use 0.2, or math.inf for no clip"
    with config_error(text):
        total(VALUES, clip=0.0)
