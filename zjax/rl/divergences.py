"""Estimates of the KL divergence from a reference policy, for each token.

With `d = ref_logprob - logprob` and tokens of the policy, the mean of k1 and of k3 is
the divergence `KL(policy || reference)`; k2 is close for near policies. As losses the
gradients differ: k1 has a mean gradient of 0, k2 has the gradient of the divergence,
and k3 has the gradient of `KL(reference || policy)`. So k1 belongs into the reward
(`token_rewards`), and k2 or `kl_k3_k2` into the loss. For tokens of an older policy,
multiply by `token_ratios`.

Reference:
    Schulman, Approximating KL divergence (joschu.net/blog/kl-approx.html); Tang and
    Munos (arXiv:2506.09477).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from zjax.rl.masks import masked
from zjax.rl.ratios import bounded


def kl_k1(
    logprobs: Float[Array, "B L"],
    ref_logprobs: Float[Array, "B L"],
    mask: Bool[Array, "B L"],
) -> Float[Array, "B L"]:
    """Estimates the divergence by `k1 = -d = logprob - ref_logprob`, of any sign.

    The mean is right and the variance large. As a loss it does nothing: the mean of the
    gradient is 0. As a penalty in the reward it is the estimate to use.

    Args:
        logprobs: Log-probability of each token under the policy.
        ref_logprobs: Log-probability of each token under the reference.
        mask: True for the tokens that count.

    Returns:
        The estimate of each token; 0 outside the mask.

    Example:
        >>> mask = jnp.array([[True]])
        >>> kl_k1(jnp.array([[-1.0]]), jnp.array([[-0.5]]), mask).tolist()
        [[-0.5]]

    Reference:
        Ouyang et al., InstructGPT (arXiv:2203.02155), equation 2.
    """
    return -_log_ratios(logprobs, ref_logprobs, mask)


def kl_k2(
    logprobs: Float[Array, "B L"],
    ref_logprobs: Float[Array, "B L"],
    mask: Bool[Array, "B L"],
) -> Float[Array, "B L"]:
    """Estimates the divergence by `k2 = d**2 / 2`, with the gradient of the divergence.

    Args:
        logprobs: Log-probability of each token under the policy.
        ref_logprobs: Log-probability of each token under the reference.
        mask: True for the tokens that count.

    Returns:
        The estimate of each token; 0 outside the mask.

    Example:
        >>> mask = jnp.array([[True]])
        >>> kl_k2(jnp.array([[-1.0]]), jnp.array([[-0.5]]), mask).tolist()
        [[0.125]]

    Reference:
        Tang and Munos (arXiv:2506.09477).
    """
    return jnp.square(_log_ratios(logprobs, ref_logprobs, mask)) / 2


def kl_k3(
    logprobs: Float[Array, "B L"],
    ref_logprobs: Float[Array, "B L"],
    mask: Bool[Array, "B L"],
) -> Float[Array, "B L"]:
    """Estimates the divergence by `k3 = exp(d) - d - 1`, never below 0.

    The mean is right and the variance small. As a loss it has the gradient of
    `KL(reference || policy)`. In the exponential `d` is bounded by 20.

    Args:
        logprobs: Log-probability of each token under the policy.
        ref_logprobs: Log-probability of each token under the reference.
        mask: True for the tokens that count.

    Returns:
        The estimate of each token; 0 outside the mask.

    Example:
        >>> mask = jnp.array([[True]])
        >>> found = kl_k3(jnp.array([[-1.0]]), jnp.array([[-0.5]]), mask)
        >>> f"{found[0, 0]:.4f}"
        '0.1487'

    Reference:
        Shao et al., DeepSeekMath (arXiv:2402.03300), equation 4.
    """
    log_ratios = _log_ratios(logprobs, ref_logprobs, mask)
    # `exp(d) - 1` would cancel all digits of near policies.
    return jnp.expm1(bounded(log_ratios)) - log_ratios


def kl_k3_k2(
    logprobs: Float[Array, "B L"],
    ref_logprobs: Float[Array, "B L"],
    mask: Bool[Array, "B L"],
) -> Float[Array, "B L"]:
    """Estimates the divergence by the value of k3 with the gradient of k2.

    The formula is `k2 + stop(k3 - k2)`: an estimate of small variance to log, and the
    gradient of the divergence.

    Args:
        logprobs: Log-probability of each token under the policy.
        ref_logprobs: Log-probability of each token under the reference.
        mask: True for the tokens that count.

    Returns:
        The estimate of each token; 0 outside the mask.

    Example:
        >>> mask = jnp.array([[True]])
        >>> found = kl_k3_k2(jnp.array([[-1.0]]), jnp.array([[-0.5]]), mask)
        >>> f"{found[0, 0]:.4f}"
        '0.1487'

    Reference:
        Tang and Munos (arXiv:2506.09477).
    """
    gradient = kl_k2(logprobs, ref_logprobs, mask)
    value = kl_k3(logprobs, ref_logprobs, mask)
    return gradient + jax.lax.stop_gradient(value - gradient)


def _log_ratios(logprobs, ref_logprobs, mask):
    """Returns `ref_logprob - logprob` of each token; the reference is constant."""
    ref_logprobs = jax.lax.stop_gradient(ref_logprobs)
    return masked(ref_logprobs, mask) - masked(logprobs, mask)
