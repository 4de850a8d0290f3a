"""Hides errors that Orbax prints and `Store` raises as well."""

import functools
import inspect
import logging
import sys
from typing import Any


@functools.cache
def hide_orbax_errors() -> None:
    """Stops Orbax's threads and tasks from printing errors, until the process ends.

    They may fail at any time while training. Warnings, and the output of other
    packages, are unaffected.
    """
    logging.getLogger("absl").addFilter(_is_not_from_orbax)
    logging.getLogger("asyncio").addFilter(_is_not_from_orbax)
    before = sys.unraisablehook

    def show(unraisable: Any) -> None:
        if not _is_abandoned(unraisable):
            before(unraisable)

    sys.unraisablehook = show


def _is_not_from_orbax(record: logging.LogRecord) -> bool:
    text = logging.Formatter().format(record)
    if record.name == "asyncio":  # an abandoned read names no caller
        return "orbax" not in text and "tensorstore_spec" not in text
    return not (record.exc_info and "orbax" in text)


def _is_abandoned(unraisable: Any) -> bool:
    """Whether a read or write was abandoned because another one failed."""
    source, error = unraisable.object, unraisable.exc_value
    if inspect.iscoroutine(source):
        return "orbax" in source.cr_code.co_filename
    closed = isinstance(error, RuntimeError) and str(error) == "Event loop is closed"
    return closed and source is None
