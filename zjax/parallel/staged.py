"""Arrays with one entry per stage of a pipeline, and programs on them.

Outside of `shard_map` they are [stages, ...], split over the `pipeline` axis; inside,
each stage sees its own entry.
"""

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

STAGED, EVERYWHERE = P(PIPELINE), P()
"""Specs of an array [stages, ...], and of one that is the same on all stages."""


def map_stages(
    run: Callable[..., Any], outs: Any, staged: tuple[Any, ...], *everywhere: Any
) -> Any:
    """Calls `run(*staged, *everywhere)` on every stage, with its entries of `staged`.

    Args:
        run: Returns one tree for each spec of `outs`.
        outs: `STAGED`, `EVERYWHERE` or a tuple of them; a result that is `EVERYWHERE`
            must be the same on all stages.
        staged: Trees of arrays [stages, ...].
        everywhere: Trees that are the same on all stages.
    """
    num_staged = len(staged)

    def of_stage(*args: Any) -> Any:
        local = jax.tree.map(lambda x: x[0], args[:num_staged])
        results = run(*local, *args[num_staged:])
        return jax.tree.map(
            lambda spec, tree: _with_stage(tree) if spec == STAGED else tree,
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


def _with_stage(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[None], tree)


def full(shape: tuple[int, ...], dtype: Any, value: int | float = 0) -> jax.Array:
    """`jnp.full` of a shape [stages, ...], whose other dims the compiler places."""
    spec = P(PIPELINE, *[P.UNCONSTRAINED] * (len(shape) - 1))
    return jax.lax.with_sharding_constraint(jnp.full(shape, value, dtype), spec)


def unstack(
    stages: Sequence[Any], num_layers: Sequence[int], num_chunks: int
) -> list[list[list[Any]]]:
    """Slices layers out of their stacks, which a loop would copy in each iteration.

    Args:
        stages: For each segment, a tree of arrays [stages, chunks, layers, ...].
        num_layers: The number of layers of each segment.
        num_chunks: The number of chunks of each stage.

    Returns:
        By chunk, segment and layer, arrays [stages, ...].
    """

    def layers(segment: Any, number: int, chunk: int) -> list[Any]:
        return [
            jax.tree.map(lambda x, i=i: x[:, chunk, i], segment) for i in range(number)
        ]

    segments = list(zip(stages, num_layers, strict=True))
    return [[layers(*segment, c) for segment in segments] for c in range(num_chunks)]


def stack(chunks: list[list[list[Any]]]) -> tuple[Any, ...]:
    """The inverse of `unstack`."""

    def joined(trees: Sequence[Any]) -> Any:
        return jax.tree.map(lambda *x: jnp.stack(x, 1), *trees)

    segments = zip(*chunks, strict=True)
    return tuple(joined([joined(layers) for layers in each]) for each in segments)


def make_buffers(shapes: Any, num_slots: int) -> Any:
    """Buffers for some trees on each stage, and one more slot that nobody reads.

    Args:
        shapes: A tree of arrays [stages, ...] or their shapes.
        num_slots: Trees that are held at the same time.

    Returns:
        Arrays [stages, num_slots + 1, ...]. Each array of floats starts as another
        number, because the compiler merges equal arrays into one and copies that.
    """
    values = itertools.count()

    def one(x: Any) -> jax.Array:
        size, *rest = x.shape
        value = next(values) if jnp.issubdtype(x.dtype, jnp.floating) else 0
        return full((size, num_slots + 1, *rest), x.dtype, value)

    return jax.tree.map(one, shapes)


def read_slot(buffers: Any, slot: jax.Array) -> Any:
    """The tree in a slot of arrays [slots, ...].

    Example:
        >>> read_slot({"x": jnp.arange(6).reshape(3, 2)}, jnp.int32(1))["x"].tolist()
        [2, 3]
    """

    def one(x: jax.Array) -> jax.Array:
        # With one slot this is a view and not a copy.
        return x[0] if x.shape[0] == 1 else _in_order(x[slot])

    return jax.tree.map(one, buffers)


def write_slot(buffers: Any, tree: Any, slot: jax.Array | int) -> Any:
    """Arrays [slots, ...] with a tree written into a slot."""

    def one(x: jax.Array, value: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(x, value.astype(x.dtype), slot, 0)

    return jax.tree.map(one, buffers, tree)


def where(condition: jax.Array, first: Any, second: Any) -> Any:
    """`jnp.where` of two trees."""
    return jax.tree.map(functools.partial(jnp.where, condition), first, second)


def broadcast_from(is_source: jax.Array, tree: Any) -> Any:
    """Sends the tree of one stage to all stages.

    Args:
        is_source: bool[], true on that stage alone, or on none: all then get zeros.
        tree: The arrays of each stage.
    """

    def add(x: jax.Array) -> jax.Array:
        return jax.lax.psum(x, PIPELINE)

    return jax.tree.map(lambda x: by_parts(add, jnp.where(is_source, x, 0)), tree)


def _in_order(x: jax.Array) -> jax.Array:
    # A reader that wants another memory layout would have all slots copied.
    mesh = jax.sharding.get_abstract_mesh()
    if any(mesh.shape[name] > 1 for name in mesh.auto_axes):
        return x  # JAX 0.10 would gather what these axes split
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))
