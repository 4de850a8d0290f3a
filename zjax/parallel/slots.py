"""Assignment of blocks to the chunks of a pipeline, and arrays [stages, ...]."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec as P

from zjax.parallel.tensor import by_parts
from zjax.sharding.mesh import PIPELINE


@dataclasses.dataclass(frozen=True)
class SegmentSlots:
    """Slots for the blocks of one segment.

    Args:
        num_blocks: Blocks of the segment, 1 or more.
        size: Slots in each chunk, 1 or more.
        first_chunk: Index of the chunk that runs the first block of the segment.
        first_block: Number of blocks of the segments before.
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
        """Number in the segment of the block in a slot; out of range if it is empty."""
        first = chunk - self.first_chunk if self.first_chunk else chunk
        return first * self.size + slot

    def spread(self, x: jax.Array) -> jax.Array:
        """Puts stacked blocks, with zeros behind, into slots, [chunks * size, ...]."""
        before = self.first_chunk * self.size
        return _padded(x, before, self.num_chunks * self.size - before - len(x))

    def collect(self, x: jax.Array, length: int) -> jax.Array:
        """Stacks the blocks of slots again, [length, ...]: the inverse of `spread`."""
        before = self.first_chunk * self.size
        return _padded(x, -before, length + before - len(x))


def assign_slots(
    num_blocks: Sequence[int], num_chunks: int, block_sizes: Sequence[int]
) -> tuple[SegmentSlots, ...]:
    """Gives every block a slot, with as few slots in a chunk as there can be.

    A segment that runs in n chunks needs blocks / n slots, rounded up, in every chunk.
    The next segment begins in the chunk where the segment before ends. Of equally many
    slots, the assignment with fewer parameters (`block_sizes` per block) is taken.
    """

    @functools.cache
    def best(segment: int, more: int) -> tuple[int, int, tuple[int, ...]]:
        """Fewest slots from a segment on, parameters of the slots, slots by segment.

        Each segment runs in one chunk; the segments share up to `more` further chunks.
        """
        if segment == len(num_blocks):
            return 0, 0, ()
        candidates = []
        for own in range(more + 1):
            size = -(-num_blocks[segment] // (own + 1))
            slots, params, sizes = best(segment + 1, more - own)
            params += size * block_sizes[segment]
            candidates.append((size + slots, params, (size, *sizes)))
        # By slots, then by parameters: the order of the tuple.
        return min(candidates)

    chunk, block, assigned = 0, 0, []
    for number, size in zip(num_blocks, best(0, num_chunks - 1)[2], strict=True):
        assigned.append(SegmentSlots(number, size, chunk, block, num_chunks))
        chunk += -(-number // size) - 1
        block += number
    return tuple(assigned)


def whole_slots(slots: Sequence[SegmentSlots]) -> frozenset[tuple[int, int]]:
    """Segment and slot of the first block of the model, and of the last block."""
    last = slots[-1]
    return frozenset({(0, 0), (len(slots) - 1, (last.num_blocks - 1) % last.size)})


def _padded(x: jax.Array, before: int, behind: int) -> jax.Array:
    """Adds zeros in the first dim, or removes entries where a number is negative."""
    if before == behind == 0:
        return x
    widths = [(before, behind, 0), *[(0, 0, 0)] * (x.ndim - 1)]
    return jax.lax.pad(x, jnp.zeros((), x.dtype), widths)


STAGED, EVERYWHERE = P(PIPELINE), P()
"""Specs of an array [stages, ...], and of an array that is equal on all stages."""


def map_stages(
    run: Callable[..., Any], outs: Any, staged: tuple[Any, ...], *everywhere: Any
) -> Any:
    """Calls `run(*staged, *everywhere)` on every stage with entries of that stage.

    `outs` are `STAGED` or `EVERYWHERE`; an `EVERYWHERE` result must be equal on all
    stages.
    """
    num_staged = len(staged)

    def of_stage(*args: Any) -> Any:
        local = jax.tree.map(lambda x: x[0], args[:num_staged])
        results = run(*local, *args[num_staged:])
        return jax.tree.map(
            lambda spec, tree: (
                jax.tree.map(lambda x: x[None], tree) if spec == STAGED else tree
            ),
            outs,
            results,
            is_leaf=lambda x: isinstance(x, P),
        )

    specs = (*[STAGED] * num_staged, *[EVERYWHERE] * len(everywhere))
    return jax.shard_map(
        of_stage,
        in_specs=specs,
        out_specs=outs,
        axis_names={PIPELINE},
        check_vma=False,
    )(*staged, *everywhere)


def full(shape: tuple[int, ...], dtype: Any, value: int | float = 0) -> jax.Array:
    """Calls `jnp.full` for a shape [stages, ...], and shards the stages."""
    spec = P(PIPELINE, *[P.UNCONSTRAINED] * (len(shape) - 1))
    return jax.lax.with_sharding_constraint(jnp.full(shape, value, dtype), spec)


def unstack(
    stages: Sequence[Any], num_layers: Sequence[int], num_chunks: int
) -> list[list[list[Any]]]:
    """Slices layers out of stacks, which a loop would copy in each iteration.

    Stacks of a segment are [stages, chunks, layers, ...]. The result is by chunk,
    segment and layer, of arrays [stages, ...].
    """

    def layers(segment: Any, number: int, chunk: int) -> list[Any]:
        return [
            jax.tree.map(lambda x, i=i: x[:, chunk, i], segment) for i in range(number)
        ]

    segments = list(zip(stages, num_layers, strict=True))
    return [[layers(*segment, c) for segment in segments] for c in range(num_chunks)]


def stack(chunks: list[list[list[Any]]]) -> tuple[Any, ...]:
    """Stacks layers again, the inverse of `unstack`."""

    def joined(trees: Sequence[Any]) -> Any:
        return jax.tree.map(lambda *x: jnp.stack(x, 1), *trees)

    segments = zip(*chunks, strict=True)
    return tuple(joined([joined(layers) for layers in each]) for each in segments)


def make_buffers(shapes: Any, num_slots: int) -> Any:
    """Makes buffers for trees on each stage, with one more slot that nobody reads."""
    values = itertools.count()

    def one(x: Any) -> jax.Array:
        size, *rest = x.shape
        # Different values, as the compiler merges equal arrays into one, and copies
        # that.
        value = next(values) if jnp.issubdtype(x.dtype, jnp.floating) else 0
        return full((size, num_slots + 1, *rest), x.dtype, value)

    return jax.tree.map(one, shapes)


def read_slot(buffers: Any, slot: jax.Array) -> Any:
    """Reads the tree in a slot of arrays [slots, ...]."""

    def one(x: jax.Array) -> jax.Array:
        # With one slot this is a view and not a copy.
        return x[0] if x.shape[0] == 1 else _in_order(x[slot])

    return jax.tree.map(one, buffers)


def write_slot(buffers: Any, tree: Any, slot: jax.Array | int) -> Any:
    """Writes a tree into a slot of arrays [slots, ...]."""

    def one(x: jax.Array, value: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(x, value.astype(x.dtype), slot, 0)

    return jax.tree.map(one, buffers, tree)


def where(condition: jax.Array, first: Any, second: Any) -> Any:
    """Selects one of two trees."""
    return jax.tree.map(functools.partial(jnp.where, condition), first, second)


def broadcast_from(is_source: jax.Array, tree: Any) -> Any:
    """Sends the tree of one stage to all stages; zeros if no stage is the source."""

    def add(x: jax.Array) -> jax.Array:
        return jax.lax.psum(x, PIPELINE)

    return jax.tree.map(lambda x: by_parts(add, jnp.where(is_source, x, 0)), tree)


def _in_order(x: jax.Array) -> jax.Array:
    """Fixes the memory layout to the order of the dims."""
    # Else a reader of another memory layout would have all slots copied.
    mesh = jax.sharding.get_abstract_mesh()
    if any(mesh.shape[name] > 1 for name in mesh.auto_axes):
        return x  # JAX 0.10 would gather what these axes split
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))
