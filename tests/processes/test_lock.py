"""A directory belongs to one run at a time, for as long as that run lives."""

import fcntl
import json
import os
import re
import socket
import subprocess
import sys
import warnings

import pytest

from tests.support import small_run
from tests.support.refusals import process_error
from zjax.errors import Problem, ProcessError
from zjax.processes import member_files

OTHER = """
import fcntl, sys
held = open(sys.argv[1], "r+")
fcntl.flock(held, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_directory_that_another_run_holds_is_refused_with_its_holder(tmp_path):
    with member_files.hold(str(tmp_path)):
        path = tmp_path / member_files.LOCK_FILE
        assert json.loads(path.read_text())["pid"] == os.getpid()
        written = path.read_bytes()
    path.write_bytes(written)  # as the other one leaves it
    with path.open("r+") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ProcessError) as error:
            member_files.acquire(str(tmp_path))
    who = f"host {socket.gethostname()}, pid {os.getpid()}"
    when = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC"
    assert re.fullmatch(
        rf"directory='{tmp_path}' is in use by another run \({who}, since {when}\); "
        "wait until it ends, or use another directory",
        str(error.value),
    )


def test_what_a_killed_run_left_locks_nobody_out(tmp_path):
    """Fails if the file counts, and not whether its writer lives."""
    path = tmp_path / member_files.LOCK_FILE
    path.write_text('{"host": "a", "pid": 1, "since": "then"}')
    with subprocess.Popen(
        [sys.executable, "-c", OTHER, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        assert other.stdout and other.stdout.readline() == b"held\n"
        with pytest.raises(ProcessError, match="host a, pid 1, since then"):
            member_files.acquire(str(tmp_path))
        other.kill()
        other.wait()
        with member_files.hold(str(tmp_path)):
            assert json.loads(path.read_text())["pid"] == os.getpid()


def test_a_run_may_hold_its_directory_twice(tmp_path):
    with member_files.hold(str(tmp_path)):
        with member_files.hold(str(tmp_path / "." / ".." / tmp_path.name)):
            pass
        assert is_locked(tmp_path)
    assert not is_locked(tmp_path)


def test_a_forked_child_does_not_keep_the_lock(tmp_path):
    """Fails if a loader's process that outlives its run locks the directory."""
    mine, other = socket.socketpair()
    with member_files.hold(str(tmp_path)), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads: this child only waits
        child = os.fork()
        if child == 0:
            other.send(b".")
            other.recv(1)
            os._exit(0)
        mine.recv(1)
        assert is_locked(tmp_path)
    try:
        assert not is_locked(tmp_path)
    finally:
        mine.send(b".")
        os.waitpid(child, 0)
        mine.close()
        other.close()


def test_training_in_a_directory_in_use_is_refused_and_writes_nothing(tmp_path):
    trainer = small_run.make_trainer(tmp_path)
    path = tmp_path / member_files.LOCK_FILE
    path.write_text('{"host": "a", "pid": 1, "since": "then"}')
    with path.open("r+") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ProcessError, match="host a, pid 1, since then"):
            trainer.fit()
    assert [entry.name for entry in tmp_path.iterdir()] == [member_files.LOCK_FILE]
    trainer.close()


def is_locked(directory):
    with (directory / member_files.LOCK_FILE).open("r+") as probe:
        try:
            fcntl.flock(probe, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_a_disk_that_fails_does_not_hide_why_the_run_ended(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(30, "Read-only file system")

    with pytest.raises(ProcessError, match="mend the disk"):
        with member_files.hold(str(tmp_path)):
            monkeypatch.setattr(os, "truncate", refuse)
            raise ProcessError(Problem("directory", "x", "failed", "mend the disk"))
    monkeypatch.undo()
    with member_files.hold(str(tmp_path)):
        pass


def test_a_full_disk_holds_no_run_back_and_no_lock_for_ever(tmp_path, monkeypatch):
    """Fails if the note of who holds it counts more than the lock."""

    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", refuse)
    with member_files.hold(str(tmp_path)):
        assert is_locked(tmp_path)
    assert not is_locked(tmp_path)


def test_a_directory_that_cannot_be_made_is_named(tmp_path):
    """Fails if the other processes wait for the first, which ends with a traceback."""
    (tmp_path / "file").write_text("")
    with process_error(
        f"directory='{tmp_path}/file/run' cannot be used (Not a directory); name a "
        "writable directory"
    ):
        member_files.acquire(f"{tmp_path}/file/run")
