"""Recipes: from the settings of `rl` to the objective and the advantages."""

import functools

import jax

from zjax.rl import objective as parts
from zjax.rl.advantages import (
    EstimateOfSeveral,
    decoupled_advantages,
    group_advantages,
    rloo_advantages,
    summed,
)
from zjax.rl.groups import Groups, Overlong, SoftPenalty
from zjax.rl.packing import Aggregation
from zjax.settings import rl


def make_objective(settings: rl.Rl) -> parts.Objective:
    """Makes the objective of a recipe of the literature.

    Args:
        settings: Settings of `config.rl`.

    Returns:
        The loss, composed.

    Example:
        >>> make_objective(rl.Rl(objective=rl.Dapo())).loss
        Clip(low=0.2, high=0.28, bound=None)
    """
    reference = settings.reference
    divergence = None
    if isinstance(reference, rl.InLoss):
        divergence = parts.Kl(reference.coefficient, reference.estimator)
    return parts.Objective(
        loss=_token_loss(settings.objective),
        ratios=settings.objective.ratio,
        kl=divergence,
        correction=_correction(settings.correction),
        threshold=getattr(settings.objective, "max_sampler_gap", 0.0) or None,
        value=value_of(settings) if settings.has_values else None,
        entropy_weight=settings.objective.entropy_weight,
        temperature=settings.rollout.temperature,
        pretraining_weight=settings.pretraining.weight if settings.pretraining else 0.0,
    )


def aggregation_of(objective: rl.Objective) -> Aggregation:
    """Name of the aggregation of the losses of tokens."""
    if not isinstance(objective, rl.Grouped):
        return "token_mean"
    chosen = objective.chosen_aggregation
    return "constant_mean" if chosen == "constant" else chosen  # type: ignore[return]


def make_groups(
    settings: rl.Rl, num_groups: int, num_samples: int, *, max_refills: int = 0
) -> Groups:
    """Makes what collects groups of texts, with advantages and metrics."""
    return Groups(
        num_groups,
        num_samples,
        {reward.name: reward.weight for reward in settings.rewards},
        estimate=_estimate(settings.objective),
        max_groups=num_groups * (1 + max_refills),
        overlong=_overlong(settings.overlong, settings.rollout.max_new_tokens),
    )


def _estimate(objective: rl.Objective) -> EstimateOfSeveral:
    """Returns the function from rewards to advantages of texts."""
    if not isinstance(objective, rl.Grouped):
        return summed(_of_tokens)
    if objective.normalise_each:
        return decoupled_advantages
    return summed(_ESTIMATES[objective.chosen_baseline])


def _of_tokens(rewards: jax.Array) -> jax.Array:
    """Returns rewards as they are, where advantages are of tokens."""
    return rewards


_ESTIMATES = {
    "group_std": group_advantages,
    "group_mean": functools.partial(group_advantages, by_std=False),
    "leave_one_out": rloo_advantages,
}


def _overlong(given: rl.Overlong, longest: int) -> Overlong:
    """Returns the treatment of texts that are cut off."""
    if isinstance(given, rl.Penalise):
        return SoftPenalty(longest, given.margin or max(1, longest // 5))
    return "mask" if isinstance(given, rl.Mask) else "keep"


def _token_loss(
    objective: rl.Objective,
) -> parts.Clip | parts.Cispo | parts.Sapo | parts.Reinforce:
    """Returns the loss of a token."""
    if isinstance(objective, rl.Clipped):
        low, high = objective.clip
        return parts.Clip(low, high, objective.max_ratio or None)
    if isinstance(objective, rl.Cispo):
        return parts.Cispo(objective.max_weight)
    if isinstance(objective, rl.Sapo):
        temperatures = objective.positive_temperature, objective.negative_temperature
        return parts.Sapo(*temperatures)
    return parts.Reinforce()


def value_of(settings: rl.Rl) -> parts.Value:
    """Returns the loss of values of `rl.objective=ppo`."""
    objective = settings.objective
    assert isinstance(objective, rl.Ppo)
    return parts.Value(objective.value_weight, objective.value_clip)


def _correction(given: rl.Correction | None) -> parts.Correction | None:
    """Returns the importance weights for the sampler's tokens."""
    if given is None:
        return None
    if isinstance(given, rl.Drop):
        bounds = given.max_weight, given.min_weight
        return parts.Correction(given.unit, "mask", *bounds)
    assert isinstance(given, rl.Truncate)
    return parts.Correction(given.unit, "truncate", given.max_weight)
