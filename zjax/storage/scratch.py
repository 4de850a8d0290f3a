"""Scratch directories for the arrays of one process, removed when the process ends."""

import collections
import contextlib
import fcntl
import functools
import itertools
import mmap
import os
import pathlib
import queue
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Hashable, Iterator, Sequence
from typing import IO

import numpy as np

from zjax.errors import Problem, StorageError, find_remedy
from zjax.sharding.describe import format_bytes
from zjax.storage.files import write_file

_PREFIX = "zjax-"
_LOCK = "lock"
_MOUNTS = pathlib.Path("/proc/self/mountinfo")
_IN_MEMORY = ("tmpfs", "ramfs")
MIN_BYTES_PER_SECOND = 50 * 10**6
"""Least write rate of a disk: on a slower disk a step takes hours."""
_TRIAL_BYTES, _TRIED_FROM = 64 << 20, 10**9
"""Bytes of the trial write, and bytes of a state from which disks are tried."""


class Scratch:
    """A directory on each of some disks, over which arrays are spread.

    The next array of equal kind reuses the files of a deleted array: overwriting is
    faster than removing files and creating new files. The next process removes the
    files of a process that was killed.

    Raises:
        StorageError: Names every path in which nothing can be written.
    """

    def __init__(self, paths: tuple[str, ...]):
        _check_paths(paths)
        for path in paths:
            _remove_abandoned(pathlib.Path(path))
        self.places, locks = zip(*map(_make_place, paths), strict=True)
        self._names = itertools.count()
        self._directories: dict[str, tuple[Hashable, int]] = {}
        self._held = dict.fromkeys(self.places, 0)
        self._free: dict[Hashable, list[str]] = collections.defaultdict(list)
        self._lock = threading.Lock()
        self._to_remove: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._remove_all, daemon=True).start()
        # The process id, as a forked child inherits the finalizer but not the
        # directories.
        weakref.finalize(self, _close, self.places, locks, os.getpid())

    def take(self, kind: Hashable, num_bytes: int) -> str:
        """Returns a directory for one more array of `num_bytes` on disk.

        Arrays with equal names and sizes of files have an equal `kind`: a deleted array
        of equal kind leaves a directory with files; else the directory is new, on the
        disk that holds least.
        """
        with self._lock:
            if self._free[kind]:
                return self._free[kind].pop()
            place = min(self.places, key=self._held.__getitem__)
            path = f"{place}/{next(self._names)}"
            self._directories[path] = kind, num_bytes
            self._held[place] += num_bytes
            return path

    def give_back(self, path: str) -> None:
        """Leaves a deleted array's files to the next array of the kind.

        `path` is of `take`; arrays that are collected as garbage are removed instead.
        """
        with self._lock:
            kind, _ = self._directories[path]
            self._free[kind].append(path)

    def remove(self, path: str) -> None:
        """Starts to remove an array, a path of `take`; the last array takes all files.

        A finalizer may run within any call, so that this method takes no lock.
        """
        self._to_remove.put(path)

    def clear(self) -> None:
        """Removes the files of deleted arrays."""
        with self._lock:
            for path in itertools.chain(*self._free.values()):
                self._forget(path)
            self._free.clear()

    def _remove_all(self) -> None:
        """Removes queued paths, for the life of the process, in a daemon thread."""
        while True:
            path = self._to_remove.get()
            with self._lock:
                self._forget(path)
                is_last = len(self._directories) == sum(map(len, self._free.values()))
            if is_last:
                self.clear()

    def _forget(self, path: str) -> None:
        """Removes a directory from disk and from the count of bytes."""
        shutil.rmtree(path, ignore_errors=True)
        _, num_bytes = self._directories.pop(path)
        self._held[os.path.dirname(path)] -= num_bytes


_OPENING = threading.Lock()
_open = functools.cache(Scratch)


def open_scratch(paths: tuple[str, ...]) -> Scratch:
    """Returns this process's scratch directories: one `Scratch` for each `paths`."""
    # `functools.cache` may call Scratch twice if two threads ask at once.
    with _OPENING:
        return _open(paths)


def free_bytes(paths: tuple[str, ...]) -> int:
    """Counts the bytes free for arrays spread over disks, by the fullest disk."""
    disks = [os.stat(path).st_dev for path in paths]
    shares = [
        shutil.disk_usage(path).free / disks.count(disk)
        for path, disk in zip(paths, disks, strict=True)
    ]
    return int(len(paths) * min(shares))


def check_disks(
    paths: tuple[str, ...], sizes: Sequence[int], num_processes: int = 1
) -> None:
    """Raises StorageError if a state does not fit on disks, or a disk is too slow.

    `sizes` are the bytes of files of each local array; `num_processes` share the disks,
    with as many files each.
    """
    open_scratch(paths).clear()  # and the files of killed runs
    total = sum(sizes)
    if total >= _TRIED_FROM:
        _check_speed(paths, total)
    # The disk that holds least takes the next array, whose size others may not have.
    uneven = (len(paths) - 1) * max(sizes)
    needed, free = num_processes * (total + uneven), free_bytes(paths)
    if needed > free:
        raise StorageError(
            Problem(
                "zero.offload.nvme_paths",
                paths,
                f"have {format_bytes(free)} free for {format_bytes(needed)} of files",
                "make room, name more disks, or use more hosts",
            )
        )


def _check_paths(paths: tuple[str, ...]) -> None:
    """Raises StorageError for paths that are not writable or lie in memory."""
    remedy = "name directories on the disks of this host, in which files can be written"
    problems = [
        Problem(
            "zero.offload.nvme_paths", path, "is not a directory to write to", remedy
        )
        for path in paths
        if not (os.path.isdir(path) and os.access(path, os.W_OK | os.X_OK))
    ]
    remedy = "name directories on disks: zero.offload=pinned_host is faster"
    problems += [
        Problem(
            "zero.offload.nvme_paths", path, "lies in the memory of this host", remedy
        )
        for path in paths
        if _kind_of_files(path) in _IN_MEMORY
    ]
    if problems:
        raise StorageError(*problems)


def _kind_of_files(path: str) -> str:
    """Returns Linux's name of the file system of a path; empty if unknown."""
    if not _MOUNTS.exists():
        return ""
    directory, longest = f"{os.path.realpath(path)}/", ("", "")
    for line in _MOUNTS.read_text().splitlines():
        mount, _, rest = line.partition(" - ")
        point = mount.split()[4]
        # The longest mount point wins; of equal points the last mount hides earlier
        # mounts.
        if directory.startswith(f"{point.rstrip('/')}/") and len(point) >= len(
            longest[0]
        ):
            longest = point, rest.split()[0]
    return longest[1]


def _check_speed(paths: tuple[str, ...], needed_bytes: int) -> None:
    """Raises StorageError for disks on which a step would take hours."""
    rates = []
    for path, place in zip(paths, open_scratch(paths).places, strict=True):
        with _named_errors(path):
            rates.append(_write_rate(place))
    hours = needed_bytes / (len(paths) * max(min(rates), 1)) / 3600
    problems = [
        Problem(
            "zero.offload.nvme_paths",
            path,
            f"writes {rate / 1e9:.3f} GB/s, so that the {needed_bytes / 1e9:.0f} GB of "
            f"a step take {hours:.1f} hours",
            "name a faster disk, or more of them",
        )
        for path, rate in zip(paths, rates, strict=True)
        if rate < MIN_BYTES_PER_SECOND
    ]
    if problems:
        raise StorageError(*problems)


def _write_rate(place: str) -> float:
    """Measures bytes per second of writing one file."""
    path, content = f"{place}/trial", mmap.mmap(-1, _TRIAL_BYTES)
    start = time.perf_counter()
    write_file(path, np.frombuffer(content, np.uint8))
    os.unlink(path)
    return _TRIAL_BYTES / (time.perf_counter() - start)


@contextlib.contextmanager
def _named_errors(path: str) -> Iterator[None]:
    """Adds the path of the disk to an error."""
    try:
        yield
    except OSError as error:
        problem = f"takes no files ({error.strerror})"
        remedy = find_remedy(error, default="make room or mend the disk")
        remedy += ", or name another"
        raise StorageError(
            Problem("zero.offload.nvme_paths", path, problem, remedy)
        ) from error


def _make_place(path: str) -> tuple[str, IO[str]]:
    """Makes a directory that gets the final name only once it is locked."""
    with _named_errors(path):
        # An unlocked directory with the final name would look abandoned to another
        # process.
        new = pathlib.Path(
            tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=os.path.abspath(path))
        )
        lock = (new / _LOCK).open("w")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        place = new.rename(new.with_name(new.name.removeprefix(".")))
    return str(place), lock


def _remove_abandoned(path: pathlib.Path) -> None:
    """Removes directories of ended processes: a live process holds the lock."""
    for place in path.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), (place / _LOCK).open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(place)


def _remove(place: pathlib.Path) -> None:
    """Removes a directory, and the lock last.

    The next process finds a half-removed directory by the lock.
    """
    for entry in place.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        elif entry.name != _LOCK:
            entry.unlink(missing_ok=True)
    shutil.rmtree(place, ignore_errors=True)


def _close(places: Sequence[str], locks: Sequence[IO[str]], process: int) -> None:
    """Removes the directories at exit of the process that made the directories."""
    if process != os.getpid():
        return
    for place, lock in zip(places, locks, strict=True):
        _remove(pathlib.Path(place))
        lock.close()
