"""Directories for the arrays of one process: its own, and gone when it is."""

import contextlib
import fcntl
import functools
import itertools
import os
import pathlib
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from typing import IO

from zjax.errors import Problem, StorageError

_PREFIX = "zjax-"
_LOCK = "lock"
_SPACE = 1.2
"""Of the bytes of a state: arrays are replaced one after another."""


class Scratch:
    """A directory on each of some disks; arrays go to them in turn.

    What a process left that was killed is removed by the next that comes.

    Args:
        paths: Directories that exist, one per disk.

    Raises:
        StorageError: Names every path in which nothing can be written.
    """

    def __init__(self, paths: tuple[str, ...]):
        _check_paths(paths)
        for path in paths:
            _remove_abandoned(pathlib.Path(path))
        self.places, locks = zip(*map(_make_place, paths), strict=True)
        self._names = itertools.count()
        weakref.finalize(self, _close, self.places, locks, os.getpid())

    def new_path(self) -> str:
        """Where one more array may go."""
        number = next(self._names)
        return f"{self.places[number % len(self.places)]}/{number}"


@functools.cache
def open_scratch(paths: tuple[str, ...]) -> Scratch:
    """The scratch directories of this process.

    Args:
        paths: Directories that exist, one per disk.

    Returns:
        The same object for the same paths.

    Raises:
        StorageError: Names every path in which nothing can be written.
    """
    return Scratch(paths)


def free_bytes(paths: tuple[str, ...]) -> int:
    """What arrays in turn over some directories may take, as the fullest disk allows.

    Args:
        paths: Directories that exist.

    Returns:
        Bytes.
    """
    disks = [os.stat(path).st_dev for path in paths]
    shares = [
        shutil.disk_usage(path).free / disks.count(disk)
        for path, disk in zip(paths, disks, strict=True)
    ]
    return int(len(paths) * min(shares))


def check_disks(paths: tuple[str, ...], needed_bytes: int) -> None:
    """Refuses disks on which a state does not fit.

    Args:
        paths: Directories that exist, one per disk.
        needed_bytes: Of the arrays of this process.

    Raises:
        StorageError: Names paths that cannot be used, or both numbers.
    """
    open_scratch(paths)  # removes what killed runs have left
    needed, free = needed_bytes * _SPACE, free_bytes(paths)
    if needed > free:
        raise StorageError(
            Problem(
                "zero.nvme_paths",
                paths,
                f"have {free / 1e9:.1f} GB free for {needed / 1e9:.1f} GB, as files "
                "that are replaced stay until the new ones are there",
                "make room, name more disks, or use more hosts",
            )
        )


def _check_paths(paths: tuple[str, ...]) -> None:
    remedy = "name directories on the disks of this host, in which files can be written"
    problems = [
        Problem("zero.nvme_paths", path, "is not a directory to write to", remedy)
        for path in paths
        if not (os.path.isdir(path) and os.access(path, os.W_OK | os.X_OK))
    ]
    if problems:
        raise StorageError(*problems)


def _make_place(path: str) -> tuple[str, IO[str]]:
    """A directory that has its name only once it is locked."""
    new = pathlib.Path(
        tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=os.path.abspath(path))
    )
    lock = (new / _LOCK).open("w")
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    place = new.rename(new.with_name(new.name.removeprefix(".")))
    return str(place), lock


def _remove_abandoned(path: pathlib.Path) -> None:
    for place in path.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), (place / _LOCK).open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(place)


def _remove(place: pathlib.Path) -> None:
    """The lock goes last: what is left of a removal that was killed is found by it."""
    for entry in place.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        elif entry.name != _LOCK:
            entry.unlink(missing_ok=True)
    shutil.rmtree(place, ignore_errors=True)


def _close(places: Sequence[str], locks: Sequence[IO[str]], process: int) -> None:
    if process != os.getpid():
        return
    for place, lock in zip(places, locks, strict=True):
        _remove(pathlib.Path(place))
        lock.close()
