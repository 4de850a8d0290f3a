"""Checksums of the files of a step, and the threads that compute and write.

Checksums are written last, and compared before anything is read.
"""

import itertools
import os
import pathlib
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import crc32c

from zjax.storage.files import SUM_BYTES, check_file, stored_sum
from zjax.storage.io_threads import thread_memory


class Task:
    """Calls a function in a new daemon thread."""

    def __init__(self, name: str, call: Callable[[], Any]):
        self._call: Callable[[], Any] | None = call
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def done(self) -> bool:
        """Whether the thread has ended."""
        return not self._thread.is_alive()

    def has_failed(self) -> bool:
        """Whether the thread has ended with an error."""
        return self._error is not None

    def result(self) -> Any:
        """Waits for the thread; returns the result or raises the error."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._result

    def _run(self) -> None:
        """Calls the function, and keeps the result or the error."""
        # Drops the reference, so that arrays of the closure are freed with the call.
        call, self._call = self._call, None
        assert call is not None
        try:
            self._result = call()
        # Also SystemExit, which would end the thread silently.
        except BaseException as error:
            self._error = error


def map_in_threads(
    act: Callable[[Any], Any], items: Sequence[Any], num_threads: int
) -> list[Any]:
    """Calls a function with each item, several at a time; keeps the order."""
    results: list[Any] = [None] * len(items)
    numbers = itertools.count()  # `next` is atomic: no lock

    def work() -> None:
        while (number := next(numbers)) < len(items):
            results[number] = act(items[number])

    workers = [
        Task(f"checkpoint-{number}", work)
        for number in range(min(num_threads, len(items)))
    ]
    for worker in workers:
        worker.result()
    return results


SUMS_FILE = "sums"
LINKED = "linked"
"""Directory of the files linked from disk storage, inside a step."""
_BLOCK_BYTES = 4 << 20
"""Bytes of a file in memory at a time."""
_NUM_THREADS = 8
_CHUNK = re.compile(rf"{LINKED}/.+/c/[\d/]+")
"""Matches chunk files of disk arrays, which end in a checksum of the chunk."""
_MAX_BYTES = 1 << 28
"""Maximum size of `sums`; a million files take half of it."""


class Sum(NamedTuple):
    """Size and checksum of a file.

    Args:
        crc: CRC-32C of all but the last 4 bytes.
        tail: Last 4 bytes as a little-endian number; in a chunk, the stored checksum.
    """

    size: int
    crc: int
    tail: int

    def __str__(self) -> str:
        return f"{self.crc:08x}{self.tail:08x} {self.size}"


def list_files(root: pathlib.Path) -> list[str]:
    """Sorted relative paths of the files under a directory."""
    return sorted(
        str(pathlib.Path(folder, name).relative_to(root))
        for folder, _, names in os.walk(root)
        for name in names
    )


def sum_files(root: pathlib.Path, names: Sequence[str]) -> dict[str, Sum]:
    """Computes checksums of files, and syncs the files to disk."""

    def sum_file(name: str) -> Sum:
        with (root / name).open("rb") as file:
            computed = _sum_of(root, name)
            os.fsync(file.fileno())
        return computed

    computed = map_in_threads(sum_file, names, _NUM_THREADS)
    return dict(zip(names, computed, strict=True))


def find_missing(root: pathlib.Path, sums: Mapping[str, Sum]) -> str:
    """Describes the first file that is missing or of wrong size; empty if none is."""
    for name, known in sums.items():
        try:
            size = os.stat(root / name).st_size
        except OSError as error:
            return f"{name} is missing ({error.strerror})"
        if size != known.size:
            return f"{name} has {size} bytes of {known.size}"
    return ""


class LinkedSums:
    """Computes checksums; reads a file once that steps share by hard links."""

    def __init__(self) -> None:
        self._results: dict[tuple[int, int], Sum | OSError | ValueError] = {}

    def of(self, root: pathlib.Path, name: str) -> Sum:
        """Checksum of a file, read unless another link to the file was."""
        status = (root / name).stat()
        if status.st_nlink == 1:
            return _sum_of(root, name)
        inode = (status.st_dev, status.st_ino)
        if inode not in self._results:
            try:
                self._results[inode] = _sum_of(root, name)
            # Errors are cached, too: damage counts for each step that links the file.
            except (OSError, ValueError) as error:
                self._results[inode] = error
        result = self._results[inode]
        if isinstance(result, Sum):
            return result
        raise result


def find_damage(
    root: pathlib.Path,
    sums: Mapping[str, Sum],
    *,
    names: Sequence[str],
    whole_chunks: bool,
    linked_sums: LinkedSums | None = None,
) -> list[tuple[str, str]]:
    """Compares files with checksums; returns name and problem of each damaged file.

    Without `whole_chunks`, only the last bytes of a chunk are compared: tensorstore
    verifies all bytes when it reads the chunk.
    """
    linked_sums = linked_sums or LinkedSums()

    def find_problem(name: str) -> str:
        try:
            if _is_chunk(name) and not whole_chunks:
                is_same = stored_sum(str(root / name)) == sums[name].tail
            else:
                is_same = linked_sums.of(root, name) == sums[name]
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        except ValueError:
            is_same = False
        return "" if is_same else f"{name} does not match its checksum"

    problems = map_in_threads(find_problem, names, _NUM_THREADS)
    return [(n, text) for n, text in zip(names, problems, strict=True) if text]


def partition(sums: Mapping[str, Sum], part: int, num_parts: int) -> list[str]:
    """Names of the files that one process reads; processes get about equal bytes."""
    filled = [0] * num_parts
    names = []
    for name in sorted(sums, key=lambda name: (-sums[name].size, name)):
        least = filled.index(min(filled))
        filled[least] += sums[name].size
        if least == part:
            names.append(name)
    return names


def write_sums(path: pathlib.Path, sums: Mapping[str, Sum]) -> None:
    """Writes checksums to a new file, and syncs the file to disk."""
    text = "".join(f"{each} {name}\n" for name, each in sums.items()).encode()
    with path.open("wb") as file:
        # The last line is a checksum of the lines before.
        file.write(text + f"{crc32c.crc32c(text):08x}\n".encode())
        file.flush()
        os.fsync(file.fileno())


def read_sums(path: pathlib.Path) -> dict[str, Sum]:
    """Reads a file of `write_sums`; raises a ValueError if the file is damaged."""
    size = path.stat().st_size
    if size > _MAX_BYTES:
        raise ValueError(f"{path.name} has {size} bytes")
    content = path.read_bytes()
    # 8 hex digits and a newline.
    text, last = content[:-9], content[-9:]
    if last != f"{crc32c.crc32c(text):08x}\n".encode():
        raise ValueError(f"{path.name} does not match its checksum")
    lines = (line.split(" ", 2) for line in text.decode().splitlines())
    return {
        name: Sum(int(size), int(both[:8], 16), int(both[8:], 16))
        for both, size, name in lines
    }


def _is_chunk(name: str) -> bool:
    return _CHUNK.fullmatch(name) is not None


def _sum_of(root: pathlib.Path, name: str) -> Sum:
    """Reads a file and computes the checksum; compares a chunk with the stored one."""
    path = root / name
    if _is_chunk(name):
        crc = check_file(str(path))
        return Sum(path.stat().st_size, crc, crc)
    crc, memory = 0, thread_memory(_BLOCK_BYTES)
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        # Without the last 4 bytes, where chunks store a checksum of all bytes before.
        remaining = max(size - SUM_BYTES, 0)
        while remaining and (count := file.readinto(memory[:remaining].data)):
            crc = crc32c.crc32c(memory[:count].data, crc)
            remaining -= count
        tail = int.from_bytes(file.read(SUM_BYTES), "little")
    return Sum(size, crc, tail)
