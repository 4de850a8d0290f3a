"""What Orbax prints of a failure is told once, by the error that `Store` raises."""

import functools
import inspect
import logging
import sys
from typing import Any


@functools.cache
def silence_failures() -> None:
    """Keeps Orbax's threads and tasks from printing errors that `Store` raises.

    They fail at any moment of training, so this holds until the process ends. Warnings,
    and what other packages print, are shown as before.
    """
    logging.getLogger("absl").addFilter(_is_not_of_orbax)
    logging.getLogger("asyncio").addFilter(_is_not_of_orbax)
    before = sys.unraisablehook

    def show(unraisable: Any) -> None:
        if not _is_of_abandoned_work(unraisable):
            before(unraisable)

    sys.unraisablehook = show


def _is_not_of_orbax(record: logging.LogRecord) -> bool:
    text = logging.Formatter().format(record)
    if record.name == "asyncio":  # a read that nobody waits for names no caller
        return "orbax" not in text and "tensorstore_spec" not in text
    return not (record.exc_info and "orbax" in text)


def _is_of_abandoned_work(unraisable: Any) -> bool:
    """Where one of many reads or writes fails, nobody waits for the others."""
    source, error = unraisable.object, unraisable.exc_value
    if inspect.iscoroutine(source):
        return "orbax" in source.cr_code.co_filename
    closed = isinstance(error, RuntimeError) and str(error) == "Event loop is closed"
    return closed and source is None
