"""What replicas send each other in a step, as a table of phases by optimizer.

An optimizer with phases is an optax transformation whose `update` takes the mean of
what was sent, and the name of the phase as `phase=`.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from zjax.config.schema import Config, Optimizer
from zjax.optim import intervals, onebit_adam, zero_one_adam
from zjax.optim.adam_steps import make_adam_steps
from zjax.optim.rounds import SYNCHRONOUS, make_rounds


class Phase(NamedTuple):
    """One way to take a step.

    Args:
        name: Passed to the optimizer.
        codec: Form of the numbers on the wire, of `zjax.comm.codecs`.
        message: `message(grads, opt_state)`, what replicas send in place of gradients;
            None for the gradients.
    """

    name: str
    codec: str
    message: Callable[[Any, Any], Any] | None = None


class Phases(NamedTuple):
    """The phases of a run.

    Args:
        by_name: Every phase that sends; steps of `intervals.LOCAL` do not.
        at: Name of the phase of a step; the first step is 1.
        freeze_step: Last step that may update second moments; 0 if all do.
    """

    by_name: Mapping[str, Phase]
    at: Callable[[int], str]
    freeze_step: int = 0


PLAIN = "train"
"""The phase of optimizers that send gradients in every step."""


def make_phases(config: Config) -> Phases | None:
    """The phases of a run; None where the compiler reduces gradients.

    Args:
        config: Read for `communication`, `optimizer`, `precision` and `num_steps`.

    Example:
        >>> from zjax.config import schema
        >>> config = schema.Config(optimizer=schema.Optimizer(name="onebit_adam"))
        >>> phases = make_phases(config)
        >>> phases.at(150), phases.at(151), phases.by_name["compressed"].codec
        ('warm_up', 'compressed', 'onebit')
    """
    codec = config.communication.codec
    if config.optimizer.name == intervals.ZERO_ONE_ADAM:
        return _zero_one_phases(config)
    if (message := _compressed_message(config.optimizer)) is not None:
        freeze_step = onebit_adam.freeze_step(config)
        phases = (
            Phase(onebit_adam.WARM_UP, _full_precision(config)),
            Phase(onebit_adam.COMPRESSED, "onebit", message),
        )
        return Phases(
            {phase.name: phase for phase in phases},
            lambda step: phases[step > freeze_step].name,
            freeze_step,
        )
    if (rounds := make_rounds(config)) is not None:
        if not config.communication.num_synchronous_steps:
            return None
        phase = Phase(SYNCHRONOUS, _uncompressed(config))
        return Phases({SYNCHRONOUS: phase}, rounds.at)
    if codec == "none":
        return None
    return Phases({PLAIN: Phase(PLAIN, codec)}, lambda step: PLAIN)


def merged_phase(config: Config) -> Phase | None:
    """The phase in which the optimizer of replicas takes outer steps itself, or None.

    Args:
        config: Read for `communication`, `optimizer`, `precision` and `num_steps`.
    """
    phases = make_phases(config)
    return phases.by_name.get(intervals.MERGED) if phases else None


def _compressed_message(settings: Optimizer) -> Callable[[Any, Any], Any] | None:
    """What replicas send after the warm-up; None for other optimizers."""
    if settings.name not in ("onebit_adam", "onebit_lamb"):
        return None
    steps = make_adam_steps(settings)
    return functools.partial(onebit_adam.next_steps, steps=steps)


def _zero_one_phases(config: Config) -> Phases:
    settings = config.optimizer
    steps = make_adam_steps(settings)
    message = functools.partial(zero_one_adam.next_steps, steps=steps)
    phases = (
        Phase(intervals.VARIANCE, _full_precision(config)),
        Phase(intervals.ONE_BIT, "onebit", message),
        Phase(intervals.MERGED, "onebit"),
    )
    schedule = intervals.make_intervals(config)
    by_name = {phase.name: phase for phase in phases}
    return Phases(by_name, schedule.at, schedule.freeze_step)


def _full_precision(config: Config) -> str:
    """The codec of gradients that are not compressed."""
    codec = config.communication.codec
    return _uncompressed(config) if codec == "none" else codec


def _uncompressed(config: Config) -> str:
    """The codec in which the compiler would reduce gradients."""
    precision = config.precision
    is_wide = "float32" in (precision.reduce_dtype, precision.compute_dtype)
    return "float32" if is_wide else "bfloat16"
