"""Errors that name the setting at fault and the remedy."""

import dataclasses

_MAX_SHOWN = 1_000
"""Maximum number of characters of a value in a message."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """One problem, in the form of every zjax error.

    Args:
        field: Setting, array path or file at fault, as the user would type it.
        value: Its value.
        problem: Why it cannot work, naming the other number involved.
        remedy: What would work.

    Example:
        >>> print(Problem("mesh.tensor", 3, "does not divide 16", "use 1, 2 or 4"))
        mesh.tensor=3 does not divide 16; use 1, 2 or 4
    """

    field: str
    value: object
    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.field}={self._shown()} {self.problem}; {self.remedy}"

    def _shown(self) -> str:
        try:
            text = repr(self.value)
        except (RecursionError, ValueError):  # nested too deep, or too many digits
            return f"<{type(self.value).__name__}>"
        half = _MAX_SHOWN // 2
        return text if len(text) <= _MAX_SHOWN else f"{text[:half]}...{text[-half:]}"


class ZjaxError(ValueError):
    """Base of all errors of zjax; carries one or more problems, one line each.

    Example:
        >>> str(ZjaxError(Problem("seed", -1, "is negative", "use 0 or more")))
        'seed=-1 is negative; use 0 or more'
    """

    def __init__(self, *problems: Problem):
        self.problems = problems
        super().__init__("\n".join(map(str, problems)))

    def __reduce__(self):  # as an error of another process
        return type(self), self.problems


class ConfigError(ZjaxError):
    """Settings that cannot work, alone or together."""


class PlanError(ZjaxError):
    """An array or optimizer that cannot be placed on the mesh."""


class ModelError(ZjaxError):
    """A model or loss that breaks its contract."""


class StateError(ZjaxError):
    """A state that a step has consumed."""


class DataError(ZjaxError):
    """Training data that is missing or malformed."""


class CheckpointError(ZjaxError):
    """A checkpoint that cannot be written, found or read."""


class StorageError(ZjaxError):
    """A disk that cannot hold the state of a run, or that returns other data."""


class OutputError(ZjaxError):
    """A file of a run that cannot be written."""


class BenchError(ZjaxError):
    """A measurement or comparison whose numbers would mean nothing."""


class NonFiniteError(ZjaxError):
    """A loss or gradient that is NaN or infinite, if the policy is to stop."""


class PackageError(ZjaxError):
    """A required package that is not installed."""


class ProcessError(ZjaxError):
    """Processes or devices that cannot start together, or a process that died."""
