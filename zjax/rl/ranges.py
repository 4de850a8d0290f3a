"""Refusals of numbers that no loss can work with."""

import math

from zjax.errors import ConfigError, Problem


def check_above_zero(**values: float) -> None:
    """Refuses arguments, by name, that are not positive finite numbers."""
    wrong = {k: v for k, v in values.items() if not 0 < v < math.inf}
    _refuse(wrong, "is not a number above 0", "use a positive number")


def check_not_negative(**values: float) -> None:
    """Refuses arguments, by name, that are not 0 or positive finite numbers."""
    wrong = {k: v for k, v in values.items() if not 0 <= v < math.inf}
    _refuse(wrong, "is not a number of 0 or more", "use 0 or a positive number")


def _refuse(values, problem, remedy):
    """Raises one error with a line for each value."""
    if values:
        raise ConfigError(*(Problem(k, v, problem, remedy) for k, v in values.items()))
