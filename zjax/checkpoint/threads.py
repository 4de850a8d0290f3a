"""Daemon threads: a file system that hangs cannot keep the process alive."""

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any


class Task:
    """A call in a new daemon thread.

    Args:
        name: Name of the thread.
        call: The function.

    Example:
        >>> Task("sum", lambda: 1 + 1).result()
        2
    """

    def __init__(self, name: str, call: Callable[[], Any]):
        self._call: Callable[[], Any] | None = call
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def done(self) -> bool:
        """Whether the thread has ended."""
        return not self._thread.is_alive()

    def has_failed(self) -> bool:
        """Whether the thread has ended with an error."""
        return self._error is not None

    def result(self) -> Any:
        """Waits for the thread; returns the function's result or raises its error."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._result

    def _run(self) -> None:
        call, self._call = self._call, None
        assert call is not None
        try:
            self._result = call()
        except BaseException as error:
            self._error = error


def map_in_threads(
    act: Callable[[Any], Any], items: Sequence[Any], num_threads: int
) -> list[Any]:
    """Calls a function with each item, several at a time.

    Args:
        act: The function.
        items: Its arguments.
        num_threads: Calls at a time, 1 or more.

    Returns:
        Results in the order of `items`; the first error is raised.

    Example:
        >>> map_in_threads(lambda x: x * x, [1, 2, 3], 2)
        [1, 4, 9]
    """
    results: list[Any] = [None] * len(items)
    numbers = itertools.count()  # its steps are atomic

    def work() -> None:
        while (number := next(numbers)) < len(items):
            results[number] = act(items[number])

    workers = [
        Task(f"checkpoint-{number}", work)
        for number in range(min(num_threads, len(items)))
    ]
    for worker in workers:
        worker.result()
    return results
