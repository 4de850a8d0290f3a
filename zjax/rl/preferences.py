"""Losses on pairs of completions, of which one was preferred, with a reference model.

Each loss is an array with one value per pair; `example_mean` sums the pairs of
`Pairs.is_real`. With c and j the log-probabilities of the chosen and the rejected
completion, summed over tokens, and c', j' the reference model's, losses of the DPO
family are functions of the margin `h = beta ((c - c') - (j - j'))`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from zjax.errors import ConfigError, Problem
from zjax.rl.logprobs import SequenceLogprobs
from zjax.rl.ranges import check_above_zero


class Pairs(NamedTuple):
    """Log-probabilities of P pairs of completions under one model.

    A pair without tokens in either completion is padding: losses are 0, and gradients
    too.
    """

    chosen: SequenceLogprobs
    rejected: SequenceLogprobs

    @property
    def is_real(self) -> Bool[Array, " P"]:
        """Marks pairs whose completions both have tokens."""
        return self.chosen.is_real & self.rejected.is_real


def log_ratios(
    policy: SequenceLogprobs, reference: SequenceLogprobs
) -> Float[Array, " S"]:
    """Subtracts the reference model's log-probability of each sequence.

    Times beta, this is the implicit reward of DPO, to be logged of both completions.

    Args:
        policy: Log-probabilities of the trained model.
        reference: Log-probabilities of the reference model; not differentiated.

    Returns:
        Differences of sums, 0 for padding.

    Example:
        >>> policy = SequenceLogprobs(jnp.array([-3.0]), jnp.array([2]))
        >>> reference = SequenceLogprobs(jnp.array([-5.0]), jnp.array([2]))
        >>> log_ratios(policy, reference).tolist()
        [2.0]

    Reference:
        Rafailov et al., DPO (arXiv:2305.18290, section 4).
    """
    return policy.totals - jax.lax.stop_gradient(reference.totals)


def dpo_loss(
    policy: Pairs,
    reference: Pairs,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> Float[Array, " P"]:
    """Computes `-(1 - e) log sigmoid(h) - e log sigmoid(-h)`, with smoothing e.

    Args:
        policy: Log-probabilities of the trained model.
        reference: Log-probabilities of the reference model; not differentiated.
        beta: Strength of the tie to the reference model, above 0.
        label_smoothing: Assumed share of pairs whose preference is wrong, 0 to less
            than 0.5.

    Returns:
        Loss of each pair, 0 or more.

    Raises:
        ConfigError: `beta` or `label_smoothing` is out of range.

    Example:
        >>> def pairs(c, j):
        ...     n = jnp.array([1])
        ...     return Pairs(SequenceLogprobs(c, n), SequenceLogprobs(j, n))
        >>> policy = pairs(jnp.array([-1.0]), jnp.array([-6.0]))
        >>> reference = pairs(jnp.array([-2.0]), jnp.array([-2.0]))
        >>> f"{dpo_loss(policy, reference, beta=0.1)[0]:.4f}"  # h = 0.5
        '0.4741'

    Reference:
        Rafailov et al., DPO (arXiv:2305.18290, equation 7); smoothing: Mitchell, "A
        note on DPO with noisy preferences" (2023), equation 3.
    """
    _check_smoothing(label_smoothing)
    h = _margins(policy, reference, beta)
    return of_real(
        -(1 - label_smoothing) * jax.nn.log_sigmoid(h)
        - label_smoothing * jax.nn.log_sigmoid(-h),
        policy,
    )


def robust_dpo_loss(
    policy: Pairs, reference: Pairs, *, beta: float = 0.1, label_smoothing: float = 0.1
) -> Float[Array, " P"]:
    """Computes `(-(1 - e) log sigmoid(h) + e log sigmoid(-h)) / (1 - 2 e)`.

    The mean over wrong labels of share e is the loss of DPO on right labels. Arguments,
    returned values and errors are as in `dpo_loss`; losses may be below 0.

    Example:
        >>> n = jnp.array([1])
        >>> even = Pairs(*[SequenceLogprobs(jnp.array([-2.0]), n)] * 2)
        >>> f"{robust_dpo_loss(even, even)[0]:.4f}"
        '0.6931'

    Reference:
        Chowdhury et al. (arXiv:2403.00409, section 3).
    """
    _check_smoothing(label_smoothing)
    h = _margins(policy, reference, beta)
    right, wrong = -jax.nn.log_sigmoid(h), -jax.nn.log_sigmoid(-h)
    losses = (1 - label_smoothing) * right - label_smoothing * wrong
    return of_real(losses / (1 - 2 * label_smoothing), policy)


def hinge_loss(
    policy: Pairs, reference: Pairs, *, beta: float = 0.1
) -> Float[Array, " P"]:
    """Computes `max(0, 1 - h)`: pairs with a margin of 1 or more give no gradient.

    Arguments, returned values and errors are as in `dpo_loss`.

    Example:
        >>> n = jnp.array([1])
        >>> even = Pairs(*[SequenceLogprobs(jnp.array([-2.0]), n)] * 2)
        >>> hinge_loss(even, even).tolist()
        [1.0]

    Reference:
        Zhao et al., SLiC-HF (arXiv:2305.10425, equation 1), of log-ratios as in Liu et
        al., RSO (arXiv:2309.06657).
    """
    return of_real(jax.nn.relu(1 - _margins(policy, reference, beta)), policy)


def ipo_loss(
    policy: Pairs, reference: Pairs, *, beta: float = 0.1
) -> Float[Array, " P"]:
    """Computes `(x - 1 / (2 beta))^2`, x the margin of means over tokens, without beta.

    The margin has a target, and does not grow without limit. Means in place of sums
    keep long completions from missing the target by length alone. Arguments, returned
    values and errors are as in `dpo_loss`.

    Example:
        >>> n = jnp.array([2])
        >>> even = Pairs(*[SequenceLogprobs(jnp.array([-2.0]), n)] * 2)
        >>> ipo_loss(even, even, beta=0.1).tolist()  # the target is 5
        [25.0]

    Reference:
        Azar et al., IPO (arXiv:2310.12036, equation 17).
    """
    check_above_zero(beta=beta)
    means = policy.chosen.means - policy.rejected.means
    x = means - jax.lax.stop_gradient(reference.chosen.means - reference.rejected.means)
    return of_real(jnp.square(x - 1 / (2 * beta)), policy)


def apo_zero_loss(
    policy: Pairs, reference: Pairs, *, beta: float = 0.1
) -> Float[Array, " P"]:
    """Computes `1 - sigmoid(beta (c - c')) + sigmoid(beta (j - j'))`.

    The chosen completion becomes more likely and the rejected less, each by itself.
    Arguments, returned values and errors are as in `dpo_loss`; losses are 0 to 2.

    Example:
        >>> n = jnp.array([1])
        >>> even = Pairs(*[SequenceLogprobs(jnp.array([-2.0]), n)] * 2)
        >>> apo_zero_loss(even, even).tolist()
        [1.0]

    Reference:
        D'Oosterlinck et al., APO (arXiv:2408.06266, section 3).
    """
    check_above_zero(beta=beta)
    chosen = log_ratios(policy.chosen, reference.chosen)
    rejected = log_ratios(policy.rejected, reference.rejected)
    losses = jax.nn.sigmoid(-beta * chosen) + jax.nn.sigmoid(beta * rejected)
    return of_real(losses, policy)


def of_real(losses: Float[Array, " P"], policy: Pairs) -> Float[Array, " P"]:
    """Zeroes the losses of padding."""
    return jnp.where(policy.is_real, losses, 0)


def _check_smoothing(share):
    """Refuses a share of wrong labels that leaves nothing to learn."""
    if not 0 <= share < 0.5:
        problem = "is not 0 or more and below 0.5"
        remedy = "use the share of pairs whose preference is wrong"
        raise ConfigError(Problem("label_smoothing", share, problem, remedy))


def _margins(policy, reference, beta):
    """Returns beta times the difference of the log-ratios."""
    check_above_zero(beta=beta)
    chosen = log_ratios(policy.chosen, reference.chosen)
    return beta * (chosen - log_ratios(policy.rejected, reference.rejected))
