"""Advantages of samples over further samples of one prompt.

P prompts, G samples of each prompt. A reward of NaN is missing: the advantage is 0, and
no statistic counts the sample. Reshape advantages to `[P * G, 1]` for the losses.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from zjax.rl.masks import masked, segment_mean

Estimate = Callable[[Float[Array, "P G"]], Float[Array, "P G"]]
EstimateOfSeveral = Callable[
    [Float[Array, "R P G"], Float[Array, " R"]], Float[Array, "P G"]
]


def group_advantages(
    rewards: Float[Array, "P G"], *, by_std: bool = True, epsilon: float = 1e-4
) -> Float[Array, "P G"]:
    """Computes advantages over the mean of a group, as GRPO and Dr. GRPO do.

    The advantage is `(R - mean(R)) / (std(R) + epsilon)`, with the standard deviation
    of a sample (n - 1), or `R - mean(R)`.

    Args:
        rewards: Reward of each sample; NaN for a missing reward.
        by_std: Whether to divide by the standard deviation. Dr. GRPO does not: groups
            of nearly equal rewards would weigh most.
        epsilon: Number added to the standard deviation: 1e-4 in TRL, 1e-6 in verl.

    Returns:
        The advantages; 0 for a group of one reward or of equal rewards.

    Example:
        >>> rewards = jnp.array([[1.0, 0.0, jnp.nan, 0.5], [1.0, 1.0, 1.0, 1.0]])
        >>> group_advantages(rewards, by_std=False).tolist()
        [[0.5, -0.5, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]

    Reference:
        Shao et al., DeepSeekMath (arXiv:2402.03300), section 4.1.2; Liu et al., Dr.
        GRPO (arXiv:2503.20783), section 3.2.
    """
    valid = ~jnp.isnan(rewards)
    centered = _centered(rewards, valid)
    if not by_std:
        return centered
    degrees = jnp.maximum(valid.sum(1, keepdims=True) - 1, 1)
    variance = jnp.square(centered).sum(1, keepdims=True) / degrees
    return centered / (jnp.sqrt(variance) + epsilon)


def rloo_advantages(rewards: Float[Array, "P G"]) -> Float[Array, "P G"]:
    """Computes advantages over the mean of all further samples of the prompt.

    The advantage is `R - (sum(R) - R) / (n - 1) = n / (n - 1) * (R - mean(R))`.

    Args:
        rewards: Reward of each sample; NaN for a missing reward.

    Returns:
        The advantages; 0 for a group of one reward or of equal rewards.

    Example:
        >>> rloo_advantages(jnp.array([[1.0, 0.0, 0.5]])).tolist()
        [[0.75, -0.75, 0.0]]

    Reference:
        Ahmadian et al., Back to Basics (arXiv:2402.14740), section 2.3.
    """
    valid = ~jnp.isnan(rewards)
    count = valid.sum(1, keepdims=True)
    return _centered(rewards, valid) * count / jnp.maximum(count - 1, 1)


def decoupled_advantages(
    rewards: Float[Array, "R P G"], weights: Float[Array, " R"]
) -> Float[Array, "P G"]:
    """Computes advantages of several rewards: each is normalised before the sum.

    The advantage is `sum_r(weight_r * group_advantages(reward_r))`. A sum of rewards
    would let the reward of the largest range decide alone.

    Args:
        rewards: Reward of each sample by each of R reward functions; NaN for a missing
            reward, which leaves the sample out of all rewards.
        weights: Weight of each reward function.

    Returns:
        The advantages.

    Example:
        >>> rewards = jnp.array([[[0.0, 1.0]], [[512.0, 0.0]]])
        >>> found = decoupled_advantages(rewards, jnp.array([2.0, 1.0]))
        >>> (found > 0).tolist()
        [[False, True]]

    Reference:
        Liu et al., GDPO (arXiv:2601.05242).
    """
    rewards = jnp.where(jnp.isnan(rewards).any(0), jnp.nan, rewards)
    return jnp.einsum("rpg,r->pg", jax.vmap(group_advantages)(rewards), weights)


def total_rewards(
    rewards: Float[Array, "R P G"], weights: Float[Array, " R"]
) -> Float[Array, "P G"]:
    """Sums the rewards of several reward functions by weight.

    Args:
        rewards: Reward of each sample by each of R reward functions; NaN for a missing
            reward.
        weights: Weight of each reward function.

    Returns:
        The sums; NaN where a reward of a sample is missing: a part of a sum does not
        compare with the sums of other samples.

    Example:
        >>> rewards = jnp.array([[[1.0, 1.0, jnp.nan]], [[0.5, jnp.nan, jnp.nan]]])
        >>> total_rewards(rewards, jnp.array([2.0, 1.0])).tolist()
        [[2.5, nan, nan]]
    """
    # NaN times a weight is NaN, of whatever other rewards.
    return jnp.einsum("rpg,r->pg", rewards, weights)


def summed(estimate: Estimate) -> EstimateOfSeveral:
    """Makes a function of several rewards from a function of one: sums come first.

    Args:
        estimate: Function from rewards [P, G] to advantages [P, G].

    Returns:
        Function from rewards [R, P, G] and weights [R] to advantages [P, G], as
        `decoupled_advantages` is.

    Example:
        >>> rewards = jnp.array([[[0.0, 1.0]], [[512.0, 0.0]]])
        >>> found = summed(rloo_advantages)(rewards, jnp.array([2.0, 1.0]))
        >>> (found > 0).tolist()
        [[True, False]]
    """
    return lambda rewards, weights: estimate(total_rewards(rewards, weights))


def uniform_groups(rewards: Float[Array, "P G"]) -> Bool[Array, " P"]:
    """Finds groups without a signal: all rewards that are not missing are equal.

    The share of such groups tells a task that is dead or solved; DAPO drops the groups
    and samples more prompts.

    Args:
        rewards: Reward of each sample; NaN for a missing reward.

    Returns:
        True for groups whose advantages are 0.

    Example:
        >>> uniform_groups(jnp.array([[1.0, 0.0], [1.0, 1.0], [jnp.nan, 1.0]])).tolist()
        [False, True, True]

    Reference:
        Yu et al., DAPO (arXiv:2503.14476), equation 11.
    """
    valid = ~jnp.isnan(rewards)
    largest = jnp.where(valid, rewards, -jnp.inf).max(1)
    return largest <= jnp.where(valid, rewards, jnp.inf).min(1)


def _centered(rewards, valid):
    """Subtracts the mean of each group from valid rewards."""
    centered = masked(rewards, valid) - segment_mean(rewards, valid)
    # Of equal rewards a mean may differ in the last digit, and a small standard
    # deviation would enlarge the difference.
    has_signal = valid & ~uniform_groups(rewards)[:, None]
    return jnp.where(has_signal, centered, 0)
