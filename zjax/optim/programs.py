"""The programs of each step of a run, by its phases and rounds."""

import collections
from collections.abc import Iterable, Iterator

from zjax.config.schema import Config
from zjax.optim.intervals import APART, Intervals
from zjax.optim.phases import Phases, make_phases
from zjax.optim.rounds import Rounds, make_rounds


def programs_at(config: Config, step: int) -> Iterator[str]:
    """Yields the names of the programs of a step, in the order in which they start.

    Args:
        config: Checked settings.
        step: Number of the step, 1 or more.

    Example:
        >>> from zjax.config import schema
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
    """How often each program starts in a run.

    Args:
        config: Checked settings.

    Example:
        >>> from zjax.config import schema
        >>> config = schema.Config(optimizer=schema.Optimizer(name="onebit_adam"))
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
    """The programs that read the batches of some steps, by their first step.

    Args:
        config: Checked settings.
        steps: Numbers of the steps, 1 or more.

    Example:
        >>> from zjax.config import schema
        >>> config = schema.Config(optimizer=schema.Optimizer(name="onebit_adam"))
        >>> batch_programs(config, range(100, 200))
        ['warm_up', 'compressed']
    """
    return _batch_programs(steps, make_phases(config))


def _batch_programs(steps: Iterable[int], phases: Phases | None) -> list[str]:
    if phases is None:
        return ["train"]
    names = dict.fromkeys(phases.at(step) for step in steps)
    return [*dict.fromkeys("train" if name in APART else name for name in names)]
