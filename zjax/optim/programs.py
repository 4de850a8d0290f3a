"""The programs of each step of a run, by its phases and rounds."""

from collections.abc import Iterator

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
    phases, rounds = make_phases(config), make_rounds(config)
    phase = phases.at(step) if phases else "train"
    yield "train" if phase in APART else phase
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
