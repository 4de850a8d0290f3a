"""Checksums of the files of prepared data, by chunk.

A chunk is verified when a part of it is first read, so that a run on terabytes starts
at once, and reads no damaged byte. `<file>.sums` holds the CRC-32C of each chunk, in
the checksummed form of `zjax.data.column_file`.
"""

import os
import pathlib

import crc32c
import numpy as np

from zjax.data.column_file import open_columns, write_columns
from zjax.errors import DataError, Problem

CHUNK_BYTES = 1 << 16
"""Bytes of a chunk. Linux reads 128 KiB around a first access to a mapped file, so that
smaller chunks would not save reads."""
REMEDY = "copy it again, or prepare it again"


class SummedFile:
    """A new file whose checksums are computed while it is written.

    Args:
        path: Path of the file, replaced if there is one.
    """

    def __init__(self, path: pathlib.Path):
        self._path = path
        self._file = open(path, "wb")
        self._sums: list[int] = []
        self._sum, self._chunk_size = 0, 0

    def write(self, content: bytes) -> None:
        """Appends bytes."""
        self._file.write(content)
        view = memoryview(content)
        while view:
            part = view[: CHUNK_BYTES - self._chunk_size]
            self._sum = crc32c.crc32c(part, self._sum)
            self._chunk_size += len(part)
            view = view[len(part) :]
            if self._chunk_size == CHUNK_BYTES:
                self._end_chunk()

    def _end_chunk(self) -> None:
        self._sums.append(self._sum)
        self._sum, self._chunk_size = 0, 0

    def close(self) -> None:
        """Syncs the file to disk, then writes its checksums; does nothing twice."""
        if self._file.closed:
            return
        with self._file as file:  # closes it also where the disk is full
            file.flush()
            os.fsync(file.fileno())
        if self._chunk_size:
            self._end_chunk()
        column = np.array(self._sums, np.int64)
        path = sums_path(self._path)
        write_columns(path, [column], digest="", name=self._path.name)


def sums_path(path: pathlib.Path) -> pathlib.Path:
    """Names the file of the checksums of a file.

    Example:
        >>> sums_path(pathlib.Path("data/train.bin")).name
        'train.bin.sums'
    """
    return path.with_name(f"{path.name}.sums")


class ChunkSums:
    """Checksums of a mapped file, and which chunks match.

    Args:
        path: Path of the file.
        content: Its bytes, uint8[n].

    Raises:
        DataError: The checksums are missing, damaged, or of another number of chunks.
    """

    def __init__(self, path: pathlib.Path, content: np.ndarray):
        self._path, self._content = path, content
        opened = open_columns(
            sums_path(path), ["<i8"], field="data.path", remedy=REMEDY
        )
        [self._sums] = opened.arrays
        expected = -(-len(content) // CHUNK_BYTES)
        if len(self._sums) != expected:
            problem = f"holds {len(self._sums)} checksums, but {path.name} has "
            problem += f"{expected} chunks"
            place = str(sums_path(path))
            raise DataError(Problem("data.path", place, problem, REMEDY))
        self._is_verified = np.zeros(expected, bool)

    def verify(self, start: int, stop: int) -> None:
        """Verifies the chunks of a range of bytes that no range had before.

        Raises:
            DataError: A chunk does not match its checksum.
        """
        first, end = start // CHUNK_BYTES, -(-stop // CHUNK_BYTES)
        if self._is_verified[first:end].all():
            return
        for chunk in range(first, end):
            begin = chunk * CHUNK_BYTES
            part = self._content[begin : begin + CHUNK_BYTES]
            if crc32c.crc32c(part.data) != self._sums[chunk]:
                last = begin + len(part) - 1
                problem = f"is damaged between bytes {begin} and {last}"
                raise DataError(Problem("data.path", str(self._path), problem, REMEDY))
            self._is_verified[chunk] = True
