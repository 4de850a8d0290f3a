"""The files of an array on a disk: how it is cut, and the bytes that they take."""

import functools
import math

from zjax.sharding.placement import ArrayPlan, dtype_bytes, num_distinct_shards
from zjax.storage.files import BLOCK_BYTES, SUM_BYTES

CHUNK_BYTES = 16 << 20
"""Of a file; each lies within the shard of one device. Memory for much larger ones
would be asked of Linux, and cleared, each time."""


@functools.cache
def chunk_shape(
    shape: tuple[int, ...], shard_shape: tuple[int, ...], itemsize: int
) -> tuple[int, ...]:
    """Parts of a shard that are as large as a file should be, or somewhat larger.

    Files are of one size, so that parts are cut as equal as can be: the last takes as
    much of the disk as the first.

    Args:
        shape: Of the array.
        shard_shape: Of one device.
        itemsize: Bytes of an element.

    Returns:
        A shape that divides that of the shard where an array is split, so that every
        chunk lies on one device.

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
    """What the files of an array take, with their directories.

    Args:
        row: Its place, on devices of which some are here.

    Returns:
        Bytes of whole blocks, of what this process writes.
    """
    shard = row.stored.shard_shape(row.stored_shape)
    itemsize = dtype_bytes(row.stored_dtype)
    chunk = chunk_shape(row.stored_shape, shard, itemsize)
    grid = [math.ceil(n / size) for n, size in zip(shard, chunk, strict=True)]
    num_shards = num_distinct_shards(row.stored, row.stored_shape)
    num_files = num_shards * math.prod(grid)
    file_blocks = math.ceil((math.prod(chunk) * itemsize + SUM_BYTES) / BLOCK_BYTES)
    folders = num_shards * sum(math.prod(grid[:dim]) for dim in range(1, len(grid)))
    own = 3  # the directory, that of the chunks, and the description
    return BLOCK_BYTES * (num_files * file_blocks + folders + own)
