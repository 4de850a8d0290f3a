import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.refusals import config_error
from tests.support.rl import GOLDEN, INPUTS, assert_gradient
from zjax import rl

RNG = np.random.default_rng(0)
PAIRS = INPUTS["rewards"].reshape(3, 2)
LISTS = RNG.normal(size=(3, 4))
MASK = np.array([[1, 1, 1, 1], [1, 0, 1, 0], [0, 1, 0, 0]], bool)
MARGINS = np.array([0.5, 1.0, 0.0])


def log_loss(gap):
    return np.logaddexp(0, -gap)


def pair_losses(pairs, mask=(True,) * 3, **arguments):
    chosen, rejected = jnp.asarray(pairs).T
    return rl.bradley_terry_loss(chosen, rejected, jnp.asarray(mask), **arguments)


def list_losses(lists, **arguments):
    return rl.ranking_loss(jnp.asarray(lists), jnp.asarray(MASK), **arguments)


def test_means_equal_the_golden_value():
    with jax.enable_x64(True):
        found = rl.example_mean(pair_losses(PAIRS), jnp.ones(3, bool)).mean
    expected = GOLDEN["preference"]["reward_model_bradley_terry"]
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_margins_raise_and_centering_adds_squares():
    with jax.enable_x64(True):
        found = pair_losses(PAIRS, margins=jnp.asarray(MARGINS), centering=0.1)
    gaps = PAIRS[:, 0] - PAIRS[:, 1] - MARGINS
    expected = log_loss(gaps) + 0.1 * PAIRS.sum(1) ** 2
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_lists_are_means_over_all_pairs():
    with jax.enable_x64(True):
        found = list_losses(LISTS, centering=0.2)
    expected = []
    for rewards, mask in zip(LISTS, MASK, strict=True):
        r = rewards[mask]
        pairs = [(r[i], r[j]) for i in range(len(r)) for j in range(i + 1, len(r))]
        losses = [log_loss(x - y) + 0.2 * (x + y) ** 2 for x, y in pairs]
        expected.append(np.mean(losses) if losses else 0.0)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert expected[2] == 0.0


def test_lists_of_two_are_pairs():
    lists = jnp.asarray(PAIRS), jnp.ones((3, 2), bool)
    np.testing.assert_array_equal(rl.ranking_loss(*lists), pair_losses(PAIRS))


def test_gradients_equal_finite_differences():
    def pairs(x):
        margins = jnp.asarray(MARGINS)
        losses = pair_losses(x, (True, True, False), margins=margins, centering=0.1)
        return losses.sum()

    assert not assert_gradient(pairs, PAIRS)[2].any()
    found = assert_gradient(lambda x: list_losses(x, centering=0.1).sum(), LISTS)
    assert not found[~MASK].any()
    assert not found[2].any()


def test_margins_get_no_gradient():
    gradient = jax.grad(lambda m: pair_losses(PAIRS, margins=m).sum())
    assert not gradient(jnp.asarray(MARGINS)).any()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_masked_rewards_reach_nothing(value):
    @jax.jit
    @jax.value_and_grad
    def pairs(x, margins):
        losses = pair_losses(x, (True, True, False), margins=margins, centering=0.1)
        return losses.sum()

    bad = PAIRS.copy(), MARGINS.copy()
    bad[0][2], bad[1][2] = value, value
    found = pairs(*map(jnp.asarray, bad))
    clean = pairs(jnp.asarray(PAIRS), jnp.asarray(MARGINS))
    jax.tree.map(np.testing.assert_array_equal, found, clean)

    total = jax.jit(jax.value_and_grad(lambda x: list_losses(x, centering=0.1).sum()))
    found = total(jnp.asarray(np.where(MASK, LISTS, value)))
    jax.tree.map(np.testing.assert_array_equal, found, total(jnp.asarray(LISTS)))


@pytest.mark.parametrize("gap", [1e4, -1e4])
def test_extreme_gaps_are_finite(gap):
    found, gradient = jax.value_and_grad(lambda x: pair_losses(x).sum())(
        jnp.array([[gap, 0.0]] * 3)
    )
    np.testing.assert_allclose(found, 3 * max(-gap, 0))
    assert np.isfinite(gradient).all()


def test_narrow_rewards_are_compared_in_float32():
    """The gap of two neighbours in bfloat16 is right, and the loss not rounded."""
    pairs = jnp.array([[1.0, 1.0078125]] * 3, jnp.bfloat16)
    found = pair_losses(pairs)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, log_loss(-0.0078125), rtol=1e-6)


def test_centering_below_zero_is_refused():
    text = "centering=-0.1 is not a number of 0 or more; use 0 or a positive number"
    with config_error(text):
        pair_losses(PAIRS, centering=-0.1)
    with config_error(text):
        list_losses(LISTS, centering=-0.1)
