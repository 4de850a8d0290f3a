"""Values that a model reads from its batch and that change from step to step."""

from collections.abc import Callable

from zjax.schedule.lengths import make_windows
from zjax.settings import schema

ATTENTION_WINDOW = "attention_window"
"""Name of the number of keys, up to the token's position, that a token sees."""

StepValues = Callable[[int], dict[str, float]]
"""Function from a step, 1 or more, to the values of the step by name."""


def make_step_values(config: schema.Config) -> StepValues:
    """Builds the function from a step to the values that models find in a batch.

    Values depend on the step alone, so that a resumed run equals an unbroken one, and
    are traced: one program runs all steps.

    Example:
        >>> values = make_step_values(schema.Config(data=schema.Data(length=512)))
        >>> values(1)
        {}
    """
    if config.sequence_warmup.form != "window":
        return lambda step: {}
    windows = make_windows(config)
    return lambda step: {ATTENTION_WINDOW: float(windows.at(step))}
