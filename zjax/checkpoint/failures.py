"""What can go wrong in a directory of checkpoints, and the way out of each."""

import pathlib
from collections.abc import Sequence

import jax

from zjax.errors import CheckpointError, Problem
from zjax.processes.together import describe_error, root_of
from zjax.remedies import OF_THE_PROCESS, find_errno, find_remedy


def not_a_directory(directory: pathlib.Path) -> CheckpointError:
    """The path is a file, or lies under one.

    Args:
        directory: The path.

    Returns:
        The error to raise.
    """
    return CheckpointError(
        Problem(
            "checkpoint.directory",
            str(directory),
            "is not a directory",
            "name a directory, or one that can be created",
        )
    )


def empty(directory: pathlib.Path) -> CheckpointError:
    """No step was ever completed there.

    Args:
        directory: The path.

    Returns:
        The error to raise.
    """
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
    """All steps there have lost files.

    Args:
        directory: The path.
        steps: Their numbers.
        missing: What the newest lacks.

    Returns:
        The error to raise.
    """
    problem = f"is not complete in {directory} ({missing}), nor is any other step"
    remedy = "bring back its files, or start in another directory"
    return CheckpointError(Problem("checkpoint.step", steps[-1], problem, remedy))


def gone(directory: pathlib.Path, step: int) -> CheckpointError:
    """The directory was there at the last save.

    Args:
        directory: The path.
        step: The step that was to be saved.

    Returns:
        The error to raise.
    """
    problem = f"could not be written: {directory} is gone"
    remedy = "mount or make the directory again, and run again"
    return CheckpointError(Problem("checkpoint.step", step, problem, remedy))


def incomplete(directory: pathlib.Path, step: int, missing: str) -> str:
    """A step that is not offered.

    Args:
        directory: The path.
        step: Its number.
        missing: What it lacks.

    Returns:
        A warning.
    """
    place = directory / str(step)
    return f"{place} is not complete and is not used: {missing}"


def unverified(directory: pathlib.Path, step: int) -> str:
    """A step of an older version is restored.

    Args:
        directory: The path.
        step: Its number.

    Returns:
        A warning.
    """
    return (
        f"{directory / str(step)} was saved without checksums: nobody can tell whether "
        "what is read from it is what was saved; the next save has them"
    )


def undeleted(directory: pathlib.Path, step: int, error: OSError) -> str:
    """A step that was not to be kept is still there.

    Args:
        directory: The path.
        step: Its number.
        error: What the file system said.

    Returns:
        A warning.
    """
    return f"{directory / str(step)} cannot be deleted ({error.strerror})"


def unknown_step(
    directory: pathlib.Path, step: int, steps: Sequence[int]
) -> CheckpointError:
    """Another step than those there was asked for.

    Args:
        directory: The path.
        step: The step asked for.
        steps: The steps that are there.

    Returns:
        The error to raise.
    """
    problem = f"is not a checkpoint in {directory}"
    remedy = f"use one of {', '.join(map(str, steps))}"
    return CheckpointError(Problem("checkpoint.step", step, problem, remedy))


def behind(directory: pathlib.Path, step: int, latest: int) -> CheckpointError:
    """A save would sort before a checkpoint that exists.

    Args:
        directory: The path.
        step: The step to be saved.
        latest: The newest step there.

    Returns:
        The error to raise.
    """
    problem = f"is not after step {latest} in {directory}"
    remedy = "resume from there, or start in another directory"
    return CheckpointError(Problem("checkpoint.step", step, problem, remedy))


def unwritten(
    directory: pathlib.Path, step: int, latest: int | None, error: Exception
) -> CheckpointError:
    """A save failed.

    Args:
        directory: The path.
        step: The step that was being saved.
        latest: The newest complete step, if there is one.
        error: What the writer said.

    Returns:
        The error to raise.
    """
    kept = "there is none before it" if latest is None else f"step {latest} is whole"
    remedy = find_remedy(error)
    if isinstance(root_of(error), jax.errors.JaxRuntimeError):
        remedy = "find the process that ended or the device that failed"
    return CheckpointError(
        Problem(
            "checkpoint.step",
            step,
            f"could not be written to {directory} ({describe_error(error)})",
            f"{remedy}, and run again: {kept}",
        )
    )


def damaged(
    directory: pathlib.Path, step: int, before: int | None, error: Exception
) -> CheckpointError:
    """The files of a step cannot be read.

    Args:
        directory: The path.
        step: The damaged step.
        before: The newest step before it, if there is one.
        error: What the reader said.

    Returns:
        The error to raise.
    """
    may_be_sound = find_errno(error) in OF_THE_PROCESS
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
