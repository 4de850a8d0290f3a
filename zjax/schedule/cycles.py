"""Learning rate schedules of DeepSpeed: warm-ups, OneCycle and LRRangeTest.

Step n, counted from 0, has the rate of DeepSpeed's update n, with the scheduler
stepping after the optimizer. All schedules count steps, whatever the number of tokens
in a step.

Reference: Smith, A disciplined approach to neural network hyper-parameters,
arXiv:1803.09820.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import optax

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

    Example:
        >>> rate = warmup_decay_lr(schema.WarmupDecayLr(num_warmup_steps=2), 4.0, 6)
        >>> [float(rate(step)) for step in range(6)]
        [0.0, 0.0, 2.0, 4.0, 3.0, 2.0]
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
