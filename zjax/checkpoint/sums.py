"""Checksums of the files of a step: written last, compared before anything is read.

A step holds one text file of them, `sums`: a line per file with its checksum, its size
and its name, and at the end the CRC-32C of those lines. Chunks of arrays on disks, and
what OCDBT writes, end in a CRC-32C of their own. That of a whole such file would be the
same number whatever it holds, so that the last bytes are listed apart.
"""

import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import crc32c

from zjax.checkpoint.threads import in_threads
from zjax.storage.buffers import thread_memory
from zjax.storage.files import SUM_BYTES, check_file, stored_sum

SUMS_FILE = "sums"
LINKED = "linked"
"""Where a step has the files of arrays that were stored on disks."""
_BLOCK_BYTES = 4 << 20
"""Of a file, in memory at a time."""
_NUM_THREADS = 8
_CHUNK = re.compile(rf"{LINKED}/.+/c/[\d/]+")
_MAX_BYTES = 1 << 28
"""Of the file of checksums: those of a million files take half of it."""


class Sum(NamedTuple):
    """What is known of a file.

    Args:
        size: In bytes.
        crc: CRC-32C of all but the last 4 bytes.
        tail: Those, as a little-endian number.
    """

    size: int
    crc: int
    tail: int

    def __str__(self) -> str:
        return f"{self.crc:08x}{self.tail:08x} {self.size}"


def list_files(root: pathlib.Path) -> list[str]:
    """The files under a directory.

    Args:
        root: The directory of a step.

    Returns:
        Sorted paths from there.
    """
    return sorted(
        str(pathlib.Path(folder, name).relative_to(root))
        for folder, _, names in os.walk(root)
        for name in names
    )


def sum_files(root: pathlib.Path, names: Sequence[str]) -> dict[str, Sum]:
    """Reads files, and has the file system keep them.

    Args:
        root: The directory of a step.
        names: Paths from there.

    Returns:
        Their checksums, by name.

    Raises:
        OSError: One cannot be read.
        ValueError: A chunk does not match its own checksum.
    """

    def one(name: str) -> Sum:
        with (root / name).open("rb") as file:
            computed = _sum_of(root, name)
            os.fsync(file.fileno())
        return computed

    return dict(zip(names, in_threads(one, names, _NUM_THREADS), strict=True))


def find_missing(root: pathlib.Path, sums: Mapping[str, Sum]) -> str:
    """Looks for every file, without reading it.

    Args:
        root: The directory of a step.
        sums: Its checksums.

    Returns:
        What the first that is missing or of another size lacks; empty if none is.
    """
    for name, known in sums.items():
        try:
            size = os.stat(root / name).st_size
        except OSError as error:
            return f"{name} is missing ({error.strerror})"
        if size != known.size:
            return f"{name} has {size} bytes of {known.size}"
    return ""


class LinkedSums:
    """Checksums of files as they are: a file that steps share by links is read once."""

    def __init__(self) -> None:
        self._results: dict[tuple[int, int], Sum | OSError | ValueError] = {}

    def of(self, root: pathlib.Path, name: str) -> Sum:
        """Reads a file, unless it was read under another name.

        Args:
            root: The directory of a step.
            name: Path from there.

        Returns:
            Its checksum.

        Raises:
            OSError: It cannot be read.
            ValueError: A chunk does not match its own checksum.
        """
        status = (root / name).stat()
        if status.st_nlink == 1:
            return _sum_of(root, name)
        inode = (status.st_dev, status.st_ino)
        if inode not in self._results:
            try:
                self._results[inode] = _sum_of(root, name)
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
    """Reads files and compares them with their checksums.

    Args:
        root: The directory of a step.
        sums: Its checksums.
        names: Files to read.
        whole_chunks: Whether chunks of arrays on disks are read whole. tensorstore
            compares a chunk with its own checksum when it reads it; that this is the
            listed one takes its last bytes alone.
        linked_sums: Of the steps that were read before; None where there are none.

    Returns:
        Name and problem of those that are not as they were saved.
    """
    linked_sums = linked_sums or LinkedSums()

    def one(name: str) -> str:
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

    problems = in_threads(one, names, _NUM_THREADS)
    return [(n, text) for n, text in zip(names, problems, strict=True) if text]


def share(sums: Mapping[str, Sum], part: int, num_parts: int) -> list[str]:
    """Splits the reading of files between processes.

    Args:
        sums: Checksums of all.
        part: Which process, from 0 on.
        num_parts: How many there are.

    Returns:
        The files of this process; all have about as many bytes.

    Example:
        >>> sums = {name: Sum(size, 0, 0) for name, size in zip("abcd", (9, 5, 4, 1))}
        >>> [share(sums, part, 2) for part in range(2)]
        [['a', 'd'], ['b', 'c']]
    """
    filled = [0] * num_parts
    names = []
    for name in sorted(sums, key=lambda name: (-sums[name].size, name)):
        least = filled.index(min(filled))
        filled[least] += sums[name].size
        if least == part:
            names.append(name)
    return names


def write_sums(path: pathlib.Path, sums: Mapping[str, Sum]) -> None:
    """Writes checksums, and has the file system keep them.

    Args:
        path: A new file.
        sums: By name; names have no line breaks.

    Raises:
        OSError: It cannot be written.
    """
    text = "".join(f"{each} {name}\n" for name, each in sums.items()).encode()
    with path.open("wb") as file:
        file.write(text + f"{crc32c.crc32c(text):08x}\n".encode())
        file.flush()
        os.fsync(file.fileno())


def read_sums(path: pathlib.Path) -> dict[str, Sum]:
    """Reads what `write_sums` wrote.

    Args:
        path: The file.

    Returns:
        Checksums by name.

    Raises:
        OSError: It cannot be read.
        ValueError: It is not what was written.
    """
    size = path.stat().st_size
    if size > _MAX_BYTES:
        raise ValueError(f"{path.name} has {size} bytes")
    content = path.read_bytes()
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
    path = root / name
    if _is_chunk(name):
        crc = check_file(str(path))
        return Sum(path.stat().st_size, crc, crc)
    crc, memory = 0, thread_memory(_BLOCK_BYTES)
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        left = max(size - SUM_BYTES, 0)
        while left and (count := file.readinto(memory[:left].data)):
            crc = crc32c.crc32c(memory[:count].data, crc)
            left -= count
        tail = int.from_bytes(file.read(SUM_BYTES), "little")
    return Sum(size, crc, tail)
