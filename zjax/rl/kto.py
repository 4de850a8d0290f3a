"""KTO: completions that were each called desirable or not, without pairs."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from zjax.rl.aggregation import LossSum, example_mean
from zjax.rl.logprobs import SequenceLogprobs
from zjax.rl.preferences import log_ratios
from zjax.rl.ranges import check_above_zero, check_not_negative


def kto_divergence(policy: SequenceLogprobs, reference: SequenceLogprobs) -> LossSum:
    """Sums `log pi(y) - log pi'(y)` over mismatched completions, an estimate of the KL.

    Each completion y belongs to another prompt of the batch than it is scored with.
    Sums and weights of all microbatches and devices are added up first; `mean` is the
    `divergence` of `kto_loss`.

    Args:
        policy: Log-probabilities of the trained model.
        reference: Log-probabilities of the reference model; not differentiated.

    Returns:
        The sum, which may be below 0, and the number of completions with tokens.

    Example:
        >>> n = jnp.array([3, 3])
        >>> policy = SequenceLogprobs(jnp.array([-3.0, -4.0]), n)
        >>> reference = SequenceLogprobs(jnp.array([-5.0, -5.0]), n)
        >>> float(kto_divergence(policy, reference).mean)
        1.5

    Reference:
        Ethayarajh et al., KTO (arXiv:2402.01306, section 4).
    """
    return example_mean(log_ratios(policy, reference), policy.is_real)


def kto_loss(
    policy: SequenceLogprobs,
    reference: SequenceLogprobs,
    is_desirable: Bool[Array, " S"],
    divergence: Float[Array, ""],
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Float[Array, " S"]:
    """Computes `w (1 - sigmoid(beta (r - z)))`, r the log-ratio of a completion.

    An undesirable completion has `beta (z - r)` instead. z is the larger of
    `divergence` and 0.

    Args:
        policy: Log-probabilities of the trained model.
        reference: Log-probabilities of the reference model; not differentiated.
        is_desirable: Whether each completion was called desirable.
        divergence: Mean of `kto_divergence` over the global batch of the step, not over
            a microbatch, whose loss would then depend on how the batch is split; not
            differentiated.
        beta: Strength of the tie to the reference model, above 0.
        desirable_weight: w of desirable completions, 0 or more.
        undesirable_weight: w of undesirable completions, 0 or more.

    Returns:
        Loss of each completion, 0 to w; 0 for padding.

    Raises:
        ConfigError: `beta` or a weight is out of range.

    Example:
        >>> x = SequenceLogprobs(jnp.array([-3.0, -4.0]), jnp.array([3, 3]))
        >>> labels, divergence = jnp.array([True, False]), jnp.float32(-1.0)
        >>> kto_loss(x, x, labels, divergence, undesirable_weight=2.0).tolist()
        [0.5, 1.0]

    Reference:
        Ethayarajh et al., KTO (arXiv:2402.01306, section 4).
    """
    check_above_zero(beta=beta)
    check_not_negative(
        desirable_weight=desirable_weight, undesirable_weight=undesirable_weight
    )
    ratios = log_ratios(policy, reference)
    # The mean is clipped, not each of its terms, which may be below 0.
    ahead = beta * (ratios - jnp.maximum(jax.lax.stop_gradient(divergence), 0))
    losses = jnp.where(
        is_desirable,
        desirable_weight * jax.nn.sigmoid(-ahead),
        undesirable_weight * jax.nn.sigmoid(ahead),
    )
    return jnp.where(policy.is_real, losses, 0)
