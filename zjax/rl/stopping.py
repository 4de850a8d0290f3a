"""The end of a rollout by a signal: texts in flight are dropped, and drawn again."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")
Stopped = Callable[[], bool]
"""Function that tells whether a signal asks the run to end."""


class RolloutStopped(Exception):
    """A signal ended a rollout, of which nothing has been learned."""


def never() -> bool:
    """Returns False: nothing asks the run to end."""
    return False


def check(stopped: Stopped) -> None:
    """Raises RolloutStopped once a signal asks the run to end."""
    if stopped():
        raise RolloutStopped


def until(stopped: Stopped, values: Iterable[T]) -> Iterator[T]:
    """Yields values, and raises RolloutStopped once a signal asks the run to end.

    Example:
        >>> list(until(lambda: False, [1, 2]))
        [1, 2]
    """
    for value in values:
        check(stopped)
        yield value
