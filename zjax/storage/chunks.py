"""Chunks of an array on a disk, one file each, and the bytes that they take."""

import functools
import math

from zjax.sharding.placement import ArrayPlan, dtype_bytes, num_distinct_shards
from zjax.storage.files import BLOCK_BYTES, SUM_BYTES

CHUNK_BYTES = 16 << 20
"""Bytes of a chunk. For much larger ones Linux would map and clear new memory."""


@functools.cache
def chunk_shape(
    shape: tuple[int, ...], shard_shape: tuple[int, ...], itemsize: int
) -> tuple[int, ...]:
    """Shape of the chunks of an array, of `CHUNK_BYTES` or somewhat more.

    All files have one size, so chunks divide a shard as evenly as possible.

    Args:
        shape: Shape of the array.
        shard_shape: Shape of the shard of one device.
        itemsize: Bytes of an element.

    Returns:
        A shape that divides `shard_shape` in the dims that are split: each chunk lies
        on one device.

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
    """Bytes on disk of the files that this process writes, with their directories.

    Args:
        row: Plan of the array, on devices of which some are this process's.
    """
    shard = row.stored.shard_shape(row.stored_shape)
    itemsize = dtype_bytes(row.stored_dtype)
    chunk = chunk_shape(row.stored_shape, shard, itemsize)
    grid = [math.ceil(n / size) for n, size in zip(shard, chunk, strict=True)]
    num_shards = num_distinct_shards(row.stored, row.stored_shape)
    num_files = num_shards * math.prod(grid)
    file_blocks = math.ceil((math.prod(chunk) * itemsize + SUM_BYTES) / BLOCK_BYTES)
    folders = num_shards * sum(math.prod(grid[:dim]) for dim in range(1, len(grid)))
    num_others = 3  # directory of the array, directory of the chunks, description
    return BLOCK_BYTES * (num_files * file_blocks + folders + num_others)
