"""Advantages of tokens: rewards of texts, spread over the tokens of a rollout."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from zjax.rl.returns import discounted_returns, gae, token_rewards, whiten
from zjax.settings import rl


def token_advantages(
    objective: rl.Returns,
    rewards: np.ndarray,
    penalties: Sequence[np.ndarray],
    values: Sequence[np.ndarray] | None = None,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Computes the advantages of all tokens of a rollout, whitened over the rollout.

    Args:
        objective: Discounts; PPO also reads `values`.
        rewards: Reward of each text, float32[N]; NaN for none, which leaves a text out.
        penalties: Penalty of each token of each text, float32[n], such as a divergence.
        values: Value of each token of each text by a critic; None without a critic.

    Returns:
        Advantages and returns of the tokens of each text, float32[n].

    Example:
        >>> rewards, penalties = np.float32([1.0, 0.0]), [np.zeros(2), np.zeros(2)]
        >>> advantages, returns = token_advantages(
        ...     rl.ReinforcePp(), rewards, penalties
        ... )
        >>> [np.sign(x).tolist() for x in advantages]
        [[1.0, 1.0], [-1.0, -1.0]]
    """
    sizes = [len(x) for x in penalties]
    mask = np.arange(max(sizes)) < np.array(sizes)[:, None]
    mask &= ~np.isnan(rewards)[:, None]
    given = token_rewards(jnp.asarray(rewards), _padded(penalties), jnp.asarray(mask))
    if isinstance(objective, rl.Ppo):
        assert values is not None
        weights = {"gamma": objective.discount, "lam": objective.gae_lambda}
        found, returns = gae(given, _padded(values), jnp.asarray(mask), **weights)
    else:
        found = discounted_returns(given, jnp.asarray(mask), gamma=objective.discount)
        returns = found
    whitened = np.where(mask, np.asarray(whiten(found, jnp.asarray(mask))), np.nan)
    # A text without a reward has NaN, by which it is left out.
    return _cut(whitened, sizes), _cut(np.asarray(returns), sizes)


def _padded(values: Sequence[np.ndarray]) -> jnp.ndarray:
    """Pads vectors by zeros to a matrix, float32[N, L]."""
    padded = np.zeros((len(values), max(map(len, values))), np.float32)
    for row, x in zip(padded, values, strict=True):
        row[: len(x)] = x
    return jnp.asarray(padded)


def _cut(matrix: np.ndarray, sizes: Sequence[int]) -> list[np.ndarray]:
    """Cuts the rows of a matrix to sizes."""
    return [row[:size] for row, size in zip(matrix, sizes, strict=True)]
