"""Phases of a run: what replicas exchange in a step, and the program of the step."""

import collections
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from zjax.optim import onebit, zero_one_adam
from zjax.optim.onebit import make_adam_steps
from zjax.optim.rounds import SYNCHRONOUS, Rounds, make_rounds
from zjax.optim.zero_one_adam import APART, Intervals
from zjax.settings.schema import Compressed, Config, ZeroOneAdam


class Phase(NamedTuple):
    """One way to take a step.

    Args:
        name: Name of the phase, passed to the optimizer.
        codec: Name of the wire format, of `zjax.comm.codecs`.
        message: `message(grads, opt_state)`, the tree that replicas send in place of
            gradients; None for the gradients.
    """

    name: str
    codec: str
    message: Callable[[Any, Any], Any] | None = None


class Phases(NamedTuple):
    """The phases of a run.

    Args:
        by_name: Every phase that sends; steps of `zero_one_adam.LOCAL` send nothing.
        at: Name of the phase by step; the first step is 1.
        freeze_step: Last step that may update second moments; 0 if all steps may.
    """

    by_name: Mapping[str, Phase]
    at: Callable[[int], str]
    freeze_step: int = 0


PLAIN = "train"
"""The phase of optimizers that send gradients in every step."""


def make_phases(config: Config) -> Phases | None:
    """Returns the phases of a run, or None if the compiler reduces gradients.

    Args:
        config: Config; reads `communication`, `optimizer`, `precision` and `num_steps`.

    Example:
        >>> from zjax.settings import schema
        >>> config = schema.Config(optimizer=schema.Optimizer(rule=schema.OnebitAdam()))
        >>> phases = make_phases(config)
        >>> phases.at(150), phases.at(151), phases.by_name["compressed"].codec
        ('warm_up', 'compressed', 'onebit')
    """
    codec, rule = config.communication.codec, config.optimizer.rule
    if isinstance(rule, ZeroOneAdam):
        return _zero_one_phases(rule, config)
    if isinstance(rule, Compressed):
        message = functools.partial(onebit.next_steps, steps=make_adam_steps(rule))
        freeze_step = onebit.freeze_step(rule, config.num_steps)
        phases = (
            Phase(onebit.WARM_UP, _full_precision(config)),
            Phase(onebit.COMPRESSED, "onebit", message),
        )
        return Phases(
            {phase.name: phase for phase in phases},
            # False selects WARM_UP, True selects COMPRESSED.
            lambda step: phases[step > freeze_step].name,
            freeze_step,
        )
    if (rounds := make_rounds(config)) is not None:
        # Without synchronous steps every step is local, and sends nothing itself.
        if not config.communication.num_synchronous_steps:
            return None
        phase = Phase(SYNCHRONOUS, _uncompressed(config))
        return Phases({SYNCHRONOUS: phase}, rounds.at)
    if codec == "none":
        return None
    return Phases({PLAIN: Phase(PLAIN, codec)}, lambda step: PLAIN)


def merged_phase(config: Config) -> Phase | None:
    """Returns the phase in which the inner optimizer takes outer steps, or None."""
    phases = make_phases(config)
    return phases.by_name.get(zero_one_adam.MERGED) if phases else None


def _zero_one_phases(rule: ZeroOneAdam, config: Config) -> Phases:
    """Returns the phases of 0/1 Adam."""
    steps = make_adam_steps(rule)
    message = functools.partial(zero_one_adam.next_steps, steps=steps)
    phases = (
        Phase(zero_one_adam.VARIANCE, _full_precision(config)),
        Phase(zero_one_adam.ONE_BIT, "onebit", message),
        Phase(zero_one_adam.MERGED, "onebit"),
    )
    schedule = zero_one_adam.make_intervals(rule, config.num_steps)
    by_name = {phase.name: phase for phase in phases}
    return Phases(by_name, schedule.at, schedule.freeze_step)


def _full_precision(config: Config) -> str:
    """Returns the codec of gradients before compression starts."""
    codec = config.communication.codec
    return _uncompressed(config) if codec == "none" else codec


def _uncompressed(config: Config) -> str:
    """Returns the codec in whose dtype the compiler would reduce gradients."""
    precision = config.precision
    is_wide = "float32" in (precision.reduce_dtype, precision.compute_dtype)
    return "float32" if is_wide else "bfloat16"


def programs_at(config: Config, step: int) -> Iterator[str]:
    """Yields the names of the programs of a step, in starting order.

    Example:
        >>> from zjax.settings import schema
        >>> settings = schema.Communication(num_local_steps=10, delay=1)
        >>> config = schema.Config(communication=settings)
        >>> for step in (8, 9, 10):
        ...     print(step, *programs_at(config, step))
        8 train
        9 train outer_gradients_0 mean_0
        10 train merge_0 end_of_round
    """
    yield from _programs_at(step, make_phases(config), make_rounds(config))


def count_programs(config: Config) -> collections.Counter[str]:
    """Counts how often each program starts in a run.

    Example:
        >>> from zjax.settings import schema
        >>> config = schema.Config(optimizer=schema.Optimizer(rule=schema.OnebitAdam()))
        >>> dict(count_programs(config))
        {'warm_up': 150, 'compressed': 850}
    """
    phases, rounds = make_phases(config), make_rounds(config)
    return collections.Counter(
        program
        for step in range(1, config.num_steps + 1)
        for program in _programs_at(step, phases, rounds)
    )


def _programs_at(
    step: int, phases: Phases | None, rounds: Rounds | Intervals | None
) -> Iterator[str]:
    """Yields the names of the programs of a step in starting order."""
    yield from _batch_programs([step], phases)
    if rounds is None:
        return
    if (fragment := rounds.sent_after(step)) is not None:
        yield f"outer_gradients_{fragment}"
        yield f"mean_{fragment}"
    if (fragment := rounds.merged_after(step)) is not None:
        yield f"merge_{fragment}"
    if rounds.ends_after(step):
        yield "end_of_round"
    if rounds.forgets_errors_after(step):
        yield "without_errors"


def batch_programs(config: Config, steps: Iterable[int]) -> list[str]:
    """Lists the programs that read the batches of some steps, in order of first use.

    Example:
        >>> from zjax.settings import schema
        >>> config = schema.Config(optimizer=schema.Optimizer(rule=schema.OnebitAdam()))
        >>> batch_programs(config, range(100, 200))
        ['warm_up', 'compressed']
    """
    return _batch_programs(steps, make_phases(config))


def _batch_programs(steps: Iterable[int], phases: Phases | None) -> list[str]:
    """Lists the distinct programs that read the batches of some steps."""
    if phases is None:
        return ["train"]
    names = dict.fromkeys(phases.at(step) for step in steps)
    # LOCAL and MERGED steps run one program; they differ in the exchange afterwards.
    return [*dict.fromkeys("train" if name in APART else name for name in names)]
