"""What a parent makes of the ends of its children."""

import sys

import pytest

from zjax import processes

PROGRAM = "import os, sys; sys.exit(({0}, {1})[int(os.environ['ZJAX_PROCESS_ID'])])"


@pytest.mark.parametrize(
    ("ends", "code", "is_told"),
    [
        pytest.param((0, 0), 0, False, id="done"),
        pytest.param((143, 143), 143, False, id="stopped"),
        pytest.param((143, 130), 143, False, id="stopped-by-two-signals"),
        pytest.param((143, 3), 3, True, id="failed-as-it-stopped"),
    ],
)
def test_a_run_that_was_stopped_did_not_die(capfd, ends, code, is_told):
    """Fails if a stop that another host was told of counts as a death here."""
    command = [sys.executable, "-c", PROGRAM.format(*ends)]
    assert processes.supervise(command, 2) == code
    assert ("process=1 ended (exit code 3)" in capfd.readouterr().err) == is_told
