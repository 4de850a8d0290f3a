"""Checksums of token files by chunk, and digests of streams, rows and batches."""

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
from zjax.sharding.naming import path_of

CHUNK_BYTES = 1 << 16
"""Bytes of a chunk. Linux reads 128 KiB around a first access to a mapped file: smaller
chunks would not save reads."""
REMEDY = "copy it again, or prepare it again"


class SummedFile:
    """A new file, with checksums computed while writing."""

    def __init__(self, path: pathlib.Path):
        self._path = path
        self._file = open(path, "wb")
        self._sums: list[int] = []
        self._sum, self._chunk_size = 0, 0

    def write(self, content: bytes) -> None:
        """Appends bytes."""
        self._file.write(content)
        # Slices of a memoryview copy nothing.
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
        """Syncs the file to disk, then writes the checksums; does nothing twice."""
        if self._file.closed:
            return
        with self._file as file:  # closes the file even if the disk is full
            file.flush()
            os.fsync(file.fileno())
        if self._chunk_size:
            self._end_chunk()
        # After the sync: checksums on disk vouch for a file on disk.
        column = np.array(self._sums, np.int64)
        path = sums_path(self._path)
        write_columns(path, [column], digest="", name=self._path.name)


def sums_path(path: pathlib.Path) -> pathlib.Path:
    """Path of the checksums of a file."""
    return path.with_name(f"{path.name}.sums")


class ChunkSums:
    """Checksums of a mapped file, with flags of verified chunks.

    `field` names the setting of the file in errors.

    Raises:
        DataError: The checksums are missing, damaged, or of another number of chunks.
    """

    def __init__(
        self, path: pathlib.Path, content: np.ndarray, field: str = "data.path"
    ):
        self._path, self._content, self._field = path, content, field
        opened = open_columns(sums_path(path), ["<i8"], field=field, remedy=REMEDY)
        [self._sums] = opened.arrays
        expected = -(-len(content) // CHUNK_BYTES)
        if len(self._sums) != expected:
            problem = f"holds {len(self._sums)} checksums, but {path.name} has "
            problem += f"{expected} chunks"
            place = str(sums_path(path))
            raise DataError(Problem(field, place, problem, REMEDY))
        self._is_verified = np.zeros(expected, bool)

    def verify(self, start: int, stop: int) -> None:
        """Verifies the chunks of a range of bytes that are not verified yet."""
        first, end = start // CHUNK_BYTES, -(-stop // CHUNK_BYTES)
        if self._is_verified[first:end].all():
            return
        for chunk in range(first, end):
            begin = chunk * CHUNK_BYTES
            part = self._content[begin : begin + CHUNK_BYTES]
            if crc32c.crc32c(part.data) != self._sums[chunk]:
                last = begin + len(part) - 1
                problem = f"is damaged between bytes {begin} and {last}"
                raise DataError(Problem(self._field, str(self._path), problem, REMEDY))
            self._is_verified[chunk] = True


SCAN_TOKENS = 1 << 26
"""Number of tokens of the longest stream that is read completely."""
NUM_SAMPLED = 64
WHOLE_BYTES = 1 << 20
"""Bytes of the largest array of a user's batch that is read completely."""
PIECE_BYTES = 1 << 14


def token_parts(tokens: Any) -> Iterator[np.ndarray]:
    """Reads a stream completely, or 64 equally spaced parts of a long stream."""
    size = SCAN_TOKENS // NUM_SAMPLED
    if len(tokens) <= SCAN_TOKENS:
        starts = range(0, len(tokens), size)
    else:
        starts = np.linspace(0, len(tokens) - size, NUM_SAMPLED).astype(np.int64)
    for start in map(int, starts):
        yield tokens[start : start + size]


def digest_tokens(tokens: Any, *others: np.ndarray) -> str:
    """Hashes a stream (length, dtype, parts) and arrays; 16 hexadecimal digits."""
    checksum = hashlib.sha256(f"{len(tokens)} {tokens[:1].dtype.name}".encode())
    for part in (*token_parts(tokens), *others):
        checksum.update(np.ascontiguousarray(part).data)
    return checksum.hexdigest()[:16]


def digest_columns(read: Any, num_rows: int) -> str:
    """Hashes a sample of rows from `read(indices)`; 16 hexadecimal digits.

    Columns that differ when read twice, as with random crops, count by name, dtype and
    shape alone.
    """
    number = min(num_rows, NUM_SAMPLED)
    indices = np.linspace(0, num_rows - 1, number).astype(np.int64)
    # Twice, to find columns that are random.
    first, again = read(indices), read(indices)
    forms = {name: [x.dtype.name, x.shape[1:]] for name, x in first.items()}
    checksum = hashlib.sha256(json.dumps([num_rows, forms]).encode())
    for name, array in first.items():
        if array.tobytes() == again[name].tobytes():
            checksum.update(np.ascontiguousarray(array).data)
    return checksum.hexdigest()[:16]


class BatchChain:
    """Running checksum of batches."""

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
    """Yields the bytes of an array, or of spaced pieces of a large array."""
    if array.dtype == object:  # refused when it is placed
        return
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    if data.nbytes <= WHOLE_BYTES:
        yield data.data
        return
    last = data.nbytes - PIECE_BYTES
    for start in np.linspace(0, last, NUM_SAMPLED).astype(np.int64).tolist():
        yield data[start : start + PIECE_BYTES].data
