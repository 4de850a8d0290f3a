"""The objective of a policy: a loss of tokens, a divergence and corrections as one sum.

Settings and arrays alone, without a model: `policy_model` and `policy_loss` give the
log-probabilities.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from zjax.errors import ConfigError, Problem
from zjax.rl import divergences, losses
from zjax.rl.corrections import (
    check_correction,
    mask_weights,
    on_policy_sequences,
    sequence_weights,
    token_weights,
    truncate_weights,
)
from zjax.rl.masks import masked
from zjax.rl.ratios import sequence_ratios, token_ratios
from zjax.rl.value_loss import check_clip, value_loss
from zjax.typing import IGNORED

Unit = Literal["tokens", "sequences"]
NEAR = (0.9, 1.1)
"""Ratios of the trainer to the sampler that `sampler_off` does not count."""


@dataclasses.dataclass(frozen=True)
class Clip:
    """The loss of `clip_loss`, or of `dual_clip_loss` if there is a bound.

    Args:
        low: Distance of the lower end of the range of ratios from 1, in [0, 1].
        high: Distance of the upper end from 1, at least 0.
        bound: Largest ratio that counts for a negative advantage, above 1; None for no
            bound.
    """

    low: float = 0.2
    high: float = 0.2
    bound: float | None = None


@dataclasses.dataclass(frozen=True)
class Cispo:
    """The loss of `cispo_loss`.

    Args:
        bound: Largest weight of a token, above 0.
    """

    bound: float = 5.0


@dataclasses.dataclass(frozen=True)
class Sapo:
    """The loss of `sapo_loss`.

    Args:
        positive: Temperature of the gate for positive advantages, above 0.
        negative: Temperature of the gate for negative advantages, above 0.
    """

    positive: float = 1.0
    negative: float = 1.05


@dataclasses.dataclass(frozen=True)
class Reinforce:
    """The loss of `reinforce_loss`."""


@dataclasses.dataclass(frozen=True)
class Kl:
    """A divergence from the reference policy in the loss.

    Args:
        weight: Factor of the divergence, above 0.
        estimator: Name of the estimate: `k2` and `k3_k2` have the gradient of
            `KL(policy || reference)`, `k3` has the gradient of
            `KL(reference || policy)`.
        by_ratio: Whether the estimate of a token is multiplied by the ratio of the
            token, for tokens of an older policy.
    """

    weight: float
    estimator: Literal["k2", "k3", "k3_k2"] = "k3_k2"
    by_ratio: bool = False


@dataclasses.dataclass(frozen=True)
class Correction:
    """Importance weights for tokens that another sampler drew.

    Args:
        unit: Unit of the weights. With ratios of sequences it is `sequences`, with the
            loss of CISPO `tokens`.
        action: `truncate` bounds weights; `mask` drops what has a weight out of range.
        bound: Largest weight, above 0.
        lowest: Smallest weight that `mask` does not drop, in [0, bound].
    """

    unit: Unit = "tokens"
    action: Literal["truncate", "mask"] = "truncate"
    bound: float = 2.0
    lowest: float = 0.0


@dataclasses.dataclass(frozen=True)
class Value:
    """The loss of values, by `value_loss`.

    Args:
        weight: Factor of the loss beside the loss of a policy, above 0.
        clip: Distance from the old value beyond which a value has no gradient, above 0;
            `math.inf` does not clip.
    """

    weight: float = 0.5
    clip: float = 0.2


@dataclasses.dataclass(frozen=True)
class Objective:
    """The loss of a policy, composed.

    Args:
        loss: Loss of a token.
        ratios: Unit of the ratios to the old policy: GSPO has `sequences`.
        kl: Divergence from the reference policy in the loss; None for none.
        correction: Importance weights for the sampler's tokens; None for none.
        threshold: Threshold of `on_policy_sequences` in nats, above 0; None drops no
            sequence.
        value: Loss of a critic that shares the policy's blocks, for PPO; None for a
            policy without values.
        entropy_weight: Weight of the entropy, which the loss rewards, 0 or more.
        temperature: Divisor of the logits as the tokens were sampled, above 0.
        pretraining_weight: Weight of the loss of pre-training tokens by
            `add_pretraining`, 0 or more.

    Raises:
        ConfigError: A number out of range, or units that do not fit; all at once.

    Example:
        >>> dapo = Objective(Clip(high=0.28))
        >>> gspo = Objective(Clip(3e-4, 4e-4), ratios="sequences")
        >>> gspo.loss.high
        0.0004
    """

    loss: Clip | Cispo | Sapo | Reinforce = Clip()
    ratios: Unit = "tokens"
    kl: Kl | None = None
    correction: Correction | None = None
    threshold: float | None = None
    value: Value | None = None
    entropy_weight: float = 0.0
    temperature: float = 1.0
    pretraining_weight: float = 0.0

    def __post_init__(self) -> None:
        problems = [*_range_problems(self)]
        if self.ratios == "sequences" and not isinstance(self.loss, Clip):
            name = type(self.loss).__name__
            problem = f"has no meaning for the loss {name}, whose unit is the token"
            remedy = "use Clip, or ratios='tokens'"
            problems.append(Problem("ratios", self.ratios, problem, remedy))
        fixed = self.ratios == "sequences" or isinstance(self.loss, Cispo)
        if self.correction and fixed:
            problems += _problems_of(
                check_correction, self.ratios, self.correction.unit
            )
        if problems:
            raise ConfigError(*problems)

    @property
    def reads_reference(self) -> bool:
        """Whether the loss needs the log-probabilities of a reference."""
        return self.kl is not None


class ObjectiveSums(NamedTuple):
    """Sums over the tokens of a microbatch, as the head of a `zjax.Stack` returns."""

    loss_sum: Float[Array, ""]
    weight: Float[Array, ""]
    """Number of units of the loss: tokens, sequences, or constant lengths."""
    metrics: dict[str, Float[Array, ""]]
    """Sums by name; divided by the weight, means as the loss counts."""


def value_sums(
    value: Value, values: Float[Array, "B L"], batch: Mapping[str, Any]
) -> ObjectiveSums:
    """Sums the loss of a critic over the tokens of packed rows, without its weight.

    Args:
        value: The loss.
        values: Value of each token by the critic.
        batch: Arrays of `zjax.rl.pack`; and under `rl`, float32[B, L], `values` of the
            critic before the first update, and `returns`.

    Returns:
        The loss, the number of units, and metrics: `value_loss`, and the mean `value`.

    Example:
        >>> ones = jnp.ones((1, 2))
        >>> given = {"values": 0 * ones, "returns": ones}
        >>> batch = {"targets": jnp.array([[5, -100]]), "weights": ones, "rl": given}
        >>> float(value_sums(Value(), 0 * ones, batch).loss_sum)
        0.5
    """
    mask, weights, units = _masked_weights(batch)
    old, returns = (batch["rl"][name] for name in ("values", "returns"))
    found = value_loss(values, old, returns, mask, clip=value.clip)
    shown = {"value_loss": found, "value": values}
    metrics = {k: (units * masked(x, mask)).sum() for k, x in shown.items()}
    metrics = jax.tree.map(jax.lax.stop_gradient, metrics)
    return ObjectiveSums((weights * found).sum(), units.sum(), metrics)


def objective_sums(
    objective: Objective,
    logprobs: Float[Array, "B L"],
    entropies: Float[Array, "B L"],
    batch: Mapping[str, Any],
) -> ObjectiveSums:
    """Sums the loss of a policy over the tokens of packed rows.

    Args:
        objective: The loss.
        logprobs: Log-probability of each target under the policy, at the temperature of
            the objective.
        entropies: Entropy of the policy at each token, in nats.
        batch: Arrays of `zjax.rl.pack`: `targets` int32[B, L], -100 for none, `weights`
            float32[B, L] of losses, `segment_ids` int32[B, L] where rows hold several
            sequences; and under `rl`, float32[B, L], `advantages`, `logprobs` (of the
            sampler), and optionally `units`, `old_logprobs` and `reference_logprobs`.
            Without `units` the weights are the units. Without `old_logprobs` the old
            policy is the policy: ratios are exactly 1, and have gradients.

    Returns:
        The loss, the number of units, and metrics: `entropy`; `ratio`, `clipped_low`
        and `clipped_high`, which are the mean ratio and the shares of tokens without
        gradient below and above the range; `kl` with a reference; `sampler_kl`, the
        divergence of the old policy from the sampler (k3); `sampler_off`, the share of
        tokens whose ratio to the sampler is outside [0.9, 1.1]; `dropped`, the share of
        tokens of weight 0 by a correction or a threshold.

    Raises:
        ConfigError: The objective has a divergence, and the batch no reference.

    Example:
        >>> ones = jnp.ones((1, 2))
        >>> given = {"advantages": ones, "logprobs": -ones}
        >>> batch = {"targets": jnp.array([[5, -100]]), "weights": ones, "rl": given}
        >>> sums = objective_sums(Objective(), -ones, ones, batch)
        >>> float(sums.loss_sum), float(sums.weight), float(sums.metrics["entropy"])
        (-1.0, 1.0, 1.0)
    """
    given, segment_ids = batch["rl"], batch.get("segment_ids")
    mask, weights, units = _masked_weights(batch)
    advantages = masked(given["advantages"], mask)
    sampler = given["logprobs"]
    old = given.get("old_logprobs", jax.lax.stop_gradient(logprobs))
    if objective.ratios == "sequences":
        ratios = sequence_ratios(logprobs, old, mask, segment_ids=segment_ids)
    else:
        ratios = token_ratios(logprobs, old, mask)
    found = _token_losses(objective.loss, logprobs, ratios, advantages, mask)
    shown, is_kept = {}, mask
    for factor in _factors(objective, logprobs, old, advantages, mask, batch):
        found = found * factor
        is_kept &= factor > 0
    if objective.correction or objective.threshold:
        shown["dropped"] = mask & ~is_kept
    if "reference_logprobs" in given:
        reference = given["reference_logprobs"]
        estimator = "k3" if objective.kl is None else objective.kl.estimator
        divergence = _ESTIMATORS[estimator](logprobs, reference, mask)
        shown["kl"] = divergence
        if objective.kl:
            by = token_ratios(logprobs, old, mask) if objective.kl.by_ratio else 1.0
            found += objective.kl.weight * by * divergence
    elif objective.kl:
        problem, remedy = "is missing", "give the log-probabilities of the reference"
        raise ConfigError(Problem("rl.reference_logprobs", None, problem, remedy))
    found -= objective.entropy_weight * masked(entropies, mask)
    to_sampler = token_weights(old, sampler, mask)
    shown |= {
        "entropy": entropies,
        "ratio": ratios,
        "sampler_kl": divergences.kl_k3(sampler, old, mask),
        "sampler_off": (to_sampler < NEAR[0]) | (to_sampler > NEAR[1]),
        **_clipped(objective.loss, ratios, advantages),
    }
    metrics = {k: (units * masked(_float(x), mask)).sum() for k, x in shown.items()}
    metrics = jax.tree.map(jax.lax.stop_gradient, metrics)
    return ObjectiveSums((weights * masked(found, mask)).sum(), units.sum(), metrics)


def _masked_weights(batch):
    """Returns the tokens that count, the weights of their losses, and their units."""
    weights = batch["weights"].astype(jnp.float32)
    mask = (batch["targets"] != IGNORED) & (weights > 0)
    units = batch["rl"].get("units", weights)
    return mask, masked(weights, mask), masked(units, mask)


_ESTIMATORS = {
    "k2": divergences.kl_k2,
    "k3": divergences.kl_k3,
    "k3_k2": divergences.kl_k3_k2,
}


def _token_losses(
    loss: Clip | Cispo | Sapo | Reinforce,
    logprobs: Float[Array, "B L"],
    ratios: Float[Array, "B L"],
    advantages: Float[Array, "B L"],
    mask: Bool[Array, "B L"],
) -> Float[Array, "B L"]:
    """Computes the loss of each token."""
    match loss:
        case Clip(low, high, None):
            return losses.clip_loss(ratios, advantages, mask, low=low, high=high)
        case Clip(low, high, bound):
            ends = {"low": low, "high": high, "bound": bound}
            return losses.dual_clip_loss(ratios, advantages, mask, **ends)
        case Cispo(bound):
            return losses.cispo_loss(logprobs, ratios, advantages, mask, bound=bound)
        case Sapo(positive, negative):
            gates = {"positive": positive, "negative": negative}
            return losses.sapo_loss(ratios, advantages, mask, **gates)
        case Reinforce():
            return losses.reinforce_loss(logprobs, advantages, mask)


def _factors(objective, logprobs, old, advantages, mask, batch):
    """Lists the factors of the losses of tokens, which are not differentiated."""
    sampler, segment_ids = batch["rl"]["logprobs"], batch.get("segment_ids")
    factors, correction = [], objective.correction
    if correction:
        if correction.unit == "sequences":
            weights = sequence_weights(old, sampler, mask, segment_ids=segment_ids)
        else:
            weights = token_weights(old, sampler, mask)
        if correction.action == "truncate":
            weights = truncate_weights(weights, bound=correction.bound)
        else:
            ends = {"lowest": correction.lowest, "bound": correction.bound}
            weights = mask_weights(weights, **ends)
        factors.append(weights)
    if objective.threshold:
        keeps = on_policy_sequences(
            *(logprobs, sampler, advantages, mask),
            threshold=objective.threshold,
            segment_ids=segment_ids,
        )
        factors.append(keeps)
    return factors


def _clipped(loss, ratios, advantages):
    """Marks tokens whose ratio has left the range, by the end that it left."""
    match loss:
        case Clip(low, high):
            return {
                "clipped_low": (ratios < 1 - low) & (advantages < 0),
                "clipped_high": (ratios > 1 + high) & (advantages > 0),
            }
        case Cispo(bound):
            return {"clipped_high": ratios > bound}
    return {}


def _float(x):
    """Casts marks to float32."""
    return x.astype(jnp.float32) if x.dtype == bool else x


def _range_problems(objective):
    """Lists numbers out of range."""
    ranges: list[tuple[str, float | None, float, bool]] = [
        ("temperature", objective.temperature, 0, False),
        ("threshold", objective.threshold, 0, False),
        ("entropy_weight", objective.entropy_weight, 0, True),
        ("pretraining_weight", objective.pretraining_weight, 0, True),
    ]
    match objective.loss:
        case Clip(low, high, bound):
            ranges += [("loss.low", low, 0, True), ("loss.high", high, 0, True)]
            ranges += [("loss.bound", bound, 1, False)]
            if low > 1:
                problem = "is above 1, and ratios are never below 0"
                yield Problem("loss.low", low, problem, "use 0.2")
        case Cispo(bound):
            ranges += [("loss.bound", bound, 0, False)]
        case Sapo(positive, negative):
            ranges += [("loss.positive", positive, 0, False)]
            ranges += [("loss.negative", negative, 0, False)]
    if objective.value:
        ranges += [("value.weight", objective.value.weight, 0, False)]
        problems = _problems_of(check_clip, objective.value.clip)
        yield from (dataclasses.replace(x, field="value.clip") for x in problems)
    if objective.kl:
        ranges += [("kl.weight", objective.kl.weight, 0, False)]
    if correction := objective.correction:
        ranges += [("correction.bound", correction.bound, 0, False)]
        ranges += [("correction.lowest", correction.lowest, 0, True)]
        if correction.lowest > correction.bound:
            problem = f"is above correction.bound={correction.bound}"
            remedy = "use 0.5 and 5.0"
            yield Problem("correction.lowest", correction.lowest, problem, remedy)
    for name, value, least, inclusive in ranges:
        if value is None or least < value < math.inf or (inclusive and value == least):
            continue
        text = f"is not a number of {least} or more" if inclusive else ""
        text = text or f"is not a number above {least}"
        yield Problem(name, value, text, f"use a number above {least}")


def _problems_of(check, *args):
    """Lists the problems that a check raises."""
    try:
        check(*args)
    except ConfigError as error:
        return error.problems
    return []
