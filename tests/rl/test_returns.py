import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.refusals import config_error
from tests.support.rl import GOLDEN, INPUTS, MASK, SAMPLER, spoiled
from zjax import rl

GAE = GOLDEN["gae"]
VALUES, REWARDS = np.asarray(GAE["values"]), np.asarray(GAE["token_rewards"])
SETTINGS = {"gamma": GAE["gamma"], "lam": GAE["lam"]}


def test_advantages_of_a_critic_are_golden():
    with jax.enable_x64(True):
        arrays = map(jnp.asarray, (REWARDS, VALUES, MASK))
        advantages, returns = rl.gae(*arrays, **SETTINGS)
    expected = np.asarray(GAE["advantages_before_whitening"])
    np.testing.assert_allclose(advantages, expected, rtol=1e-12, atol=1e-15)
    expected = np.where(MASK, expected + VALUES, 0)
    np.testing.assert_allclose(returns, expected, rtol=1e-12, atol=1e-15)


def test_whitened_advantages_have_the_variance_of_a_sample():
    with jax.enable_x64(True):
        advantages = jnp.asarray(GAE["advantages_before_whitening"])
        found = np.asarray(rl.whiten(advantages, jnp.asarray(MASK)))
    np.testing.assert_allclose(found[MASK].mean(), 0, atol=1e-12)
    np.testing.assert_allclose(found[MASK].std(ddof=1), 1, rtol=1e-6)
    assert not found[~MASK].any()


@pytest.mark.parametrize("tokens", [[], [2.0], [2.0, 2.0]])
def test_trap_2_whitening_of_equal_tokens_is_0(tokens):
    x = jnp.array([[*tokens, jnp.nan]])
    found = rl.whiten(x, ~jnp.isnan(x))
    np.testing.assert_array_equal(found, np.zeros(x.shape))


def test_tokens_of_a_tool_take_no_time():
    """Fails if a masked position in a sequence discounts or resets what follows."""
    mask = jnp.array([[True, False, True, False, False, True]])
    rewards = jnp.array([[0.0, np.nan, 0.5, np.nan, np.nan, 1.0]])
    values = jnp.array([[0.3, np.nan, -0.2, np.nan, np.nan, 0.1]])
    found = rl.gae(rewards, values, mask, gamma=0.9, lam=0.8)
    counts = np.asarray(mask)[0]
    packed = (x[:, counts] for x in (rewards, values, mask))
    expected = rl.gae(*packed, gamma=0.9, lam=0.8)
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x[:, counts], y, rtol=1e-6)
        assert not x[:, ~counts].any()


def test_returns_equal_a_loop():
    rewards = np.where(MASK, SAMPLER, 0)
    expected = np.zeros_like(rewards)
    for column in reversed(range(rewards.shape[1])):
        later = expected[:, column + 1] if column + 1 < rewards.shape[1] else 0
        expected[:, column] = rewards[:, column] + 0.9 * later
    expected = np.where(MASK, expected, 0)
    arrays = jnp.asarray(spoiled(SAMPLER)), jnp.asarray(MASK)
    found = rl.discounted_returns(*arrays, gamma=0.9)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_reinforce_plus_plus_whitens_returns_with_penalties():
    """Against a loop of its formula, for a penalty in the reward."""
    mask, rewards = jnp.asarray(MASK), jnp.asarray(INPUTS["rewards"], jnp.float32)
    kl = 0.1 * rl.kl_k1(*(jnp.asarray(INPUTS[x]) for x in ("new", "ref")), mask)
    found = rl.whiten(
        rl.discounted_returns(rl.token_rewards(rewards, kl, mask), mask), mask
    )
    returns = np.zeros(MASK.shape)
    penalties = np.where(MASK, 0.1 * (INPUTS["new"] - INPUTS["ref"]), 0)
    for row, length in enumerate(MASK.sum(1)):
        for column in range(length):
            later = penalties[row, column:].sum()
            returns[row, column] = INPUTS["rewards"][row] - later
    expected = (returns - returns[MASK].mean()) / returns[MASK].std(ddof=1)
    np.testing.assert_allclose(found, np.where(MASK, expected, 0), rtol=1e-4, atol=1e-6)


def test_the_last_token_has_the_reward():
    mask = jnp.array([[True, True, False], [False, True, True], [False] * 3])
    penalties = jnp.where(mask, 0.25, jnp.nan)
    found = rl.token_rewards(jnp.array([1.0, 2.0, 3.0]), penalties, mask)
    expected = [[-0.25, 0.75, 0.0], [0.0, -0.25, 1.75], [0.0, 0.0, 0.0]]
    assert found.tolist() == expected


def test_trap_2_a_missing_reward_has_no_penalty():
    """Fails if a sequence without reward trains on its divergence alone."""
    mask = jnp.ones((2, 2), bool)
    found = rl.token_rewards(jnp.array([jnp.nan, 1.0]), jnp.ones((2, 2)), mask)
    assert found.tolist() == [[0.0, 0.0], [-1.0, 0.0]]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_trap_5_values_outside_the_mask_reach_nothing(value):
    clean = map(jnp.asarray, (REWARDS, VALUES, MASK))
    bad = (spoiled(REWARDS, value), spoiled(VALUES, value), MASK)
    found = rl.gae(*map(jnp.asarray, bad), **SETTINGS)
    jax.tree.map(np.testing.assert_array_equal, found, rl.gae(*clean, **SETTINGS))


def test_advantages_are_not_differentiated():
    """Fails if a loss of the policy or the targets of a critic train the critic."""

    def total(values):
        arrays = jnp.asarray(REWARDS), values, jnp.asarray(MASK)
        return sum(x.sum() for x in rl.gae(*arrays))

    assert not jax.grad(total)(jnp.asarray(VALUES)).any()


def test_weights_out_of_range_are_refused():
    x, mask = jnp.ones((1, 1)), jnp.ones((1, 1), bool)
    with config_error(
        "gamma=1.1 is not in [0, 1]; use 1.0\nlam=-0.5 is not in [0, 1]; use 1.0"
    ):
        rl.gae(x, x, mask, gamma=1.1, lam=-0.5)
    with config_error("gamma=2.0 is not in [0, 1]; use 1.0"):
        rl.discounted_returns(x, mask, gamma=2.0)
