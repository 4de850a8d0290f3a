"""Learning rates as pure functions of the number of applied steps.

The optimizer counts: a skipped step does not advance the schedule.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from absl import logging
from jaxtyping import Array, Float, Int

from zjax.schedule.buckets import bucket_lengths, bucket_picks, rate_factors
from zjax.schedule.cycles import DEEPSPEED, log_rise
from zjax.schedule.lengths import CUTS, make_tokens
from zjax.settings.schema import (
    Config,
    Constant,
    Cosine,
    Decaying,
    Linear,
    Mixture,
    Paced,
    Warm,
    Wsd,
)


def make_schedule(
    config: Config,
) -> Callable[[Int[Array, ""] | int], Float[Array, ""]]:
    """Builds `schedule(num_applied_steps)`, a float32 learning rate; it can be traced.

    Step 0 has rate 0, as has step 1 of a `log` warm-up, and the step after the warm-up
    the peak. A warning names a run that ends earlier. Except under `constant`, the last
    step, `num_steps - 1`, and any later step have the final fraction of the peak.
    Between, the rate decays with the tokens that steps consume, and with the steps if
    all steps have one length. Schedules of `zjax.schedule.cycles` count steps and end
    differently.

    Example:
        >>> import dataclasses
        >>> from zjax.settings import schema
        >>> linear = schema.Optimizer(
        ...     schedule=schema.Linear(num_warmup_steps=4), peak_learning_rate=1.0
        ... )
        >>> schedule = make_schedule(schema.Config(num_steps=11, optimizer=linear))
        >>> [round(float(schedule(step)), 2) for step in (0, 2, 4, 7, 10, 99)]
        [0.0, 0.5, 1.0, 0.55, 0.1, 0.1]

    Reference:
        Cosine: Loshchilov and Hutter, arXiv:1608.03983. Warm-up, stable, decay: Hu et
        al., arXiv:2404.06395.
    """
    chosen, peak = config.optimizer.schedule, config.optimizer.peak_learning_rate
    total, factor = config.num_steps, _by_rows(config)
    num_warmup = chosen.warmup_steps(total) if isinstance(chosen, Warm) else 0
    if num_warmup > total:
        _log_unreached(num_warmup, total)
    if not isinstance(chosen, Constant | Linear | Cosine | Wsd):
        whole = DEEPSPEED[type(chosen)](chosen, peak, total)
        return lambda step: jnp.asarray(whole(step) * factor(step), jnp.float32)
    pieces = [(_warmup(chosen, peak, num_warmup), num_warmup)]
    pieces += _after_warmup(chosen, peak, total, num_decay=total - 1 - num_warmup)
    # `optax.linear_schedule` of 0 steps would warn and hold the start value.
    pieces = [piece for piece in pieces if piece[1] > 0]
    last = peak * chosen.final_fraction if isinstance(chosen, Decaying) else peak
    pieces.append((optax.constant_schedule(last), 0))

    ends = [sum(length for _, length in pieces[: i + 1]) for i in range(len(pieces))]
    joined = optax.join_schedules([piece for piece, _ in pieces], ends[:-1])

    def schedule(step: Int[Array, ""] | int) -> Float[Array, ""]:
        return jnp.asarray(joined(position(step)) * factor(step), jnp.float32)

    position = _by_tokens(config, num_warmup)
    return schedule


@functools.cache  # once per run: schedules are built several times
def _log_unreached(num_warmup: int, num_steps: int) -> None:
    """Logs that a run, such as a trial, ends during the warm-up."""
    text = "optimizer.schedule.num_warmup_steps=%d exceeds num_steps=%d: the learning "
    logging.warning(text + "rate does not reach its peak", num_warmup, num_steps)


def _warmup(chosen: Warm, peak: float, number: int) -> optax.Schedule:
    """Builds the rise to the peak in a number of steps."""
    if chosen.warmup == "linear":
        return optax.linear_schedule(0.0, peak, number)
    return lambda step: peak * log_rise(step, number)


def _by_rows(config: Config) -> Callable[[Any], Any]:
    """Returns the learning rate factor of a step by the bucket of the step's batch."""
    settings = config.buckets
    if not settings or settings.learning_rate == "constant":
        return lambda step: 1.0
    order = settings.order
    # Other orders follow from the data; rules refuse a factor with them.
    if not isinstance(order, Mixture | Paced):
        return lambda step: 1.0
    lengths = bucket_lengths(settings.shortest, config.data.length)
    # A byte each: lengths double from bucket to bucket, far fewer than 256 times.
    buckets = (
        bucket_picks(order, lengths, config)
        .first_parts(config.num_steps)
        .astype(np.uint8)
    )
    factors = rate_factors(settings, config.data.length)

    def factor(step: Any) -> Any:
        number = jnp.minimum(step, config.num_steps - 1)
        return jnp.asarray(factors)[jnp.asarray(buckets)[number]]

    return factor


def _by_tokens(config: Config, first: int) -> Callable[[Any], Any]:
    """Maps a step to the step with an equal rate in a run without length warm-up."""
    consumed = make_tokens(config)
    last = config.num_steps - 1
    # The warm-up counts steps: only changes after the warm-up bend the decay.
    changes = [step for step in consumed.changes() if first < step <= last]
    if not changes or not isinstance(config.sequence_warmup, CUTS):
        return lambda step: step
    # Step n is taken when the tokens of n steps are consumed.
    steps = np.array([first, *(step - 1 for step in changes), last])
    # float64 holds token counts exactly, which float32 does not.
    tokens = np.array([consumed.sum_until(int(step)) for step in steps], np.float64)
    share = (tokens - tokens[0]) / (tokens[-1] - tokens[0])
    positions = first + share * (last - first)

    def position(step: Any) -> Any:
        return jnp.where(step < last, jnp.interp(step, steps, positions), step)

    return lambda step: jnp.where(step <= first, step, position(step))


def _after_warmup(
    chosen: Warm, peak: float, total: int, num_decay: int
) -> list[tuple[optax.Schedule, int]]:
    """Builds the pieces of the schedule after the warm-up, with lengths in steps."""
    if num_decay < 1 or not isinstance(chosen, Decaying):
        return []
    if isinstance(chosen, Cosine):
        decay = optax.cosine_decay_schedule(peak, num_decay, chosen.final_fraction)
        return [(decay, num_decay)]
    num_stable = 0
    if isinstance(chosen, Wsd):
        num_stable = max(0, num_decay - round(chosen.decay_fraction * total))
    num_decay -= num_stable
    decay = optax.linear_schedule(peak, peak * chosen.final_fraction, num_decay)
    return [(optax.constant_schedule(peak), num_stable), (decay, num_decay)]
