"""Checksums of prepared data, and of batches that a resumed run draws again."""

import hashlib
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import crc32c
import jax
import numpy as np

from zjax.data.metric_index import open_columns, write_columns
from zjax.errors import DataError, Problem
from zjax.sharding.paths import path_of

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
        """Verifies the chunks of a range of bytes that no range had before."""
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


SCAN_TOKENS = 1 << 26
"""Longest stream that is read completely."""
NUM_SAMPLED = 64
WHOLE_BYTES = 1 << 20
"""Largest array of a given batch that is read completely."""
PIECE_BYTES = 1 << 14


def token_parts(tokens: Any) -> Iterator[np.ndarray]:
    """Reads a stream completely, or 64 equally spaced parts if it is long."""
    size = SCAN_TOKENS // NUM_SAMPLED
    if len(tokens) <= SCAN_TOKENS:
        starts = range(0, len(tokens), size)
    else:
        starts = np.linspace(0, len(tokens) - size, NUM_SAMPLED).astype(np.int64)
    for start in map(int, starts):
        yield tokens[start : start + size]


def digest_tokens(tokens: Any, *others: np.ndarray) -> str:
    """16 hexadecimal digits of a stream (length, dtype, parts) and other arrays."""
    checksum = hashlib.sha256(f"{len(tokens)} {tokens[:1].dtype.name}".encode())
    for part in (*token_parts(tokens), *others):
        checksum.update(np.ascontiguousarray(part).data)
    return checksum.hexdigest()[:16]


def digest_columns(read: Any, num_rows: int) -> str:
    """16 hexadecimal digits of rows, which `read(indices)` gives as dicts of arrays.

    Rows that differ when read twice, as with random crops, count by the names, dtypes
    and shapes of their columns alone.
    """
    number = min(num_rows, NUM_SAMPLED)
    indices = np.linspace(0, num_rows - 1, number).astype(np.int64)
    first, again = read(indices), read(indices)
    forms = {name: [x.dtype.name, x.shape[1:]] for name, x in first.items()}
    checksum = hashlib.sha256(json.dumps([num_rows, forms]).encode())
    for name, array in first.items():
        if array.tobytes() == again[name].tobytes():
            checksum.update(np.ascontiguousarray(array).data)
    return checksum.hexdigest()[:16]


class BatchChain:
    """Running checksum of batches.

    Example:
        >>> one, other = BatchChain(), BatchChain()
        >>> one.add({"x": np.arange(3)}) == other.add({"x": np.arange(3)})
        True
        >>> one.add({"x": np.arange(3)}) == other.add({"x": np.arange(1, 4)})
        False
    """

    def __init__(self) -> None:
        self._sum = hashlib.sha256()

    def add(self, batch: Any) -> str:
        """Adds a batch, and returns 16 hexadecimal digits of all batches so far.

        Arrays on devices count by dtype and shape alone.
        """
        for keys, leaf in jax.tree_util.tree_leaves_with_path(batch):
            array = leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
            form = f"{path_of(keys)} {array.dtype} {array.shape}"
            self._sum.update(form.encode())
            for piece in _pieces(array) if isinstance(array, np.ndarray) else ():
                self._sum.update(piece)
        return self._sum.hexdigest()[:16]


def _pieces(array: np.ndarray) -> Iterator[Any]:
    if array.dtype == object:  # refused when it is placed
        return
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    if data.nbytes <= WHOLE_BYTES:
        yield data.data
        return
    last = data.nbytes - PIECE_BYTES
    for start in np.linspace(0, last, NUM_SAMPLED).astype(np.int64).tolist():
        yield data[start : start + PIECE_BYTES].data
