"""Corrections for tokens that another policy drew: a sampler that rounds otherwise.

Three policies take part: the sampler, which drew the tokens; the old policy, which is
the trainer before the first update on the batch; and the policy. Ratios compare the
policy with the old policy. The weights here compare the old policy with the sampler,
are not differentiated, and multiply losses.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from zjax.errors import ConfigError, Problem
from zjax.rl.masks import masked, segment_mean, segment_sum
from zjax.rl.ranges import check_above_zero
from zjax.rl.ratios import bounded, token_ratios


def token_weights(
    old_logprobs: Float[Array, "B L"],
    sampler_logprobs: Float[Array, "B L"],
    mask: Bool[Array, "B L"],
) -> Float[Array, "B L"]:
    """Computes importance weights of tokens, `w = exp(old_logprob - sampler_logprob)`.

    Args:
        old_logprobs: Log-probability of each token before the first update on the
            batch, by the trainer.
        sampler_logprobs: Log-probability of each token as it was drawn.
        mask: True for the tokens to learn from.

    Returns:
        The weight of each token.

    Example:
        >>> weights = token_weights(
        ...     jnp.log(jnp.array([[0.5, 0.2]])),
        ...     jnp.log(jnp.array([[0.25, 0.2]])),
        ...     jnp.array([[True, True]]),
        ... )
        >>> weights.round(3).tolist()
        [[2.0, 1.0]]

    Reference:
        Yao et al., Your Efficient RL Framework Secretly Brings You Off-Policy RL
        Training (fengyao.notion.site/off-policy-rl).
    """
    return jax.lax.stop_gradient(token_ratios(old_logprobs, sampler_logprobs, mask))


def sequence_weights(
    old_logprobs: Float[Array, "B L"],
    sampler_logprobs: Float[Array, "B L"],
    mask: Bool[Array, "B L"],
    *,
    segment_ids: Int[Array, "B L"] | None = None,
) -> Float[Array, " B #L"]:
    """Computes importance weights of sequences, the products of weights of tokens.

    The weight is `w = exp(sum_t(old_logprob - sampler_logprob))`: without bias, with a
    variance that grows with the length.

    Args:
        old_logprobs: Log-probability of each token before the first update on the
            batch, by the trainer.
        sampler_logprobs: Log-probability of each token as it was drawn.
        mask: True for the tokens to learn from.
        segment_ids: Number of the sequence of each token, for rows of several
            sequences; None if a row is one sequence.

    Returns:
        The weight of each sequence, repeated over the tokens of packed rows.

    Example:
        >>> weights = sequence_weights(
        ...     jnp.log(jnp.array([[0.5, 0.6]])),
        ...     jnp.log(jnp.array([[0.25, 0.2]])),
        ...     jnp.array([[True, True]]),
        ... )
        >>> f"{weights[0, 0]:.3f}"
        '6.000'

    Reference:
        Liu et al., When Speed Kills Stability (yingru.notion.site).
    """
    gaps = masked(old_logprobs, mask) - masked(sampler_logprobs, mask)
    gaps = segment_sum(gaps, segment_ids)
    return jax.lax.stop_gradient(jnp.exp(bounded(gaps)))


def truncate_weights(
    weights: Float[Array, "B L"], *, bound: float = 2.0
) -> Float[Array, "B L"]:
    """Limits importance weights, `min(w, bound)`: truncated importance sampling.

    Args:
        weights: Weights of tokens or of sequences.
        bound: Largest weight, above 0.

    Returns:
        The truncated weights.

    Raises:
        ConfigError: If the bound is not above 0.

    Example:
        >>> truncate_weights(jnp.array([[0.5, 3.0]])).tolist()
        [[0.5, 2.0]]

    Reference:
        Espeholt et al., IMPALA (arXiv:1802.01561), section 4.1; Yao et al., Your
        Efficient RL Framework Secretly Brings You Off-Policy RL Training
        (fengyao.notion.site/off-policy-rl).
    """
    check_above_zero(bound=bound)
    return jnp.minimum(weights, bound)


def mask_weights(
    weights: Float[Array, "B L"], *, lowest: float = 0.0, bound: float = 3.0
) -> Float[Array, "B L"]:
    """Drops what the sampler drew too rarely or too often: masked importance sampling.

    The result is `w` where `lowest <= w <= bound`, and 0 elsewhere. By weights of
    sequences whole sequences are dropped (TRL's `sequence_mask`). An aggregation still
    counts the dropped tokens.

    Args:
        weights: Weights of tokens or of sequences.
        lowest: Smallest weight that is not dropped, at most `bound`; IcePop has 0.5.
        bound: Largest weight that is not dropped, above 0; IcePop has 5.

    Returns:
        The weights, 0 where dropped.

    Raises:
        ConfigError: If the range of weights is empty.

    Example:
        >>> mask_weights(jnp.array([[0.5, 1.5, 4.0]]), lowest=1.0).tolist()
        [[0.0, 1.5, 0.0]]

    Reference:
        Liu et al., When Speed Kills Stability (yingru.notion.site); IcePop
        (ringtech.notion.site/icepop).
    """
    check_above_zero(bound=bound)
    if lowest > bound:
        problem = f"is above bound={bound}"
        raise ConfigError(Problem("lowest", lowest, problem, "use 0.5 and 5.0"))
    return jnp.where((lowest <= weights) & (weights <= bound), weights, 0)


def on_policy_sequences(
    logprobs: Float[Array, "B L"],
    sampler_logprobs: Float[Array, "B L"],
    advantages: Float[Array, " B #L"],
    mask: Bool[Array, "B L"],
    *,
    threshold: float,
    segment_ids: Int[Array, "B L"] | None = None,
) -> Float[Array, " B #L"]:
    """Drops sequences of negative advantage that the policy has moved away from.

    The weight is 0 where `A < 0` and `mean_t(sampler_logprob - logprob) > threshold`,
    and 1 elsewhere: the off-policy sequence mask of DeepSeek-V3.2.

    Args:
        logprobs: Log-probability of each token under the policy.
        sampler_logprobs: Log-probability of each token as it was drawn.
        advantages: Advantage of each sequence.
        mask: True for the tokens to learn from.
        threshold: Largest mean gap per token of a sequence that is not dropped, in
            nats.
        segment_ids: Number of the sequence of each token, for rows of several
            sequences; None if a row is one sequence.

    Returns:
        The weight of each sequence, repeated over the tokens of packed rows.

    Example:
        >>> keeps = on_policy_sequences(
        ...     jnp.array([[-3.0], [-3.0]]),
        ...     jnp.array([[-1.0], [-1.0]]),
        ...     jnp.array([[-1.0], [1.0]]),
        ...     jnp.array([[True], [True]]),
        ...     threshold=0.5,
        ... )
        >>> keeps.tolist()
        [[0.0], [1.0]]

    Reference:
        DeepSeek-V3.2 (arXiv:2512.02556), section 3.1.
    """
    gaps = segment_mean(
        masked(sampler_logprobs, mask) - masked(logprobs, mask), mask, segment_ids
    )
    is_dropped = (advantages < 0) & (gaps > threshold)
    return jax.lax.stop_gradient(jnp.where(is_dropped, 0, jnp.ones_like(gaps)))


def check_correction(
    ratio: Literal["tokens", "sequences"], correction: Literal["tokens", "sequences"]
) -> None:
    """Refuses weights of tokens beside ratios of sequences, and the reverse.

    Args:
        ratio: Unit of the ratios in the loss; CISPO has `tokens`, GSPO `sequences`.
        correction: Unit of the importance weights.

    Raises:
        ConfigError: If the units differ.

    Example:
        >>> check_correction("sequences", "sequences")
    """
    if ratio != correction:
        problem = f"weighs another unit than the ratio={ratio!r} of the loss"
        raise ConfigError(Problem("correction", correction, problem, f"use {ratio!r}"))
