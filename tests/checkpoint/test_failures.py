"""What a save that fails asks of whoever reads it."""

import pathlib

import jax
import pytest

from zjax.checkpoint import failures


@pytest.mark.parametrize(
    ("cause", "remedy"),
    [
        (OSError("No space left on device"), "make room or mend the file system"),
        (
            jax.errors.JaxRuntimeError("UNAVAILABLE: Task 1 heartbeat timeout"),
            "find the process that ended or the device that failed",
        ),
    ],
)
def test_nobody_makes_room_for_a_process_that_was_killed(cause, remedy):
    error = ValueError("could not save")
    error.__cause__ = cause
    assert str(failures.unwritten(pathlib.Path("/run"), 4, 2, error)) == (
        f"checkpoint.step=4 could not be written to /run ({type(cause).__name__}: "
        f"{cause}); {remedy}, and run again: step 2 is whole"
    )
