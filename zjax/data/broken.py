"""Records that cannot be used: refused, or left out and counted."""

from collections.abc import Callable
from typing import Any

from absl import logging

from zjax.errors import DataError


class BrokenRecords:
    """Counts the records that are left out.

    Args:
        skips: Whether broken records are left out; else the first ends the reading.

    Example:
        >>> broken = BrokenRecords(skips=False)
        >>> broken.read(int, "3")
        3
    """

    def __init__(self, skips: bool):
        self._skips = skips
        self._num_broken, self._first = 0, ""

    def read(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls a function on a record; gives None if the record is left out.

        Raises:
            DataError: The record is broken, and is not left out.
        """
        try:
            return function(*args)
        except DataError as error:
            if not self._skips:
                raise
            self._num_broken += 1
            self._first = self._first or str(error)
            return None

    def log(self) -> None:
        """Logs how many records were left out, and why the first was."""
        if self._num_broken:
            logging.warning(
                "broken records that were left out: %s; the first: %s",
                f"{self._num_broken:,}",
                self._first,
            )


REFUSED = BrokenRecords(skips=False)
"""For readers that leave out none."""
