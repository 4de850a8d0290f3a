"""Loss of an objective on examples, from the log-probabilities of packed rows.

A row of a batch holds whole examples (`zjax.data.example_rows`): each completion is a
segment, and `examples` int32[B, P, K] names the segments of each example.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from zjax.data.example_rows import DESIRABLE, EXAMPLES, REFERENCE
from zjax.rl.aggregation import example_mean
from zjax.rl.kto import kto_divergence, kto_loss
from zjax.rl.logprobs import SequenceLogprobs
from zjax.rl.masks import masked
from zjax.rl.preferences import (
    Pairs,
    apo_zero_loss,
    dpo_loss,
    hinge_loss,
    ipo_loss,
    log_ratios,
    robust_dpo_loss,
)
from zjax.rl.reference_free import orpo_loss, simpo_loss
from zjax.rl.reward_model import ranking_loss
from zjax.settings import preference as settings
from zjax.typing import Metrics

DIVERGENCE = "divergence"
"""Name of the divergence from the reference: a metric of `kto`, and an array float32[]
of a batch for a pass that reads it."""


class ComparisonSums(NamedTuple):
    """Sums over examples, as the head of a `zjax.Stack` returns them."""

    loss_sum: Float[Array, ""]
    weight: Float[Array, ""]
    metrics: Metrics


def completion_logprobs(
    logprobs: Float[Array, "B L"], batch: Mapping[str, Any]
) -> list[SequenceLogprobs]:
    """Sums log-probabilities of targets over each completion.

    Args:
        logprobs: Log-probability of each target.
        batch: `segment_ids` int32[B, L]; `weights` float32[B, L], 0 for targets of no
            completion; and `examples` int32[B, P, K].

    Returns:
        For each of the K places of an example, the sums of B * P completions, in the
        order of rows and examples. A place without completion has no token.

    Example:
        >>> batch = {
        ...     "segment_ids": jnp.array([[1, 1, 2, 2, 2, 0]]),
        ...     "weights": jnp.array([[1.0, 0.0, 1.0, 1.0, 0.0, 0.0]]),
        ...     "examples": jnp.array([[[2, 1], [0, 0]]]),
        ... }
        >>> chosen, rejected = completion_logprobs(-jnp.ones((1, 6)), batch)
        >>> chosen.sums.tolist(), rejected.sums.tolist()
        ([-2.0, 0.0], [-1.0, 0.0])
    """
    is_counted = batch["weights"] > 0
    of_segment = _segment_sums(batch["segment_ids"], batch[EXAMPLES])
    sums = of_segment(masked(logprobs, is_counted))
    counts = of_segment(is_counted.astype(jnp.int32))
    return [
        SequenceLogprobs(sums[..., k].reshape(-1), counts[..., k].reshape(-1))
        for k in range(sums.shape[-1])
    ]


def comparison_sums(
    objective: settings.Preference,
    logprobs: Float[Array, "B L"],
    batch: Mapping[str, Any],
) -> ComparisonSums:
    """Computes the loss of an objective on log-probabilities, summed over examples.

    Args:
        objective: Objective other than `reward_model`.
        logprobs: Log-probability of each target.
        batch: Arrays as for `completion_logprobs`; `reference_logprobs` float32[B, P,
            K] of completions, where the objective reads them. For `kto`, `desirable`
            int32[B, P], and `divergence` float32[], the metric of a pass without.

    Returns:
        Sum of losses, number of examples, and sums of metrics. Rewards are those that
        the objective implies; `accuracy` counts the examples whose reward is right.
    """
    policy = completion_logprobs(logprobs, batch)
    if isinstance(objective, settings.Kto):
        return _kto_sums(objective, policy, batch)
    chosen, rejected = policy
    pairs = Pairs(chosen, rejected)
    losses, (better, worse) = _losses(objective, pairs, batch)
    loss_sum, weight = example_mean(losses, pairs.is_real)
    metrics = _margins(better, worse, pairs.is_real)
    for name, each in zip(("chosen", "rejected"), pairs, strict=True):
        metrics[f"{name}_logprob"] = masked(each.totals, pairs.is_real).sum()
    return ComparisonSums(loss_sum, weight, metrics)


def reward_sums(
    objective: settings.RewardModel,
    rewards: Float[Array, "B L"],
    batch: Mapping[str, Any],
) -> ComparisonSums:
    """Computes the loss of a reward model on ranked lists, summed over lists.

    Args:
        objective: Settings of the loss.
        rewards: Reward at each token; the last token of a completion counts.
        batch: `segment_ids` int32[B, L] and `examples` int32[B, P, K].

    Returns:
        Sum of losses, number of lists, and sums of metrics; `accuracy` is the share of
        the pairs of a list whose rewards are in order.
    """
    given = last_of_segments(rewards, batch)
    is_real = (batch[EXAMPLES] > 0).reshape(given.shape)
    losses = ranking_loss(given, is_real, centering=objective.centering)
    is_list = is_real.sum(1) > 1
    loss_sum, weight = example_mean(losses, is_list)
    better, worse = jnp.triu_indices(given.shape[1], k=1)
    is_pair = is_real[:, better] & is_real[:, worse]
    gaps = masked(given[:, better] - given[:, worse], is_pair)
    share = 1 / jnp.maximum(is_pair.sum(1), 1)
    means = masked(given, is_real).sum(1) / jnp.maximum(is_real.sum(1), 1)
    metrics = {
        "reward": masked(means, is_list).sum(),
        "margin": (gaps.sum(1) * share).sum(),
        "accuracy": ((gaps > 0).sum(1) * share).sum(),
    }
    return ComparisonSums(loss_sum, weight, jax.lax.stop_gradient(metrics))


def last_of_segments(
    values: Float[Array, "B L"], batch: Mapping[str, Any]
) -> Float[Array, "N K"]:
    """Selects the value at the last token of each completion; 0 where there is none.

    Example:
        >>> batch = {
        ...     "segment_ids": jnp.array([[1, 1, 2, 2, 2, 0]]),
        ...     "examples": jnp.array([[[2, 1], [0, 0]]]),
        ... }
        >>> last_of_segments(jnp.arange(6.0)[None], batch).tolist()
        [[4.0, 1.0], [0.0, 0.0]]
    """
    ids = batch["segment_ids"]
    following = jnp.pad(ids[:, 1:], ((0, 0), (0, 1)))
    is_last = (ids > 0) & (following != ids)
    found = _segment_sums(ids, batch[EXAMPLES])(masked(values, is_last))
    return found.reshape(-1, found.shape[-1])


def _segment_sums(ids: Int[Array, "B L"], examples: Int[Array, "B P K"]):
    """Returns a function that sums values of tokens over the segments of examples."""
    # Comparisons fuse with the sum: nothing of the size B * P * K * L is stored, and
    # the order of the sum is fixed, unlike in a scatter.
    is_of = ids[:, None, None, :] == examples[..., None]
    return lambda values: jnp.where(is_of, values[:, None, None, :], 0).sum(-1)


def _losses(objective, pairs, batch):
    """Returns losses of pairs, and the rewards of both completions."""
    if isinstance(objective, settings.Simpo):
        losses = simpo_loss(pairs, beta=objective.scale, gamma=objective.gamma)
        return losses, [objective.scale * each.means for each in pairs]
    if isinstance(objective, settings.Orpo):
        losses = orpo_loss(pairs, weight=objective.weight)
        return losses, [each.means for each in pairs]
    reference = Pairs(*_reference(pairs, batch))
    ratios = [log_ratios(*each) for each in zip(pairs, reference, strict=True)]
    rewards = [objective.beta * ratio for ratio in ratios]
    options = {"beta": objective.beta}
    if isinstance(objective, settings.Dpo):
        loss = robust_dpo_loss if objective.robust else dpo_loss
        options["label_smoothing"] = objective.label_smoothing
    else:
        loss = _OF_MARGINS[type(objective)]
    return loss(pairs, reference, **options), rewards


_OF_MARGINS = {
    settings.Hinge: hinge_loss,
    settings.Ipo: ipo_loss,
    settings.ApoZero: apo_zero_loss,
}


def _reference(policy, batch):
    """Returns log-probabilities of the reference model, by place in an example."""
    sums = batch[REFERENCE]
    return [
        SequenceLogprobs(sums[..., k].reshape(-1), each.num_tokens)
        for k, each in enumerate(policy)
    ]


def _margins(
    better: Float[Array, " N"], worse: Float[Array, " N"], is_real: Bool[Array, " N"]
) -> Metrics:
    """Sums rewards, their difference, and how often it has the right sign."""
    gaps = masked(better - worse, is_real)
    sums = {
        "chosen_reward": masked(better, is_real).sum(),
        "rejected_reward": masked(worse, is_real).sum(),
        "margin": gaps.sum(),
        "accuracy": (gaps > 0).sum(dtype=gaps.dtype),
    }
    return jax.lax.stop_gradient(sums)


def _kto_sums(objective, policy, batch):
    """Sums the loss of labelled completions, and the divergence of mismatched ones."""
    reference = _reference(policy, batch)
    (own, mismatched), is_desirable = policy, batch[DESIRABLE].reshape(-1) > 0
    divergence = kto_divergence(mismatched, reference[1])
    # Without a given divergence the pass measures it.
    given = batch.get(DIVERGENCE, jnp.zeros(()))
    losses = kto_loss(
        own,
        reference[0],
        is_desirable,
        given,
        beta=objective.beta,
        desirable_weight=objective.desirable_weight,
        undesirable_weight=objective.undesirable_weight,
    )
    loss_sum, weight = example_mean(losses, own.is_real)
    ahead = objective.beta * (log_ratios(own, reference[0]) - jnp.maximum(given, 0))
    right = masked(jnp.where(is_desirable, ahead, -ahead), own.is_real)
    metrics = {
        DIVERGENCE: divergence.loss_sum,
        "margin": right.sum(),
        "accuracy": (right > 0).sum(dtype=right.dtype),
    }
    return ComparisonSums(loss_sum, weight, jax.lax.stop_gradient(metrics))
