"""Programs that a test starts and always ends, and waits that measure no time."""

import contextlib
import os
import pathlib
import signal
import subprocess
import time

HANG_SECONDS = 1_000
"""A program that takes longer hangs: a loaded machine is never so slow."""


@contextlib.contextmanager
def started(command, **how):
    """Yields a program in a session of its own; no process of it outlives the test."""
    how = {"text": True, "start_new_session": True} | how
    with subprocess.Popen(list(map(str, command)), **how) as program:
        try:
            yield program
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)


def wait_until(condition, program=None):
    """Waits for a condition that comes in any case, or whose program has to live."""
    end = time.monotonic() + HANG_SECONDS
    while not condition():
        if program is not None and program.poll() is not None:
            raise AssertionError(f"the program ended: {program.communicate()}")
        if time.monotonic() > end:
            raise AssertionError("it hangs")
        time.sleep(0.01)


def finish(program):
    """Returns what a program prints until its end."""
    return program.communicate(timeout=HANG_SECONDS)


def is_alive(pid):
    """Whether a process runs; one that nobody waited for does not."""
    try:
        text = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return text.rpartition(")")[2].split()[0] != "Z"
