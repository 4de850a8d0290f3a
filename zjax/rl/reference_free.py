"""Losses on pairs of completions, of which one was preferred, without another model."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from zjax.rl.preferences import Pairs, of_real
from zjax.rl.ranges import check_above_zero, check_not_negative


def simpo_loss(
    policy: Pairs, *, beta: float = 2.0, gamma: float = 1.0
) -> Float[Array, " P"]:
    """Computes `-log sigmoid(beta (mean c - mean j) - gamma)`, without a reference.

    Means are over the tokens of a completion, as sampling ranks completions.

    Args:
        policy: Log-probabilities of the trained model.
        beta: Factor of the difference of means, above 0.
        gamma: Margin that the chosen completion is to win by, 0 or more.

    Returns:
        Loss of each pair, 0 or more.

    Raises:
        ConfigError: `beta` or `gamma` is out of range.

    Example:
        >>> from zjax.rl import SequenceLogprobs
        >>> n = jnp.array([4])
        >>> even = Pairs(*[SequenceLogprobs(jnp.array([-2.0]), n)] * 2)
        >>> f"{simpo_loss(even, gamma=0.0)[0]:.4f}"
        '0.6931'

    Reference:
        Meng et al., SimPO (arXiv:2405.14734, equation 6).
    """
    check_above_zero(beta=beta)
    check_not_negative(gamma=gamma)
    gap = policy.chosen.means - policy.rejected.means
    return of_real(-jax.nn.log_sigmoid(beta * gap - gamma), policy)


def odds_ratio_loss(policy: Pairs) -> Float[Array, " P"]:
    """Computes `-log sigmoid(log odds(c) - log odds(j))` of means over tokens.

    The odds of a mean m are `exp(m) / (1 - exp(m))`. A probability above 1 less the
    smallest step of the dtype is read as that number, so that odds are finite.

    Args:
        policy: Log-probabilities of the trained model, 0 or less.

    Returns:
        Loss of each pair, 0 or more: the second term of `orpo_loss`.

    Example:
        >>> from zjax.rl import SequenceLogprobs
        >>> n = jnp.array([2])
        >>> half, fifth = 2 * jnp.log(jnp.array([[0.5], [0.2]]))
        >>> pairs = Pairs(SequenceLogprobs(half, n), SequenceLogprobs(fifth, n))
        >>> f"{jnp.exp(-odds_ratio_loss(pairs))[0]:.4f}"  # 1 against 1 / 4
        '0.8000'

    Reference:
        Hong et al., ORPO (arXiv:2403.07691, equation 7).
    """
    gap = _log_odds(policy.chosen.means) - _log_odds(policy.rejected.means)
    return of_real(-jax.nn.log_sigmoid(gap), policy)


def orpo_loss(policy: Pairs, *, weight: float = 0.1) -> Float[Array, " P"]:
    """Computes `-mean c + weight * odds_ratio_loss`: supervised loss and preference.

    Args:
        policy: Log-probabilities of the trained model, 0 or less.
        weight: Weight of the odds ratio, 0 or more.

    Returns:
        Loss of each pair, 0 or more.

    Raises:
        ConfigError: `weight` is below 0.

    Example:
        >>> from zjax.rl import SequenceLogprobs
        >>> n = jnp.array([2])
        >>> even = Pairs(*[SequenceLogprobs(jnp.array([-2.0]), n)] * 2)
        >>> f"{orpo_loss(even)[0]:.4f}"
        '1.0693'

    Reference:
        Hong et al., ORPO (arXiv:2403.07691, equation 6).
    """
    check_not_negative(weight=weight)
    return of_real(-policy.chosen.means, policy) + weight * odds_ratio_loss(policy)


def _log_odds(means):
    """Returns `log(p / (1 - p))` of log-probabilities below 0."""
    means = jnp.minimum(means, -jnp.finfo(means.dtype).eps)
    # Two forms of log(1 - exp(m)), since each loses all digits where the other is good.
    near, far = jnp.maximum(means, -1.0), jnp.minimum(means, -0.5)
    rest = jnp.where(means > -0.7, jnp.log(-jnp.expm1(near)), jnp.log1p(-jnp.exp(far)))
    return means - rest
