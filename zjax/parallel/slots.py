"""Which blocks of a line each chunk of a pipeline runs.

All stages run one program, so all chunks have the same slots: some for blocks of the
first segment, then some for blocks of the second, and so on. A chunk runs contiguous
blocks of the line. A slot without a block hands the stream on; its parameters are 0.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class SegmentSlots:
    """The slots for the blocks of one segment.

    Args:
        num_blocks: Blocks of the segment, 1 or more.
        size: Slots in each chunk, 1 or more.
        first_chunk: Index of the chunk that runs its first block.
        first_block: Blocks of the segments before it.
        num_chunks: Chunks of all stages.
    """

    num_blocks: int
    size: int
    first_chunk: int
    first_block: int
    num_chunks: int

    @property
    def are_full(self) -> bool:
        """Whether every slot has a block."""
        return self.num_blocks == self.size * self.num_chunks

    def block(self, chunk: Any, slot: int) -> Any:
        """Number in the segment of the block in a slot; out of range if it is empty.

        Args:
            chunk: int32[] or int, from 0 on, over all stages.
            slot: 0 to `size - 1`.
        """
        first = chunk - self.first_chunk if self.first_chunk else chunk
        return first * self.size + slot

    def spread(self, x: jax.Array) -> jax.Array:
        """Puts stacked blocks into their slots, [chunks * size, ...].

        Args:
            x: [blocks or more, ...], zeros behind the blocks.
        """
        before = self.first_chunk * self.size
        return _padded(x, before, self.num_chunks * self.size - before - len(x))

    def collect(self, x: jax.Array, length: int) -> jax.Array:
        """Stacks blocks again, [length, ...]: the inverse of `spread`.

        Args:
            x: [chunks * size, ...].
            length: First dim that `spread` was given.
        """
        before = self.first_chunk * self.size
        return _padded(x, -before, length + before - len(x))


def assign_slots(
    num_blocks: Sequence[int], num_chunks: int, block_sizes: Sequence[int]
) -> tuple[SegmentSlots, ...]:
    """Gives every block a slot, with as few slots in a chunk as there can be.

    A segment that runs in n chunks needs its blocks / n slots, rounded up, in every
    chunk. The next segment begins in the chunk where it ends.

    Args:
        num_blocks: Blocks of each segment, 1 or more.
        num_chunks: Chunks of all stages, 1 or more.
        block_sizes: Parameters of a block of each segment; of equally many slots, those
            that hold fewer parameters are taken.

    Returns:
        The slots of each segment.

    Example:
        >>> [x.size for x in assign_slots([3, 58], 16, [1, 10])]
        [2, 4]
        >>> assign_slots([5], 4, [1])[0].size
        2
    """

    @functools.cache
    def best(segment: int, more: int) -> tuple[int, int, tuple[int, ...]]:
        """Fewest slots from a segment on, their parameters, and slots by segment.

        Each segment runs in one chunk, and in up to `more` others between them.
        """
        if segment == len(num_blocks):
            return 0, 0, ()
        candidates = []
        for own in range(more + 1):
            size = -(-num_blocks[segment] // (own + 1))
            slots, params, sizes = best(segment + 1, more - own)
            params += size * block_sizes[segment]
            candidates.append((size + slots, params, (size, *sizes)))
        return min(candidates)

    chunk, block, assigned = 0, 0, []
    for number, size in zip(num_blocks, best(0, num_chunks - 1)[2], strict=True):
        assigned.append(SegmentSlots(number, size, chunk, block, num_chunks))
        chunk += -(-number // size) - 1
        block += number
    return tuple(assigned)


def whole_slots(slots: Sequence[SegmentSlots]) -> frozenset[tuple[int, int]]:
    """Segment and slot of the first block of the line, and of the last one.

    Example:
        >>> sorted(whole_slots(assign_slots([5], 2, [1])))
        [(0, 0), (0, 1)]
    """
    last = slots[-1]
    return frozenset({(0, 0), (len(slots) - 1, (last.num_blocks - 1) % last.size)})


def _padded(x: jax.Array, before: int, behind: int) -> jax.Array:
    """Adds zeros in the first dim, or cuts them off where a number is negative."""
    if before == behind == 0:
        return x
    widths = [(before, behind, 0), *[(0, 0, 0)] * (x.ndim - 1)]
    return jax.lax.pad(x, jnp.zeros((), x.dtype), widths)
