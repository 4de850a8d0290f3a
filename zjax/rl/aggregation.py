"""Aggregations: from losses of tokens to a sum and the number of units in the sum.

A microbatch returns a sum and a weight, as the head of a `zjax.Stack` does. The loss of
a step is the sum of all sums over the sum of all weights, whatever microbatches and
devices hold. A row is one sequence; a row without tokens adds nothing to either sum.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from zjax.errors import ConfigError, Problem
from zjax.rl.masks import masked, segment_mean


class LossSum(NamedTuple):
    """A sum of losses, and the number of units (tokens, sequences) in the sum."""

    loss_sum: Float[Array, ""]
    weight: Float[Array, ""]
    """Number of units; not differentiated."""

    @property
    def mean(self) -> Float[Array, ""]:
        """The sum divided by the weight; 0 for a weight of 0."""
        return self.loss_sum / jnp.where(self.weight == 0, 1, self.weight)


def token_mean(losses: Float[Array, "B L"], mask: Bool[Array, "B L"]) -> LossSum:
    """Sums losses over tokens: all tokens of the batch have equal weight.

    The mean is `sum(mask * losses) / sum(mask)`, over all sequences of a step.

    Args:
        losses: Loss of each token.
        mask: True for the tokens to learn from.

    Returns:
        The sum, and the number of tokens.

    Example:
        >>> losses = jnp.array([[1.0, 2.0, 3.0], [8.0, 0.0, 0.0]])
        >>> mask = jnp.array([[True, True, True], [True, False, False]])
        >>> float(token_mean(losses, mask).mean)
        3.5

    Reference:
        Yu et al., DAPO (arXiv:2503.14476), equation 12.
    """
    losses = masked(losses, mask)
    return LossSum(losses.sum(), mask.sum(dtype=losses.dtype))


def sequence_mean(losses: Float[Array, "B L"], mask: Bool[Array, "B L"]) -> LossSum:
    """Sums means of sequences: all sequences of the batch have equal weight.

    The mean is `mean_i(sum_t(mask * losses) / sum_t(mask))`, over all sequences i that
    have tokens: a token of a long sequence weighs less than a token of a short one.

    Args:
        losses: Loss of each token.
        mask: True for the tokens to learn from.

    Returns:
        The sum, and the number of sequences with tokens.

    Example:
        >>> losses = jnp.array([[1.0, 2.0, 3.0], [8.0, 0.0, 0.0]])
        >>> mask = jnp.array([[True, True, True], [True, False, False]])
        >>> float(sequence_mean(losses, mask).mean)
        5.0

    Reference:
        Shao et al., DeepSeekMath (arXiv:2402.03300), equation 3.
    """
    means = segment_mean(losses, mask)
    return LossSum(means.sum(), mask.any(1).sum(dtype=means.dtype))


def constant_mean(
    losses: Float[Array, "B L"], mask: Bool[Array, "B L"], *, length: int
) -> LossSum:
    """Sums losses over tokens; the weight depends on no length of a sequence.

    The mean is `sum(mask * losses) / (num_sequences * length)`, over all sequences that
    have tokens. A length of 1 gives the mean over sequences of sums of tokens.

    Args:
        losses: Loss of each token.
        mask: True for the tokens to learn from.
        length: Number of tokens that every sequence counts for, at least 1: the
            limit of generated tokens.

    Returns:
        The sum, and the number of sequences with tokens times `length`.

    Raises:
        ConfigError: If `length` is below 1.

    Example:
        >>> losses = jnp.array([[1.0, 2.0, 3.0], [8.0, 0.0, 0.0]])
        >>> mask = jnp.array([[True, True, True], [True, False, False]])
        >>> constant_mean(losses, mask, length=7)
        LossSum(loss_sum=Array(14., dtype=float32), weight=Array(14., dtype=float32))

    Reference:
        Liu et al., Dr. GRPO (arXiv:2503.20783), section 3.2.
    """
    if length < 1:
        remedy = "use the limit of generated tokens"
        raise ConfigError(Problem("length", length, "is below 1", remedy))
    losses = masked(losses, mask)
    return LossSum(losses.sum(), length * mask.any(1).sum(dtype=losses.dtype))


def example_mean(losses: Float[Array, " P"], mask: Bool[Array, " P"]) -> LossSum:
    """Sums losses of examples: pairs, ranked lists, or completions with a label.

    Args:
        losses: Loss of each example.
        mask: True for the examples to learn from; others are padding.

    Returns:
        The sum, and the number of examples.

    Example:
        >>> mask = jnp.array([True, True, False])
        >>> example_mean(jnp.array([1.0, 2.0, jnp.nan]), mask)
        LossSum(loss_sum=Array(3., dtype=float32), weight=Array(2., dtype=float32))
    """
    losses = masked(losses, mask)
    return LossSum(losses.sum(), mask.sum(dtype=losses.dtype))
