"""Schedules that cycle, as DeepSpeed has them: OneCycle and LRRangeTest.

Step n has the rate of DeepSpeed's update n, whose scheduler steps after its optimizer.

Reference: Smith, A disciplined approach to neural network hyper-parameters,
arXiv:1803.09820.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import optax

from zjax.config.schema import Cycle, Optimizer


def one_cycle(settings: Optimizer) -> optax.Schedule:
    """A rise to the peak, a fall back, and a decay.

    Args:
        settings: Reads `peak_learning_rate` and `cycle`.

    Returns:
        The learning rate of a step, counted from 0.

    Example:
        >>> cycle = Cycle(num_rise_steps=2, decay_rate=1.0, min_learning_rate=1.0)
        >>> rate = one_cycle(Optimizer(peak_learning_rate=3.0, cycle=cycle))
        >>> [float(rate(step)) for step in range(6)]
        [1.0, 2.0, 3.0, 2.0, 1.0, 0.5]
    """
    cycle, least = settings.cycle, settings.cycle.min_learning_rate
    height = settings.peak_learning_rate - least

    def rate(step: Any) -> Any:
        decayed = least / (1 + cycle.decay_rate * _decay(cycle, step))
        return decayed + height * _phase(cycle, step)

    return rate


def range_test(settings: Optimizer) -> optax.Schedule:
    """A rate that grows without end, on a line or on stairs.

    Args:
        settings: Reads `range_test`.

    Returns:
        The learning rate of a step, counted from 0.

    Example:
        >>> from zjax.config.schema import RangeTest
        >>> test = RangeTest(start_learning_rate=1.0, num_steps=2, staircase=True)
        >>> rate = range_test(Optimizer(range_test=test))
        >>> [float(rate(step)) for step in range(5)]
        [1.0, 1.0, 2.0, 2.0, 3.0]
    """
    test = settings.range_test

    def rate(step: Any) -> Any:
        number = test.num_steps
        grown = step // number if test.staircase else step / number
        return test.start_learning_rate * (1 + test.growth * grown)

    return rate


def cycled_momentum(cycle: Cycle) -> optax.Schedule:
    """The momentum beside `one_cycle`; that of step 0 is the least, as in DeepSpeed.

    Args:
        cycle: Reads all but the learning rates.

    Returns:
        The momentum of a step, counted from 0.
    """
    least, most = cycle.min_momentum, cycle.max_momentum

    def momentum(step: Any) -> Any:
        grown = most * (1 + cycle.momentum_decay_rate * _decay(cycle, step))
        cycled = grown - (most - least) * _phase(cycle, step)
        return jnp.where(step == 0, least, cycled)

    return momentum


def with_momentum(
    make: Callable[..., optax.GradientTransformation], momentum: optax.Schedule
) -> optax.GradientTransformation:
    """A rule whose momentum changes from step to step.

    Args:
        make: Makes the rule from its `b1`; its state has a `count` of updates.
        momentum: The `b1` of a count.

    Returns:
        The rule; its state is that of `make`.
    """

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return make(b1=momentum(state.count)).update(updates, state, params)

    return optax.GradientTransformation(make(b1=0.0).init, update)


CYCLES: Mapping[str, Callable[[Optimizer], optax.Schedule]] = {
    "one_cycle": one_cycle,
    "range_test": range_test,
}
"""Schedules without a warm-up, by `optimizer.schedule`."""


def _phase(cycle: Cycle, step: Any) -> Any:
    """0 at both ends of the cycle and after it, 1 at its peak."""
    rise, fall = _or_rise(cycle.num_fall_steps, cycle.num_rise_steps)
    stairs_up, stairs_down = _or_rise(cycle.num_fall_stairs, cycle.num_rise_stairs)
    left = jnp.maximum(rise + fall - step, 0)
    up = _climb(jnp.minimum(step, rise), rise, stairs_up)
    down = _climb(jnp.minimum(left, fall), max(1, fall), stairs_down)
    is_rising = step <= rise if fall else step < rise
    return jnp.where(is_rising, up, down)


def _or_rise(fall: int, rise: int) -> tuple[int, int]:
    return rise, rise if fall == -1 else fall


def _climb(steps: Any, number: int, stairs: int) -> Any:
    if not stairs:
        return steps / number
    return (steps * stairs // number) / stairs


def _decay(cycle: Cycle, step: Any) -> Any:
    rise, fall = _or_rise(cycle.num_fall_steps, cycle.num_rise_steps)
    return jnp.maximum(step - rise - fall, 0) / cycle.num_decay_steps
