"""Phases and rounds of a run: what replicas exchange in a step, and programs."""

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from zjax.optim import onebit, zero_one_adam
from zjax.optim.onebit import make_adam_steps
from zjax.optim.zero_one_adam import (
    APART,
    LOCAL,
    Intervals,
    make_intervals,
)
from zjax.settings.schema import Compressed, Config, Precision, ZeroOneAdam

SYNCHRONOUS = "synchronous"
"""The phase of steps in which replicas exchange gradients, before local steps."""


@dataclasses.dataclass(frozen=True)
class Rounds:
    """The schedule of exchanges of a run with local steps.

    Args:
        num_local_steps: Steps of a round, 1 or more.
        num_fragments: Number of fragments of the parameters, 1 to `num_local_steps`.
        delay: Steps from sending to merging, fewer than between two merges.
        num_synchronous_steps: Steps before the first round.

    Example:
        >>> rounds = Rounds(num_local_steps=4, num_fragments=2, delay=1)
        >>> [rounds.sent_after(step) for step in range(1, 9)]
        [0, None, 1, None, 0, None, 1, None]
        >>> [rounds.merged_after(step) for step in range(1, 9)]
        [None, 0, None, 1, None, 0, None, 1]

    Reference:
        Streaming DiLoCo, arXiv:2501.18512, sections 2.1 and 2.2.
    """

    num_local_steps: int
    num_fragments: int = 1
    delay: int = 0
    num_synchronous_steps: int = 0

    def at(self, step: int) -> str:
        """Returns the phase of a step, 1 or more."""
        return LOCAL if self._local(step) > 0 else SYNCHRONOUS

    def merged_after(self, step: int) -> int | None:
        """Returns the fragment to merge after a step, 1 or more; None for no merge."""
        length, number = self.num_local_steps, self.num_fragments
        # The last fragment ends at `length`, which is 0 modulo the round.
        ends = ((i + 1) * length // number % length for i in range(number))
        local = self._local(step)
        if local <= 0:
            return None
        return next((i for i, end in enumerate(ends) if local % length == end), None)

    def sent_after(self, step: int) -> int | None:
        """Returns the fragment to send after a step, 1 or more; None for no send."""
        return self.merged_after(step + self.delay)

    def ends_after(self, step: int) -> bool:
        """Whether a step is the last one of a round."""
        local = self._local(step)
        return local > 0 and local % self.num_local_steps == 0

    def forgets_errors_after(self, step: int) -> bool:
        """Whether the error feedback is reset after a step; never here."""
        return False

    def _local(self, step: int) -> int:
        return step - self.num_synchronous_steps


def shares_metrics(step: int, rounds: Rounds | Intervals | None) -> bool:
    """Whether every replica holds the metrics of all replicas after a step.

    Example:
        >>> rounds = Rounds(num_local_steps=30)
        >>> shares_metrics(29, None), shares_metrics(29, rounds)
        (True, False)
        >>> shares_metrics(30, rounds)
        True
    """
    if rounds is None or rounds.at(step) not in APART:
        return True
    return rounds.ends_after(step)


def make_rounds(config: Config) -> Rounds | Intervals | None:
    """Returns the schedule of exchanges; None if replicas never step apart.

    Args:
        config: Config; reads `communication`, `optimizer` and `num_steps`.

    Example:
        >>> from zjax.settings import schema
        >>> rounds = schema.LocalSteps(num_steps=30)
        >>> settings = schema.Communication(local_steps=rounds)
        >>> make_rounds(Config(communication=settings)).merged_after(60)
        0
    """
    if isinstance(rule := config.optimizer.rule, ZeroOneAdam):
        return make_intervals(rule, config.num_steps)
    if (settings := config.communication.local_steps) is None:
        return None
    return Rounds(
        settings.num_steps,
        settings.num_fragments,
        settings.delay,
        settings.num_synchronous_steps,
    )


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
        return _zero_one_phases(
            rule, _full_precision(codec, config.precision), config.num_steps
        )
    if isinstance(rule, Compressed):
        message = functools.partial(onebit.next_steps, steps=make_adam_steps(rule))
        freeze_step = onebit.freeze_step(rule, config.num_steps)
        phases = (
            Phase(onebit.WARM_UP, _full_precision(codec, config.precision)),
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
        if not config.communication.rounds.num_synchronous_steps:
            return None
        phase = Phase(SYNCHRONOUS, _uncompressed(config.precision))
        return Phases({SYNCHRONOUS: phase}, rounds.at)
    if codec == "none":
        return None
    return Phases({PLAIN: Phase(PLAIN, codec)}, lambda step: PLAIN)


def merged_phase(phases: Phases | None) -> Phase | None:
    """Returns the phase in which the inner optimizer takes outer steps, or None."""
    return phases.by_name.get(zero_one_adam.MERGED) if phases else None


def _zero_one_phases(rule: ZeroOneAdam, full_precision: str, num_steps: int) -> Phases:
    """Returns the phases of 0/1 Adam, with the codec of uncompressed gradients."""
    steps = make_adam_steps(rule)
    message = functools.partial(zero_one_adam.next_steps, steps=steps)
    phases = (
        Phase(zero_one_adam.VARIANCE, full_precision),
        Phase(zero_one_adam.ONE_BIT, "onebit", message),
        Phase(zero_one_adam.MERGED, "onebit"),
    )
    schedule = zero_one_adam.make_intervals(rule, num_steps)
    by_name = {phase.name: phase for phase in phases}
    return Phases(by_name, schedule.at, schedule.freeze_step)


def _full_precision(codec: str, precision: Precision) -> str:
    """Returns the codec of gradients before compression starts."""
    return _uncompressed(precision) if codec == "none" else codec


def _uncompressed(precision: Precision) -> str:
    """Returns the codec in whose dtype the compiler would reduce gradients."""
    is_wide = "float32" in (precision.reduce_dtype, precision.compute_dtype)
    return "float32" if is_wide else "bfloat16"


def programs_at(
    step: int, phases: Phases | None, rounds: Rounds | Intervals | None
) -> Iterator[str]:
    """Yields the names of the programs of a step, in starting order.

    Example:
        >>> rounds = Rounds(num_local_steps=10, delay=1)
        >>> for step in (8, 9, 10):
        ...     print(step, *programs_at(step, None, rounds))
        8 train
        9 train outer_gradients_0 mean_0
        10 train merge_0 end_of_round
    """
    yield from batch_programs([step], phases)
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


def count_programs(
    num_steps: int, phases: Phases | None, rounds: Rounds | Intervals | None
) -> collections.Counter[str]:
    """Counts how often each program starts in a run.

    Example:
        >>> dict(count_programs(20, None, Rounds(num_local_steps=10)))
        {'train': 20, 'outer_gradients_0': 2, 'mean_0': 2, 'merge_0': 2, \
'end_of_round': 2}
    """
    return collections.Counter(
        program
        for step in range(1, num_steps + 1)
        for program in programs_at(step, phases, rounds)
    )


def batch_programs(steps: Iterable[int], phases: Phases | None) -> list[str]:
    """Lists the programs that read the batches of some steps, in order of first use.

    Example:
        >>> phases = Phases({}, lambda step: "early" if step < 150 else "late")
        >>> batch_programs(range(100, 200), phases)
        ['early', 'late']
    """
    if phases is None:
        return ["train"]
    names = dict.fromkeys(phases.at(step) for step in steps)
    # LOCAL and MERGED steps run one program; they differ in the exchange afterwards.
    return [*dict.fromkeys("train" if name in APART else name for name in names)]
