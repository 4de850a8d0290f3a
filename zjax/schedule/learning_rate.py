"""Learning rates as pure functions of the number of applied steps."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from absl import logging
from jaxtyping import Array, Float, Int

from zjax.schedule.buckets import bucket_lengths, bucket_picks, rate_factors
from zjax.schedule.lengths import CUTS, make_tokens
from zjax.settings import schema


def warmup_lr(chosen: schema.WarmupLr, peak: float, total: int) -> optax.Schedule:
    """Rises to the peak and holds the peak, as WarmupLR.

    Example:
        >>> rate = warmup_lr(schema.WarmupLr(num_warmup_steps=4), 4.0, total=100)
        >>> [float(rate(step)) for step in range(7)]
        [0.0, 0.0, 1.0, 2.0, 3.0, 4.0, 4.0]
    """
    return _after_rise(chosen, peak, total, lambda step: 1.0)


def warmup_decay_lr(
    chosen: schema.WarmupDecayLr, peak: float, total: int
) -> optax.Schedule:
    """Rises to the peak and decays on a line to 0, as WarmupDecayLR.

    The decay ends at step `total` + 1, after the last step of the run.
    """
    length = _decay_steps(chosen, total)

    def after(step: Any) -> Any:
        return jnp.maximum(total + 1 - step, 0) / length

    return _after_rise(chosen, peak, total, after)


def warmup_cosine_lr(
    chosen: schema.WarmupCosineLr, peak: float, total: int
) -> optax.Schedule:
    """Rises to the peak and decays by half a cosine, as WarmupCosineLR.

    The decay ends at step `total`, one step after the last.
    """
    start, length = _rise_steps(chosen, total), _decay_steps(chosen, total)
    final = chosen.final_fraction

    def after(step: Any) -> Any:
        share = jnp.minimum((step - start) / length, 1.0)
        return final + (1 - final) * (1 + jnp.cos(math.pi * share)) / 2

    return _after_rise(chosen, peak, total, after)


def log_rise(step: Any, number: int) -> Any:
    """Computes the fraction of the peak at a step of a logarithmic warm-up.

    Steps 0 and 1 have 0, step `number` (2 or more) and later steps 1 or more.

    Example:
        >>> [round(float(log_rise(step, 4)), 2) for step in range(5)]
        [0.0, 0.0, 0.5, 0.79, 1.0]
    """
    return jnp.log(jnp.maximum(step, 1)) / math.log(max(2, number))


def one_cycle(cycle: schema.OneCycle, peak: float, total: int) -> optax.Schedule:
    """Rises to the peak, falls back and decays, as OneCycle.

    Example:
        >>> cycle = schema.OneCycle(
        ...     num_rise_steps=2, decay_rate=1.0, min_learning_rate=1.0
        ... )
        >>> rate = one_cycle(cycle, 3.0, total=100)
        >>> [float(rate(step)) for step in range(6)]
        [1.0, 2.0, 3.0, 2.0, 1.0, 0.5]
    """
    least = cycle.min_learning_rate

    def rate(step: Any) -> Any:
        decayed = least / (1 + cycle.decay_rate * _decay(cycle, step))
        return decayed + (peak - least) * _phase(cycle, step)

    return rate


def range_test(test: schema.RangeTest, peak: float, total: int) -> optax.Schedule:
    """Grows without end, on a line or in stairs, as LRRangeTest.

    Example:
        >>> test = schema.RangeTest(
        ...     start_learning_rate=1.0, num_steps=2, staircase=True
        ... )
        >>> rate = range_test(test, 3e-4, total=100)
        >>> [float(rate(step)) for step in range(5)]
        [1.0, 1.0, 2.0, 2.0, 3.0]
    """

    def rate(step: Any) -> Any:
        number = test.num_steps
        grown = step // number if test.staircase else step / number
        return test.start_learning_rate * (1 + test.growth * grown)

    return rate


def cycled_momentum(
    cycle: schema.OneCycle, momentum: schema.CycledMomentum
) -> optax.Schedule:
    """Momentum that mirrors `one_cycle`; step 0 has the least one, as in DeepSpeed."""
    least, most = momentum.min_momentum, momentum.max_momentum

    def rate(step: Any) -> Any:
        grown = most * (1 + momentum.momentum_decay_rate * _decay(cycle, step))
        cycled = grown - (most - least) * _phase(cycle, step)
        return jnp.where(step == 0, least, cycled)

    return rate


def with_momentum(
    make: Callable[..., optax.GradientTransformation], momentum: optax.Schedule
) -> optax.GradientTransformation:
    """Makes a rule whose `b1` follows a schedule of the rule's own `count`."""

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return make(b1=momentum(state.count)).update(updates, state, params)

    # The state of a rule does not depend on b1.
    return optax.GradientTransformation(make(b1=0.0).init, update)


DEEPSPEED: Mapping[type, Callable[[Any, float, int], optax.Schedule]] = {
    schema.WarmupLr: warmup_lr,
    schema.WarmupDecayLr: warmup_decay_lr,
    schema.WarmupCosineLr: warmup_cosine_lr,
    schema.OneCycle: one_cycle,
    schema.RangeTest: range_test,
}
"""Schedules of DeepSpeed, made of settings, peak and number of steps."""


def _after_rise(
    chosen: schema.Warm, peak: float, total: int, after: optax.Schedule
) -> optax.Schedule:
    """Builds a schedule from the fractions of the peak after the warm-up."""
    number = _rise_steps(chosen, total)

    def rate(step: Any) -> Any:
        # The first two updates of DeepSpeed both have rate 0.
        line = jnp.maximum(step - 1, 0) / number
        rise = log_rise(step, number) if chosen.warmup == "log" else line
        return peak * jnp.where(step <= number, rise, after(step))

    return rate


def _rise_steps(chosen: schema.Warm, total: int) -> int:
    """Returns the last step of the warm-up, which is step 2 or a later one."""
    return max(2, chosen.warmup_steps(total))


def _decay_steps(chosen: schema.Warm, total: int) -> int:
    """Returns the number of steps from the end of the warm-up to the end of the run."""
    return max(1, total - _rise_steps(chosen, total))


def _phase(cycle: schema.OneCycle, step: Any) -> Any:
    """Height in the cycle: 0 at both ends and after the cycle, 1 at the peak."""
    rise, fall = _or_rise(cycle.num_fall_steps, cycle.num_rise_steps)
    stairs_up, stairs_down = _or_rise(cycle.num_fall_stairs, cycle.num_rise_stairs)
    left = jnp.maximum(rise + fall - step, 0)
    up = _climb(jnp.minimum(step, rise), rise, stairs_up)
    down = _climb(jnp.minimum(left, fall), max(1, fall), stairs_down)
    # Without a fall the cycle drops to 0 at the step of the peak.
    is_rising = step <= rise if fall else step < rise
    return jnp.where(is_rising, up, down)


def _or_rise(fall: int, rise: int) -> tuple[int, int]:
    """Returns both numbers, with the rise in place of a fall of -1."""
    return rise, rise if fall == -1 else fall


def _climb(steps: Any, number: int, stairs: int) -> Any:
    """Fraction of a slope that `steps` have climbed, in stairs if there are any."""
    if not stairs:
        return steps / number
    return (steps * stairs // number) / stairs


def _decay(cycle: schema.OneCycle, step: Any) -> Any:
    """Decay intervals since the end of the cycle, 0 during the cycle."""
    rise, fall = _or_rise(cycle.num_fall_steps, cycle.num_rise_steps)
    return jnp.maximum(step - rise - fall, 0) / cycle.num_decay_steps


def make_schedule(
    config: schema.Config,
) -> Callable[[Int[Array, ""] | int], Float[Array, ""]]:
    """Builds `schedule(num_applied_steps)`, a float32 learning rate; it can be traced.

    Step 0 has rate 0, as has step 1 of a `log` warm-up, and the step after the warm-up
    the peak. A warning names a run that ends earlier. Except under `constant`, the last
    step, `num_steps - 1`, and any later step have the final fraction of the peak.
    Between, the rate decays with the tokens that steps consume, and with the steps if
    all steps have one length. Schedules of DeepSpeed count steps and end
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
    num_warmup = chosen.warmup_steps(total) if isinstance(chosen, schema.Warm) else 0
    if num_warmup > total:
        _log_unreached(num_warmup, total)
    if not isinstance(
        chosen, schema.Constant | schema.Linear | schema.Cosine | schema.Wsd
    ):
        whole = DEEPSPEED[type(chosen)](chosen, peak, total)
        return lambda step: jnp.asarray(whole(step) * factor(step), jnp.float32)
    pieces = [(_warmup(chosen, peak, num_warmup), num_warmup)]
    pieces += _after_warmup(chosen, peak, total, num_decay=total - 1 - num_warmup)
    # `optax.linear_schedule` of 0 steps would warn and hold the start value.
    pieces = [piece for piece in pieces if piece[1] > 0]
    last = peak * chosen.final_fraction if isinstance(chosen, schema.Decaying) else peak
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


def _warmup(chosen: schema.Warm, peak: float, number: int) -> optax.Schedule:
    """Builds the rise to the peak in a number of steps."""
    if chosen.warmup == "linear":
        return optax.linear_schedule(0.0, peak, number)
    return lambda step: peak * log_rise(step, number)


def _by_rows(config: schema.Config) -> Callable[[Any], Any]:
    """Returns the learning rate factor of a step by the bucket of the step's batch."""
    settings = config.buckets
    if not settings or settings.learning_rate == "constant":
        return lambda step: 1.0
    order = settings.order
    # Other orders follow from the data; rules refuse a factor with them.
    if not isinstance(order, schema.Mixture | schema.Paced):
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


def _by_tokens(config: schema.Config, first: int) -> Callable[[Any], Any]:
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
    chosen: schema.Warm, peak: float, total: int, num_decay: int
) -> list[tuple[optax.Schedule, int]]:
    """Builds the pieces of the schedule after the warm-up, with lengths in steps."""
    if num_decay < 1 or not isinstance(chosen, schema.Decaying):
        return []
    if isinstance(chosen, schema.Cosine):
        decay = optax.cosine_decay_schedule(peak, num_decay, chosen.final_fraction)
        return [(decay, num_decay)]
    num_stable = 0
    if isinstance(chosen, schema.Wsd):
        num_stable = max(0, num_decay - round(chosen.decay_fraction * total))
    num_decay -= num_stable
    decay = optax.linear_schedule(peak, peak * chosen.final_fraction, num_decay)
    return [(optax.constant_schedule(peak), num_stable), (decay, num_decay)]
