"""A lock on the run's directory: one run at a time writes there.

The kernel holds the lock while the process lives, so the file of a killed run locks
nobody out.
"""

import contextlib
import datetime
import errno
import fcntl
import itertools
import json
import os
import pathlib
import socket
from collections.abc import Iterator

import jax
from absl import logging

from zjax.errors import CHOOSE_DIRECTORY, Problem, ProcessError, find_remedy
from zjax.files import make_directory, parse_json, read_text
from zjax.processes.barrier import barrier

LOCK_FILE = "lock.json"
# Errors of flock on file systems without locks.
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_held: dict[pathlib.Path, tuple[int, int]] = {}
"""File descriptor and nesting depth, by lock file."""
_holds = itertools.count(1)
"""Counts calls of `hold`, equally in all processes, to name barriers."""


@contextlib.contextmanager
def hold(directory: str) -> Iterator[None]:
    """Locks the run's directory during the enclosed work; process 0 does so for all.

    Nests: this process may hold the lock already. If another run holds it, all
    processes raise.
    """
    with barrier(f"zjax-hold-{next(_holds)}"):
        path = None if jax.process_index() else acquire(directory)
    try:
        yield
    finally:
        if path is not None:
            _release(path)


def acquire(directory: str) -> pathlib.Path:
    """Locks the run's directory, created if missing, until this process ends.

    Returns the path of the lock file.
    """
    path = pathlib.Path(directory).resolve() / LOCK_FILE
    # A second flock by this process, on a new descriptor, would conflict with the
    # first.
    if path in _held:
        descriptor, depth = _held[path]
        _held[path] = descriptor, depth + 1
        return path
    try:
        make_directory(path.parent)
        # Not truncated: the file still names the current holder.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise _unusable(directory, error) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        problem = f"is in use by another run ({_describe_holder(path)})"
        remedy = "wait until it ends, or use another directory"
        raise ProcessError(Problem("directory", directory, problem, remedy)) from error
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            os.close(descriptor)
            raise _unusable(directory, error) from error
        logging.warning(
            "directory=%r is on a file system without locks (%s): a second run in it "
            "would not be noticed",
            directory,
            error.strerror,
        )
    _write_holder(descriptor)
    _held[path] = descriptor, 1
    return path


def _release(path: pathlib.Path) -> None:
    """Undoes one `acquire`; the last one unlocks."""
    descriptor, depth = _held.pop(path)
    if depth > 1:
        _held[path] = descriptor, depth - 1
        return
    with contextlib.suppress(OSError):  # must not hide the error that ended the run
        os.truncate(descriptor, 0)
    os.close(descriptor)


def _unusable(directory: str, error: OSError) -> ProcessError:
    """Error for a directory that cannot be created or written."""
    problem = f"cannot be used ({error.strerror})"
    remedy = find_remedy(error, elsewhere=CHOOSE_DIRECTORY)
    return ProcessError(Problem("directory", directory, problem, remedy))


def _write_holder(descriptor: int) -> None:
    """Writes host, process id and time of the holder into the lock file."""
    since = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    holder = {"host": socket.gethostname(), "pid": os.getpid(), "since": since}
    with contextlib.suppress(OSError):  # the lock works on a full disk, too
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(holder).encode(), 0)


def _describe_holder(path: pathlib.Path) -> str:
    """Describes the holder of a lock by the lock file."""
    try:
        holder = parse_json(read_text(path))
        return f"host {holder['host']}, pid {holder['pid']}, since {holder['since']}"
    # Between flock and the write, the file is empty.
    except (OSError, ValueError, KeyError, TypeError):
        return f"which has just locked {path}"


def _forget() -> None:
    """Closes the locks in a forked child, so that a lock ends with the parent."""
    for descriptor, _ in _held.values():
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget)
