"""Losses of tokens: from ratios and advantages to what an aggregation sums.

A loss composes with either kind of ratio (`zjax.rl.ratios`), with a penalty added
(`zjax.rl.divergences`) and with importance weights multiplied (`zjax.rl.corrections`).
Advantages are `[B, L]`, or `[B, 1]` for one advantage per sequence, and are not
differentiated. Losses are 0 outside the mask.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from zjax.errors import ConfigError, Problem
from zjax.rl.masks import masked
from zjax.rl.ranges import check_above_zero


def clip_loss(
    ratios: Float[Array, "B L"],
    advantages: Float[Array, "#B #L"],
    mask: Bool[Array, "B L"],
    *,
    low: float = 0.2,
    high: float = 0.2,
) -> Float[Array, "B L"]:
    """Computes the clipped loss of PPO, GRPO, DAPO and, by sequence ratios, GSPO.

    The loss is `-min(r * A, clip(r, 1 - low, 1 + high) * A)`. It has no gradient where
    the ratio has left the range in the direction of the advantage.

    Args:
        ratios: Ratio of each token, from `token_ratios` or `sequence_ratios`.
        advantages: Advantage of each token or sequence.
        mask: True for the tokens to learn from.
        low: Distance of the lower end of the range from 1, in [0, 1].
        high: Distance of the upper end from 1, at least 0. DAPO decouples the ends:
            `low=0.2, high=0.28`. GSPO has `low=3e-4, high=4e-4`.

    Returns:
        The loss of each token.

    Raises:
        ConfigError: If an end is out of range.

    Example:
        >>> ratios, mask = jnp.array([[0.5, 1.5]]), jnp.array([[True, True]])
        >>> clip_loss(ratios, jnp.array([[1.0]]), mask).tolist()
        [[-0.5, -1.2000000476837158]]

    Reference:
        Schulman et al., PPO (arXiv:1707.06347), equation 7; Yu et al., DAPO
        (arXiv:2503.14476), equation 10; Zheng et al., GSPO (arXiv:2507.18071),
        equation 5.
    """
    _check_range(low, high)
    advantages = _weights(advantages, mask)
    clipped = jnp.clip(ratios, 1 - low, 1 + high)
    return -jnp.minimum(ratios * advantages, clipped * advantages)


def dual_clip_loss(
    ratios: Float[Array, "B L"],
    advantages: Float[Array, "#B #L"],
    mask: Bool[Array, "B L"],
    *,
    low: float = 0.2,
    high: float = 0.2,
    bound: float = 3.0,
) -> Float[Array, "B L"]:
    """Computes the clipped loss with a bound on the ratio for negative advantages, too.

    The loss is `clip_loss` for `A >= 0`, and `min(clip_loss, -bound * A)` for `A < 0`,
    where `clip_loss` grows with the ratio without end. The two-sided clip of
    INTELLECT-2, `-min(min(r, bound) * A, clip(r, 1 - low, 1 + high) * A)`, is equal for
    a bound of at least `1 + high`.

    Args:
        ratios: Ratio of each token, from `token_ratios` or `sequence_ratios`.
        advantages: Advantage of each token or sequence.
        mask: True for the tokens to learn from.
        low: Distance of the lower end of the range from 1, in [0, 1].
        high: Distance of the upper end from 1, at least 0.
        bound: Largest ratio that counts for a negative advantage, above 1: 3 in
            dual-clip PPO, 4 in INTELLECT-2.

    Returns:
        The loss of each token.

    Raises:
        ConfigError: If an end or the bound is out of range.

    Example:
        >>> ratios, mask = jnp.array([[9.0]]), jnp.array([[True]])
        >>> advantages = jnp.array([[-1.0]])
        >>> float(clip_loss(ratios, advantages, mask)[0, 0])
        9.0
        >>> float(dual_clip_loss(ratios, advantages, mask)[0, 0])
        3.0

    Reference:
        Ye et al., dual-clip PPO (arXiv:1912.09729); Prime Intellect, INTELLECT-2
        (arXiv:2505.07291).
    """
    if not bound > 1:
        raise ConfigError(Problem("bound", bound, "is not above 1", "use 3.0"))
    losses = clip_loss(ratios, advantages, mask, low=low, high=high)
    advantages = _weights(advantages, mask)
    return jnp.where(advantages < 0, jnp.minimum(losses, -bound * advantages), losses)


def cispo_loss(
    logprobs: Float[Array, "B L"],
    ratios: Float[Array, "B L"],
    advantages: Float[Array, "#B #L"],
    mask: Bool[Array, "B L"],
    *,
    bound: float = 5.0,
) -> Float[Array, "B L"]:
    """Computes the loss of CISPO, which bounds the weight of a token, never the update.

    The loss is `-stop(min(r, bound)) * A * logprob`: every token has a gradient.

    Args:
        logprobs: Log-probability of each token under the policy.
        ratios: Ratio of each token, from `token_ratios`.
        advantages: Advantage of each token or sequence.
        mask: True for the tokens to learn from.
        bound: Largest weight of a token, above 0.

    Returns:
        The loss of each token.

    Raises:
        ConfigError: If the bound is not above 0.

    Example:
        >>> logprobs, mask = jnp.array([[-1.0]]), jnp.array([[True]])
        >>> cispo_loss(logprobs, jnp.array([[8.0]]), jnp.array([[0.5]]), mask).tolist()
        [[2.5]]

    Reference:
        MiniMax-M1 (arXiv:2506.13585), equations 4 and 5.
    """
    check_above_zero(bound=bound)
    weights = jax.lax.stop_gradient(jnp.minimum(ratios, bound))
    return weights * reinforce_loss(logprobs, advantages, mask)


def sapo_loss(
    ratios: Float[Array, "B L"],
    advantages: Float[Array, "#B #L"],
    mask: Bool[Array, "B L"],
    *,
    positive: float = 1.0,
    negative: float = 1.05,
) -> Float[Array, "B L"]:
    """Computes the loss of SAPO, whose gate fades where `clip_loss` cuts.

    The loss is `-(4 / t) * sigmoid(t * (r - 1)) * A`, where the temperature `t` is
    `positive` for `A > 0` and `negative` for `A <= 0`. At a ratio of 1 its gradient is
    the gradient of `-r * A`.

    Args:
        ratios: Ratio of each token, from `token_ratios`.
        advantages: Advantage of each token or sequence.
        mask: True for the tokens to learn from.
        positive: Temperature for positive advantages, above 0.
        negative: Temperature for negative advantages, above 0; a larger temperature
            fades sooner.

    Returns:
        The loss of each token.

    Raises:
        ConfigError: If a temperature is not above 0.

    Example:
        >>> ratios, mask = jnp.array([[1.0]]), jnp.array([[True]])
        >>> sapo_loss(ratios, jnp.array([[1.0]]), mask).tolist()
        [[-2.0]]

    Reference:
        Soft Adaptive Policy Optimization (arXiv:2511.20347).
    """
    check_above_zero(positive=positive, negative=negative)
    advantages = _weights(advantages, mask)
    temperature = jnp.where(advantages > 0, positive, negative)
    gates = jax.nn.sigmoid(temperature * (ratios - 1))
    return -4 / temperature * gates * advantages


def reinforce_loss(
    logprobs: Float[Array, "B L"],
    advantages: Float[Array, "#B #L"],
    mask: Bool[Array, "B L"],
) -> Float[Array, "B L"]:
    """Computes the loss of REINFORCE, `-A * logprob`, for tokens of the policy itself.

    Args:
        logprobs: Log-probability of each token under the policy.
        advantages: Advantage of each token or sequence.
        mask: True for the tokens to learn from.

    Returns:
        The loss of each token.

    Example:
        >>> logprobs, mask = jnp.array([[-1.0, -2.0]]), jnp.array([[True, True]])
        >>> reinforce_loss(logprobs, jnp.array([[0.5]]), mask).tolist()
        [[0.5, 1.0]]

    Reference:
        Ahmadian et al., Back to Basics (arXiv:2402.14740), section 2.2.
    """
    return -_weights(advantages, mask) * masked(logprobs, mask)


def _weights(advantages, mask):
    """Returns advantages of tokens, 0 outside the mask and not differentiated."""
    return jax.lax.stop_gradient(masked(advantages, mask))


def _check_range(low, high):
    """Raises ConfigError unless `1 - low` to `1 + high` is a range of ratios."""
    problems = []
    if not 0 <= low <= 1:
        problems.append(Problem("low", low, "is not in [0, 1]", "use 0.2"))
    if not high >= 0:
        problems.append(Problem("high", high, "is below 0", "use 0.2, or 0.28"))
    if problems:
        raise ConfigError(*problems)
