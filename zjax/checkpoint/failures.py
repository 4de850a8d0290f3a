"""Errors and warnings about checkpoint directories, in place of Orbax's messages."""

import functools
import inspect
import logging
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import jax

from zjax.errors import (
    PROCESS_REMEDIES,
    CheckpointError,
    Problem,
    find_errno,
    find_remedy,
)
from zjax.processes.barrier import describe_error, root_of


@functools.cache
def hide_orbax_errors() -> None:
    """Stops Orbax's threads and tasks from printing errors, until the process ends.

    Such errors may come at any time while training; `Store` raises the errors that
    matter. Warnings, and the output of other packages, are unaffected.
    """
    logging.getLogger("absl").addFilter(_is_not_from_orbax)
    logging.getLogger("asyncio").addFilter(_is_not_from_orbax)
    # Errors of abandoned coroutines reach this hook, not logging.
    before = sys.unraisablehook

    def show(unraisable: Any) -> None:
        if not _is_abandoned(unraisable):
            before(unraisable)

    sys.unraisablehook = show


def _is_not_from_orbax(record: logging.LogRecord) -> bool:
    """Whether a log record is not an error of Orbax."""
    text = logging.Formatter().format(record)
    if record.name == "asyncio":  # an abandoned read names no caller
        return "orbax" not in text and "tensorstore_spec" not in text
    return not (record.exc_info and "orbax" in text)


def _is_abandoned(unraisable: Any) -> bool:
    """Whether a read or write was abandoned after another read or write failed."""
    source, error = unraisable.object, unraisable.exc_value
    if inspect.iscoroutine(source):
        return "orbax" in source.cr_code.co_filename
    closed = isinstance(error, RuntimeError) and str(error) == "Event loop is closed"
    return closed and source is None


def not_a_directory(directory: pathlib.Path) -> CheckpointError:
    """Returns the error for a path that is a file or lies under a file."""
    return CheckpointError(
        Problem(
            "checkpoint.directory",
            str(directory),
            "is not a directory",
            "name a directory, or one that can be created",
        )
    )


def empty(directory: pathlib.Path) -> CheckpointError:
    """Returns the error for a directory without a complete step."""
    return CheckpointError(
        Problem(
            "checkpoint.directory",
            str(directory),
            "holds no complete checkpoint",
            "give the directory that a run saved into, or start a new run",
        )
    )


def only_incomplete(
    directory: pathlib.Path, steps: Sequence[int], missing: str
) -> CheckpointError:
    """Returns the error for incomplete steps alone; `missing` is about the newest."""
    problem = f"is not complete in {directory} ({missing}), nor is any other step"
    remedy = "restore its files, or start in another directory"
    return CheckpointError(Problem("checkpoint.step", steps[-1], problem, remedy))


def unsaved_extra(extra: object, error: Exception) -> CheckpointError:
    """Returns the error for values that a checkpoint cannot hold."""
    problem = f"cannot be written as JSON ({error})"
    remedy = "give a dict of numbers, texts, lists and dicts"
    return CheckpointError(Problem("extra", type(extra).__name__, problem, remedy))


def disappeared(directory: pathlib.Path, step: int) -> CheckpointError:
    """Returns the error for a directory that disappeared since the last save."""
    problem = f"could not be written: {directory} is gone"
    remedy = "mount or make the directory again, and run again"
    return CheckpointError(Problem("checkpoint.step", step, problem, remedy))


def incomplete(directory: pathlib.Path, step: int, missing: str) -> str:
    """Returns the warning about a step that lacks files."""
    place = directory / str(step)
    return f"{place} is not complete and is not used: {missing}"


def unverified(directory: pathlib.Path, step: int) -> str:
    """Returns the warning about a step of an older version, without checksums."""
    return (
        f"{directory / str(step)} was saved without checksums, so damage cannot be "
        "detected; the next save has them"
    )


def undeleted(directory: pathlib.Path, step: int, error: OSError) -> str:
    """Returns the warning about an old step that cannot be deleted."""
    return f"{directory / str(step)} cannot be deleted ({error.strerror})"


def unknown_step(
    directory: pathlib.Path, step: int, steps: Sequence[int]
) -> CheckpointError:
    """Returns the error for a step that is not among the existing `steps`."""
    problem = f"is not a checkpoint in {directory}"
    remedy = f"use one of {', '.join(map(str, steps))}"
    return CheckpointError(Problem("checkpoint.step", step, problem, remedy))


def deleted(
    directory: pathlib.Path, step: int, steps: Sequence[int]
) -> CheckpointError:
    """Returns the error for a step that a run deleted during a read."""
    problem = f"was deleted from {directory} while it was read"
    others = ", ".join(map(str, steps))
    remedy = f"use one of {others}, or raise checkpoint.keep_last"
    if not steps:
        remedy = "name another directory"
    return CheckpointError(Problem("checkpoint.step", step, problem, remedy))


def behind(directory: pathlib.Path, step: int, latest: int) -> CheckpointError:
    """Returns the error for a save with a step not after the newest step."""
    problem = f"is not after step {latest} in {directory}"
    remedy = "resume from there, or start in another directory"
    return CheckpointError(Problem("checkpoint.step", step, problem, remedy))


def unwritten(
    directory: pathlib.Path, step: int, latest: int | None, error: Exception
) -> CheckpointError:
    """Returns the error for a failed save; `latest` is the newest complete step."""
    before = "there is none before it" if latest is None else f"step {latest} is intact"
    remedy = find_remedy(error)
    if isinstance(root_of(error), jax.errors.JaxRuntimeError):
        # JAX's text is about a lost process or device, not about files.
        remedy = "find the process that ended or the device that failed"
    return CheckpointError(
        Problem(
            "checkpoint.step",
            step,
            f"could not be written to {directory} ({describe_error(error)})",
            f"{remedy}, and run again: {before}",
        )
    )


def damaged(
    directory: pathlib.Path, step: int, before: int | None, error: Exception
) -> CheckpointError:
    """Returns the error for unreadable files; `before` is the newest earlier step."""
    # This process may lack rights or descriptors: nothing is to be deleted then.
    may_be_sound = find_errno(error) in PROCESS_REMEDIES
    remedy = (
        f"{find_remedy(error)}, and run again"
        if may_be_sound
        else "there is no step before it: start in another directory"
        if before is None
        else f"delete {directory / str(step)} to go on from step {before}"
    )
    return CheckpointError(
        Problem(
            "checkpoint.step",
            step,
            f"cannot be read from {directory} ({describe_error(error)})",
            remedy,
        )
    )
