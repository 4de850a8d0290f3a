import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.refusals import config_error
from tests.support.rl import (
    ADVANTAGES,
    GOLDEN,
    MASK,
    NEW,
    OLD,
    SAMPLER,
    spoiled,
)
from zjax import rl

WEIGHTS = {"token": rl.token_weights, "sequence": rl.sequence_weights}
each = pytest.mark.parametrize("weigh", WEIGHTS.values(), ids=WEIGHTS)


def arrays(*given):
    return [jnp.asarray(x) for x in given]


def test_weights_are_products_over_a_sequence():
    tokens = np.where(MASK, np.exp(OLD - SAMPLER), 1)
    found = rl.token_weights(*arrays(OLD, SAMPLER, MASK))
    np.testing.assert_allclose(found, tokens, rtol=1e-5)
    found = rl.sequence_weights(*arrays(OLD, SAMPLER, MASK))
    np.testing.assert_allclose(found, tokens.prod(1, keepdims=True), rtol=1e-5)


@each
def test_trap_5_values_outside_the_mask_reach_nothing(weigh):
    found = weigh(*arrays(spoiled(OLD), spoiled(SAMPLER, np.inf), MASK))
    np.testing.assert_array_equal(found, weigh(*arrays(OLD, SAMPLER, MASK)))


@each
def test_weights_are_not_differentiated(weigh):
    sampler, mask = arrays(SAMPLER, MASK)
    gradient = jax.grad(lambda x: weigh(x, sampler, mask).sum())(jnp.asarray(OLD))
    assert not gradient.any()


@each
@pytest.mark.parametrize("gap", [-1e4, 1e4])
def test_weights_are_finite(weigh, gap):
    found = weigh(*arrays(OLD, SAMPLER + gap, MASK))
    assert np.isfinite(found).all()


def test_ends_of_a_range_are_inside():
    weights = jnp.array([[0.4, 0.5, 1.0, 5.0, 6.0]])
    found = rl.mask_weights(weights, lowest=0.5, bound=5.0)
    assert found.tolist() == [[0.0, 0.5, 1.0, 5.0, 0.0]]
    assert rl.truncate_weights(weights, bound=0.5).tolist() == [
        [pytest.approx(0.4), 0.5, 0.5, 0.5, 0.5]
    ]


def test_sequences_that_the_policy_left_are_golden():
    given = arrays(NEW, SAMPLER, ADVANTAGES, MASK)
    found = rl.on_policy_sequences(*given, threshold=0.1)
    assert found[:, 0].tolist() == GOLDEN["opsm_keep_threshold_0.1"]
    assert 0 < found.sum() < len(found)
    bad = arrays(spoiled(NEW), spoiled(SAMPLER), ADVANTAGES, MASK)
    np.testing.assert_array_equal(rl.on_policy_sequences(*bad, threshold=0.1), found)


@pytest.mark.parametrize(
    ("ratio", "correction"), [("sequences", "tokens"), ("tokens", "sequences")]
)
def test_trap_6_weights_of_another_unit_than_the_ratio_are_refused(ratio, correction):
    rl.check_correction(ratio, ratio)
    with config_error(
        f"correction={correction!r} weighs another unit than the ratio={ratio!r} of "
        f"the loss; use {ratio!r}"
    ):
        rl.check_correction(ratio, correction)


def test_bounds_out_of_range_are_refused():
    weights = jnp.ones((1, 1))
    with config_error("bound=0.0 is not a number above 0; use a positive number"):
        rl.truncate_weights(weights, bound=0.0)
    with config_error("bound=-1.0 is not a number above 0; use a positive number"):
        rl.mask_weights(weights, bound=-1.0)
    with config_error("lowest=4.0 is above bound=3.0; use 0.5 and 5.0"):
        rl.mask_weights(weights, lowest=4.0)
