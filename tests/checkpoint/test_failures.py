"""What a save that fails asks of whoever reads it."""

import pathlib

import jax
import pytest

from zjax.checkpoint import steps
from zjax.processes.barrier import PeerError, describe_error


@pytest.mark.parametrize(
    ("cause", "remedy"),
    [
        (
            OSError("No space left on device"),
            "free disk space or repair the file system",
        ),
        (
            ValueError("PERMISSION_DENIED: Error writing [OS error 13: EACCES]"),
            "give this user access to it",
        ),
        (PeerError(1, "OSError: read-only", 30), "make the file system writable"),
        (
            jax.errors.JaxRuntimeError("UNAVAILABLE: Task 1 heartbeat timeout"),
            "find the process that ended or the device that failed",
        ),
    ],
)
def test_nobody_makes_room_for_a_process_that_was_killed(cause, remedy):
    error = ValueError("could not save")
    error.__cause__ = cause
    assert str(steps.unwritten(pathlib.Path("/run"), 4, 2, error)) == (
        f"checkpoint.step=4 could not be written to /run ({describe_error(cause)}"
        f"); {remedy}, and run again: step 2 is intact"
    )


@pytest.mark.parametrize(
    ("cause", "remedy"),
    [
        (OSError(24, "Too many open files"), "raise the limit of open files, "),
        (
            OSError(13, "Permission denied"),
            "give this user access to it, and ",
        ),
        (OSError(5, "Input/output error"), "delete /run/4 to go on from step 2"),
        (ValueError("a.bin does not match"), "delete /run/4 to go on from step 2"),
    ],
)
def test_nobody_deletes_a_step_that_this_process_cannot_open(cause, remedy):
    assert f"; {remedy}" in str(steps.damaged(pathlib.Path("/run"), 4, 2, cause))
