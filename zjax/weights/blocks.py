"""Arithmetic of blocks that share a scale."""

import numpy as np


def num_blocks(size: int, block: int) -> int:
    """Counts the blocks of a dim, of which the last may be smaller."""
    return -(-size // block)


def blocks_of(span: slice, block: int) -> slice:
    """Blocks that hold a slice."""
    return slice(span.start // block, num_blocks(span.stop, block))


def spread(x: np.ndarray, dim: int, span: slice, block: int) -> np.ndarray:
    """Repeats the entries of blocks for the elements of a slice."""
    numbers = np.arange(span.start, span.stop) // block - span.start // block
    return x.take(numbers, dim)


def inside(span: slice, block: int) -> slice:
    """Counts a slice from the beginning of the first block."""
    start = span.start - span.start // block * block
    return slice(start, start + span.stop - span.start)
