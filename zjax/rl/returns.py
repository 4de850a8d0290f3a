"""Advantages of tokens: returns of rewards to come, with or without a critic.

Masked positions, such as the output of a tool, take no time: the token after them
follows the token before.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from zjax.errors import ConfigError, Problem
from zjax.rl.masks import masked


def token_rewards(
    rewards: Float[Array, " B"],
    penalties: Float[Array, "B L"],
    mask: Bool[Array, "B L"],
) -> Float[Array, "B L"]:
    """Gives the reward of a sequence to its last token, less the penalty of each token.

    The reward of token t is `-penalty_t`, and `R - penalty_t` for the last token of the
    mask. Pass `beta * kl_k1(...)` as the penalty for a KL divergence in the reward.

    Args:
        rewards: Reward of each sequence; NaN for a missing reward, which leaves the
            whole sequence without reward and penalty.
        penalties: Penalty of each token, not differentiated.
        mask: True for the tokens to learn from.

    Returns:
        The reward of each token; 0 outside the mask.

    Example:
        >>> mask = jnp.array([[True, True, False]])
        >>> penalties = jnp.array([[0.25, 0.25, jnp.nan]])
        >>> token_rewards(jnp.array([1.0]), penalties, mask).tolist()
        [[-0.25, 0.75, 0.0]]

    Reference:
        Ouyang et al., InstructGPT (arXiv:2203.02155), equation 2.
    """
    mask = mask & ~jnp.isnan(rewards)[:, None]
    num_left = jnp.flip(jnp.cumsum(jnp.flip(mask, 1), 1), 1)
    last = mask & (num_left == 1)
    penalties = jax.lax.stop_gradient(masked(penalties, mask))
    return masked(rewards[:, None], last) - penalties


def gae(
    rewards: Float[Array, "B L"],
    values: Float[Array, "B L"],
    mask: Bool[Array, "B L"],
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
) -> tuple[Float[Array, "B L"], Float[Array, "B L"]]:
    """Estimates advantages of tokens from the values of a critic.

    With `delta_t = r_t + gamma * V_(t+1) - V_t`, the advantage is
    `A_t = delta_t + gamma * lam * A_(t+1)`, and the return is `A_t + V_t`. Whiten
    the advantages over all tokens of a step.

    Args:
        rewards: Reward of each token, from `token_rewards`.
        values: Value of each token by the critic; neither result is differentiated.
        mask: True for the tokens to learn from.
        gamma: Weight of a reward one token later, in [0, 1].
        lam: Weight of an error of the critic one token later, in [0, 1].

    Returns:
        The advantages and the returns; 0 outside the mask.

    Raises:
        ConfigError: If a weight is not in [0, 1].

    Example:
        >>> mask = jnp.array([[True, True]])
        >>> rewards, values = jnp.array([[0.0, 1.0]]), jnp.array([[0.25, 0.5]])
        >>> [x.tolist() for x in gae(rewards, values, mask, lam=0.5)]
        [[[0.5, 0.5]], [[0.75, 1.0]]]

    Reference:
        Schulman et al., GAE (arXiv:1506.02438), equation 16.
    """
    problems = [
        Problem(name, value, "is not in [0, 1]", "use 1.0")
        for name, value in {"gamma": gamma, "lam": lam}.items()
        if not 0 <= value <= 1
    ]
    if problems:
        raise ConfigError(*problems)
    rewards, values = (
        jax.lax.stop_gradient(masked(x, mask)) for x in (rewards, values)
    )

    def step_back(later, token):
        next_advantage, next_value = later
        reward, value, counts = token
        error = reward + gamma * next_value - value
        advantage = error + gamma * lam * next_advantage
        earlier = (advantage, value)
        carry = jax.tree.map(lambda x, y: jnp.where(counts, x, y), earlier, later)
        return carry, advantage

    zeros = jnp.zeros_like(values[:, 0])
    columns = rewards.T, values.T, mask.T
    _, advantages = jax.lax.scan(step_back, (zeros, zeros), columns, reverse=True)
    advantages = masked(advantages.T, mask)
    return advantages, advantages + values


def discounted_returns(
    rewards: Float[Array, "B L"], mask: Bool[Array, "B L"], *, gamma: float = 1.0
) -> Float[Array, "B L"]:
    """Sums the rewards of a token and of all later tokens, without a critic.

    The return is `G_t = r_t + gamma * G_(t+1)`. REINFORCE++ has whitened returns as
    advantages: `whiten(discounted_returns(token_rewards(...), mask), mask)`.

    Args:
        rewards: Reward of each token, from `token_rewards`.
        mask: True for the tokens to learn from.
        gamma: Weight of a reward one token later, in [0, 1].

    Returns:
        The return of each token; 0 outside the mask.

    Raises:
        ConfigError: If `gamma` is not in [0, 1].

    Example:
        >>> mask = jnp.array([[True, True, False]])
        >>> rewards = jnp.array([[0.0, 1.0, jnp.nan]])
        >>> discounted_returns(rewards, mask, gamma=0.5).tolist()
        [[0.5, 1.0, 0.0]]

    Reference:
        Hu et al., REINFORCE++ (arXiv:2501.03262).
    """
    no_critic = jnp.zeros_like(rewards)
    return gae(rewards, no_critic, mask, gamma=gamma, lam=1.0)[0]


def whiten(
    x: Float[Array, "B L"], mask: Bool[Array, "B L"], *, epsilon: float = 1e-8
) -> Float[Array, "B L"]:
    """Shifts and scales tokens to mean 0 and variance 1.

    The result is `(x - mean(x)) / sqrt(var(x) + epsilon)` over the tokens of the mask,
    with the variance of a sample (n - 1). Pass all tokens of a step: statistics of a
    microbatch would depend on the split.

    Args:
        x: Advantage of each token.
        mask: True for the tokens to learn from.
        epsilon: Number added to the variance.

    Returns:
        The whitened advantages; 0 outside the mask, and for a single token.

    Example:
        >>> x = jnp.array([[1.0, 2.0, 3.0]])
        >>> whiten(x, jnp.ones_like(x, bool)).tolist()
        [[-1.0, 0.0, 1.0]]

    Reference:
        Hu et al., REINFORCE++ (arXiv:2501.03262).
    """
    x, count = masked(x, mask), mask.sum()
    centered = masked(x - x.sum() / jnp.maximum(count, 1), mask)
    variance = jnp.square(centered).sum() / jnp.maximum(count - 1, 1)
    return centered / jnp.sqrt(variance + epsilon)
