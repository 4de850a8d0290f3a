"""Files of one chunk of an array each, written and read past the page cache.

The CRC-32C of the content ends a file, as in a chunk of Zarr 3. TensorStore reads such
files, but writes through the page cache, which would fill the host.
"""

import contextlib
import errno
import fcntl
import functools
import math
import mmap
import os
import tempfile
import threading
from collections.abc import Callable

import crc32c
import numpy as np
from absl import logging

from zjax.sharding.placement import ArrayPlan, dtype_bytes, num_distinct_shards
from zjax.storage.io_threads import thread_memory

CHUNK_BYTES = 16 << 20
"""Bytes of a chunk. For much larger ones Linux would map and clear new memory."""


@functools.cache
def chunk_shape(
    shape: tuple[int, ...], shard_shape: tuple[int, ...], itemsize: int
) -> tuple[int, ...]:
    """Returns the shape of the chunks of an array, of `CHUNK_BYTES` or somewhat more.

    All files have one size, so chunks divide a shard as evenly as possible. In dims
    that are split over devices, the chunk divides `shard_shape`: each chunk lies on one
    device.

    Example:
        >>> chunk_shape((48, 1 << 20), (24, 1 << 20), 4)
        (4, 1048576)
        >>> chunk_shape((6287, 4096), (6287, 4096), 4)
        (899, 4096)
        >>> chunk_shape((10240, 2560), (10240, 2560), 4)
        (1464, 2560)
    """
    chunk = list(shard_shape)
    for dim, size in enumerate(shard_shape):
        row_bytes = math.prod(chunk[dim + 1 :]) * itemsize
        fitting = CHUNK_BYTES // row_bytes
        if fitting >= size:
            break
        chunk[dim] = math.ceil(size / math.ceil(size / max(fitting, 1)))
        in_blocks = BLOCK_BYTES // math.gcd(row_bytes, BLOCK_BYTES)
        if fitting >= in_blocks:  # then the next part starts at a block of memory
            chunk[dim] = math.ceil(chunk[dim] / in_blocks) * in_blocks
        if shape[dim] != size:  # split
            enough = max(1, CHUNK_BYTES // 4 // row_bytes)
            divisors = [n for n in range(1, size + 1) if size % n == 0]
            fit = [n for n in divisors if enough <= n <= max(fitting, 1)]
            chunk[dim] = max(fit) if fit else min(n for n in divisors if n >= enough)
        if fitting:
            break
    return tuple(chunk)


def disk_bytes(row: ArrayPlan) -> int:
    """Counts the bytes on disk of the process's files, with directories."""
    shard = row.stored.shard_shape(row.stored_shape)
    itemsize = dtype_bytes(row.stored_dtype)
    chunk = chunk_shape(row.stored_shape, shard, itemsize)
    grid = [math.ceil(n / size) for n, size in zip(shard, chunk, strict=True)]
    num_shards = num_distinct_shards(row.stored, row.stored_shape)
    num_files = num_shards * math.prod(grid)
    # A file system allocates whole blocks, also for directories.
    file_blocks = math.ceil((math.prod(chunk) * itemsize + SUM_BYTES) / BLOCK_BYTES)
    folders = num_shards * sum(math.prod(grid[:dim]) for dim in range(1, len(grid)))
    num_others = 3  # directory of the array, directory of the chunks, description
    return BLOCK_BYTES * (num_files * file_blocks + folders + num_others)


BLOCK_BYTES = 4096
"""Alignment of direct reads and writes, in the file and in memory."""
SUM_BYTES = 4
"""Bytes of the CRC-32C that follows the content of a file."""
_FLAGS: dict[int, int] = {}
"""O_DIRECT or 0, by device number (`st_dev`) of the file system."""
_FLAGS_LOCK = threading.Lock()


def write_file(path: str, content: np.ndarray) -> None:
    """Creates a file of `content`, uint8[n], or overwrites a file of equal length.

    A file with more hard links, as in a checkpoint, is replaced, so that the checkpoint
    keeps the content. Page-aligned memory is not copied.
    """
    num_direct = _num_direct(content)
    tail = content[num_direct:].tobytes() + _checksum(content)
    flags = os.O_WRONLY | os.O_CREAT | _direct_flag(os.path.dirname(path))
    with contextlib.suppress(FileNotFoundError):
        if os.stat(path).st_nlink > 1:
            os.unlink(path)  # a checkpoint holds the file by a link
    file = os.open(path, flags, 0o600)
    try:
        _transfer_all(os.pwritev, file, content[:num_direct], 0)
        # The tail does not fill whole blocks, which O_DIRECT demands.
        _clear_direct_flag(file)
        _transfer_all(os.pwritev, file, np.frombuffer(tail, np.uint8), num_direct)
    finally:
        os.close(file)


def read_file(path: str, content: np.ndarray) -> None:
    """Reads a file of `write_file` into `content`, uint8[n], and verifies the checksum.

    Raises ValueError for a short file or a wrong checksum; page-aligned memory is
    fastest.
    """
    num_direct = _num_direct(content)
    tail = np.empty(len(content) - num_direct + SUM_BYTES, np.uint8)
    file = os.open(path, os.O_RDONLY | _direct_flag(os.path.dirname(path)))
    try:
        _transfer_all(os.preadv, file, content[:num_direct], 0)
        _clear_direct_flag(file)
        _transfer_all(os.preadv, file, tail, num_direct)
    finally:
        os.close(file)
    content[num_direct:] = tail[:-SUM_BYTES]
    if _checksum(content) != tail[-SUM_BYTES:].tobytes():
        raise ValueError(f"{os.path.basename(path)} does not match its checksum")


def check_file(path: str) -> int:
    """Verifies a file of `write_file` and returns the checksum."""
    size = os.stat(path).st_size - SUM_BYTES
    if size < 1:
        raise ValueError(f"ends after {size + SUM_BYTES} bytes")
    read_file(path, thread_memory(size))
    return stored_sum(path)


def stored_sum(path: str) -> int:
    """Returns the CRC-32C at the end of a file of `write_file`, unchecked."""
    with open(path, "rb", buffering=0) as file:
        file.seek(-SUM_BYTES, os.SEEK_END)
        return int.from_bytes(file.read(SUM_BYTES), "little")


def _num_direct(content: np.ndarray) -> int:
    """Returns the bytes at the start of `content` that O_DIRECT can transfer."""
    if content.ctypes.data % BLOCK_BYTES:
        return 0
    return len(content) - len(content) % BLOCK_BYTES


def _checksum(content: np.ndarray) -> bytes:
    return crc32c.crc32c(content.data).to_bytes(SUM_BYTES, "little")


def _transfer_all(
    transfer: Callable[..., int], file: int, content: np.ndarray, offset: int
) -> None:
    """Repeats a transfer until all bytes are moved: one system call may move fewer."""
    done = 0
    while done < len(content):
        num_bytes = transfer(file, [content[done:]], offset + done)
        if not num_bytes:
            raise ValueError(f"ends after {offset + done} bytes")
        done += num_bytes


def _clear_direct_flag(file: int) -> None:
    """Switches an open file to transfers through the page cache."""
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    fcntl.fcntl(file, fcntl.F_SETFL, flags & ~getattr(os, "O_DIRECT", 0))


def _direct_flag(directory: str) -> int:
    """Returns O_DIRECT if the file system supports it, else 0."""
    device = os.stat(directory).st_dev
    with _FLAGS_LOCK:
        if device not in _FLAGS:
            _FLAGS[device] = _try_direct(directory)
        return _FLAGS[device]


def _try_direct(directory: str) -> int:
    """Tries O_DIRECT on a temporary file, and warns if it fails."""
    flag = getattr(os, "O_DIRECT", 0)
    with tempfile.NamedTemporaryFile(dir=directory) as trial:
        try:
            file = os.open(trial.name, os.O_WRONLY | flag)
            try:
                os.pwrite(file, mmap.mmap(-1, BLOCK_BYTES), 0)
            finally:
                os.close(file)
        except OSError as error:
            # Opening or writing may fail: file systems differ in when they refuse
            # O_DIRECT.
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
            flag = 0
    if not flag:
        logging.warning("%s: files there go through the page cache", directory)
    return flag
