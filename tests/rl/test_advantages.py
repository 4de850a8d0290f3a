import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.rl import GOLDEN, INPUTS
from zjax import rl

REWARDS = INPUTS["rewards"].reshape(-1, 3)
ADVANTAGES = {
    "grpo_trl_eps1e-4_ddof1": rl.group_advantages,
    "grpo_ddof1_eps1e-6": lambda x: rl.group_advantages(x, epsilon=1e-6),
    "dr_grpo": lambda x: rl.group_advantages(x, by_std=False),
    "rloo": rl.rloo_advantages,
    "gdpo": lambda x: rl.decoupled_advantages(x[None], jnp.ones(1, x.dtype)),
}
COMPILED = {name: jax.jit(function) for name, function in ADVANTAGES.items()}
"""A program for each shape takes less time than one for each operation."""
DECOUPLED, GROUPED = map(jax.jit, (rl.decoupled_advantages, rl.group_advantages))
each = pytest.mark.parametrize("advantages", COMPILED.values(), ids=COMPILED)


@pytest.mark.parametrize("name", GOLDEN["advantages"])
def test_values_are_golden(name):
    with jax.enable_x64(True):
        found = COMPILED[name](jnp.asarray(REWARDS))
    expected = np.reshape(GOLDEN["advantages"][name], REWARDS.shape)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-15)


@each
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, -1e6, 1e-7])
@pytest.mark.parametrize("size", [1, 3, 7])
def test_trap_2_a_group_of_one_or_of_equal_rewards_has_none(advantages, reward, size):
    """Fails on NaN, and on the last digit of a mean over a small deviation."""
    found = advantages(jnp.full((2, size), reward, jnp.float32))
    np.testing.assert_array_equal(found, np.zeros((2, size)))


@each
def test_trap_2_a_missing_reward_is_no_reward(advantages):
    """Fails if NaN reaches a neighbour, or counts in a mean or a deviation."""
    nan = jnp.nan
    given = [[1.0, nan, 0.25, 0.0, nan, nan, nan], [nan, nan, 5.0, nan, nan, nan, nan]]
    found = advantages(jnp.array(given))
    expected = advantages(jnp.array([[1.0, 0.25, 0.0], [5.0, 5.0, 5.0]]))
    np.testing.assert_array_equal(found[0, np.array([0, 2, 3])], expected[0])
    assert not np.asarray(found)[0, [1, 4, 5, 6]].any()
    assert not np.asarray(found)[1].any()


@each
def test_groups_do_not_mix(advantages):
    both = advantages(jnp.array([[1.0, 0.0, 2.0], [90.0, 10.0, 50.0]]))
    others = advantages(jnp.array([[1.0, 0.0, 2.0], [0.5, 0.25, 0.5]]))
    np.testing.assert_allclose(both[0], others[0], rtol=1e-6)
    assert not np.allclose(both[1], others[1])


@each
def test_rewards_of_16_bits_are_widened(advantages):
    rewards = jnp.array([[0.0, 1.0, 3.0], [2.0, 2.0, 5.0]], jnp.bfloat16)
    found = advantages(rewards)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(
        found, advantages(rewards.astype(jnp.float32)), rtol=1e-6
    )


def test_trap_7_each_reward_is_normalised_before_the_sum():
    """Fails if the range of a reward decides: a unit of it changes nothing."""
    first, second = jnp.array([[1.0, 0.0, 0.5]]), jnp.array([[0.0, 1.0, 1.0]])
    weights = jnp.array([1.0, 0.5])

    def both(unit):
        return DECOUPLED(jnp.stack([first, unit * second]), weights)

    np.testing.assert_allclose(both(1000.0), both(1.0), rtol=1e-3, atol=1e-3)
    summed = GROUPED(first + 1000 * second * 0.5)
    assert np.abs(summed - both(1.0)).max() > 0.3
    expected = GROUPED(first) + 0.5 * GROUPED(second)
    np.testing.assert_allclose(both(1.0), expected, rtol=1e-6)


def test_a_missing_reward_of_one_function_leaves_the_sample_out():
    """Fails if a sample is compared by a part of its rewards."""
    first, second = jnp.array([[1.0, 0.0, 0.5]]), jnp.array([[0.0, jnp.nan, 1.0]])
    rewards, weights = jnp.stack([first, second]), jnp.ones(2)
    found = DECOUPLED(rewards, weights)
    alone = DECOUPLED(rewards[..., ::2], weights)
    assert found[0, 1] == 0
    np.testing.assert_allclose(found[:, ::2], alone, rtol=1e-6)


def test_trap_10_groups_without_a_signal_are_found():
    nan = jnp.nan
    rewards = jnp.array(
        [[0.1, 0.1, 0.1], [0.0, 0.1, 0.0], [nan, 1.0, 1.0], [nan] * 3, [nan, 0.0, 1.0]]
    )
    found = jax.jit(rl.uniform_groups)(rewards)
    assert found.tolist() == [True, False, True, True, False]
    dead = ~np.asarray(GROUPED(rewards)).any(1)
    np.testing.assert_array_equal(dead, found)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_programs_are_compiled(name):
    rewards = jnp.asarray(REWARDS)
    np.testing.assert_allclose(
        COMPILED[name](rewards), ADVANTAGES[name](rewards), rtol=1e-5, atol=1e-7
    )
