"""Numbers that a model reads and that change from step to step, by their names."""

from collections.abc import Callable

from zjax.schedule.lengths import make_windows
from zjax.settings import schema

ATTENTION_WINDOW = "attention_window"
"""Keys, from its own position back, that a token sees."""

StepValues = Callable[[int], dict[str, float]]
"""Function from the number of a step, 1 or more, to its values."""


def make_step_values(config: schema.Config) -> StepValues:
    """Builds the function from a step to the values that models find in their batch.

    They are pure functions of the number, so that a run that continues has those of the
    run without a stop, and they are traced: a program runs all of them.

    Example:
        >>> values = make_step_values(schema.Config(data=schema.Data(length=512)))
        >>> values(1)
        {}
    """
    if config.sequence_warmup.form != "window":
        return lambda step: {}
    windows = make_windows(config)
    return lambda step: {ATTENTION_WINDOW: float(windows.at(step))}
