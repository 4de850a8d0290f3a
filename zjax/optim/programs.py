"""The programs of each step of a run, by its phases and rounds."""

from collections.abc import Iterable, Iterator

from zjax.config.schema import Config
from zjax.optim.intervals import APART
from zjax.optim.phases import make_phases
from zjax.optim.rounds import make_rounds


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
    rounds = make_rounds(config)
    yield from batch_programs(config, [step])
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
    phases = make_phases(config)
    if phases is None:
        return ["train"]
    names = dict.fromkeys(phases.at(step) for step in steps)
    return [*dict.fromkeys("train" if name in APART else name for name in names)]
