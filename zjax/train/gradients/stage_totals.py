"""Totals of blocks on the stream of a pipeline, which holds floats alone.

Each int32 is two float32: its high and its low 16 bits, which are exact. They get no
gradient.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from zjax.typing import Segment, Totals


class Bits(NamedTuple):
    """Halves of an int32 array, float32 each."""

    high: jax.Array
    low: jax.Array


Stacks = tuple[dict[str, Bits], ...]
"""For each segment, arrays [num_blocks, ...] by name."""


def no_totals(segments: Sequence[Segment]) -> Stacks:
    """Zeros for all blocks of a stack."""

    def zeros(segment: Segment, shape: tuple[int, ...]) -> Bits:
        stack = jnp.zeros((segment.num_blocks, *shape), jnp.float32)
        return Bits(stack, stack)

    return tuple(
        {name: zeros(segment, shape) for name, shape in segment.totals.items()}
        for segment in segments
    )


def with_block(
    stacks: Stacks, segment: int, index: jax.Array, totals: Mapping[str, jax.Array]
) -> Stacks:
    """Writes the totals of a block.

    Args:
        stacks: Totals of the blocks so far.
        segment: Index of the segment.
        index: int32[], index of the block in the segment.
        totals: Totals of the block.
    """

    def write(stack: jax.Array, x: jax.Array) -> jax.Array:
        stack = jax.lax.stop_gradient(stack)
        x = x.astype(jnp.float32)
        return jax.lax.dynamic_update_index_in_dim(stack, x, index, 0)

    written = {
        name: jax.tree.map(write, stacks[segment][name], Bits(x >> 16, x & 0xFFFF))
        for name, x in totals.items()
    }
    return (*stacks[:segment], written, *stacks[segment + 1 :])


def as_integers(stacks: Stacks) -> Totals:
    """The totals as int32 again.

    Example:
        >>> segment = Segment(lambda *inputs: None, 2, totals={"load": ()})
        >>> zeros, large = no_totals([segment]), {"load": jnp.int32(2**31 - 1)}
        >>> as_integers(with_block(zeros, 0, jnp.int32(1), large))[0]["load"].tolist()
        [0, 2147483647]
    """

    def join(bits: Bits) -> jax.Array:
        high, low = (x.astype(jnp.int32) for x in bits)
        return (high << 16) + low

    return tuple({name: join(x) for name, x in each.items()} for each in stacks)
