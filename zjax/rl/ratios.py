"""Ratios of the policy to the policy at the start of the update, per token or sequence.

The old policy is not differentiated. With one update on a batch both policies are
equal: pass `logprobs` as `old_logprobs`, too, in place of a second forward pass; ratios
are then exactly 1, and have gradients. Logarithms of ratios are bounded by 20, beyond
which a ratio has no gradient: an exponential that overflows would turn the gradient of
a clipped token into NaN.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from zjax.rl.masks import masked, segment_mean

MAX_LOG_RATIO = 20.0
"""Bound of the logarithm of a ratio or of an importance weight."""


def token_ratios(
    logprobs: Float[Array, "B L"],
    old_logprobs: Float[Array, "B L"],
    mask: Bool[Array, "B L"],
) -> Float[Array, "B L"]:
    """Computes the ratio of each token, `r = exp(logprob - old_logprob)`.

    Args:
        logprobs: Log-probability of each token under the policy, with the temperature
            and the filters of the sampler.
        old_logprobs: Log-probability of each token before the first update on the
            batch, by the trainer; never the log-probability by the sampler.
        mask: True for the tokens to learn from.

    Returns:
        The ratios; 1 outside the mask.

    Example:
        >>> ratios = token_ratios(
        ...     jnp.log(jnp.array([[0.5, 0.2]])),
        ...     jnp.log(jnp.array([[0.25, 0.2]])),
        ...     jnp.array([[True, True]]),
        ... )
        >>> ratios.round(3).tolist()
        [[2.0, 1.0]]

    Reference:
        Schulman et al., PPO (arXiv:1707.06347), section 3.
    """
    old_logprobs = jax.lax.stop_gradient(masked(old_logprobs, mask))
    return jnp.exp(bounded(masked(logprobs, mask) - old_logprobs))


def sequence_ratios(
    logprobs: Float[Array, "B L"],
    old_logprobs: Float[Array, "B L"],
    mask: Bool[Array, "B L"],
    *,
    segment_ids: Int[Array, "B L"] | None = None,
) -> Float[Array, "B L"]:
    """Computes the ratio of each sequence, the geometric mean of the ratios of tokens.

    The value is `s = exp(mean_t(logprob - old_logprob))` at every token. The gradient
    goes by tokens: `stop(s) * exp(logprob - stop(logprob))`, so that a mean over tokens
    has the gradient of the mean over tokens of `s * logprob`.

    Args:
        logprobs: Log-probability of each token under the policy.
        old_logprobs: Log-probability of each token before the first update on the
            batch, by the trainer.
        mask: True for the tokens to learn from.
        segment_ids: Number of the sequence of each token, for rows of several
            sequences; None if a row is one sequence.

    Returns:
        The ratio of the sequence, repeated over its tokens.

    Example:
        >>> ratios = sequence_ratios(
        ...     jnp.log(jnp.array([[0.8, 0.2]])),
        ...     jnp.log(jnp.array([[0.2, 0.2]])),
        ...     jnp.array([[True, True]]),
        ... )
        >>> ratios.round(3).tolist()
        [[2.0, 2.0]]

    Reference:
        Zheng et al., GSPO (arXiv:2507.18071), equation 7; with the gradient of
        GSPO-token.
    """
    logprobs = masked(logprobs, mask)
    mean = segment_mean(logprobs - masked(old_logprobs, mask), mask, segment_ids)
    mean = jax.lax.stop_gradient(bounded(mean))
    return jnp.exp(mean + logprobs - jax.lax.stop_gradient(logprobs))


def bounded(log_ratios: Float[Array, "B L"]) -> Float[Array, "B L"]:
    """Clips logarithms of ratios to a range whose exponentials are finite.

    Example:
        >>> bounded(jnp.array([[-1e3, 0.5, 1e3]])).tolist()
        [[-20.0, 0.5, 20.0]]
    """
    return jnp.clip(log_ratios, -MAX_LOG_RATIO, MAX_LOG_RATIO)
