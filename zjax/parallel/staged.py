"""Arrays of which each stage of a pipeline has its own, and programs on them.

Outside of a map by hand they are [stages, ...], split over the `pipeline` axis; inside
each stage sees what is its own.
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
"""Places of an array [stages, ...], and of one that all stages have."""


def map_stages(
    run: Callable[..., Any], outs: Any, staged: tuple[Any, ...], *everywhere: Any
) -> Any:
    """Calls `run(*staged, *everywhere)` on every stage, with its part of `staged`.

    Args:
        run: Returns what `outs` has places for.
        outs: `STAGED`, `EVERYWHERE` or a tuple of them.
        staged: Trees of arrays [stages, ...].
        everywhere: Trees that every stage sees whole.

    Returns:
        The results; what is `EVERYWHERE` must be the same on all stages.
    """
    num_staged = len(staged)

    def of_stage(*args: Any) -> Any:
        own = jax.tree.map(lambda x: x[0], args[:num_staged])
        results = run(*own, *args[num_staged:])
        return jax.tree.map(
            lambda place, tree: _apart(tree) if place == STAGED else tree,
            outs,
            results,
            is_leaf=lambda x: isinstance(x, P),
        )

    places = (*[STAGED] * num_staged, *[EVERYWHERE] * len(everywhere))
    return jax.shard_map(
        of_stage,
        in_specs=places,
        out_specs=outs,
        axis_names={PIPELINE},
        check_vma=False,
    )(*staged, *everywhere)


def _apart(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[None], tree)


def make_room(shape: tuple[int, ...], dtype: Any, value: int | float = 0) -> jax.Array:
    """An array of one value, of which each stage has its part.

    Args:
        shape: The stages first.
        dtype: Of the elements.
        value: Of all elements.

    Returns:
        An array whose other dims the compiler places.
    """
    spec = P(PIPELINE, *[P.UNCONSTRAINED] * (len(shape) - 1))
    return jax.lax.with_sharding_constraint(jnp.full(shape, value, dtype), spec)


def cut(stages: Sequence[Any]) -> list[list[list[Any]]]:
    """Takes layers out of their stacks, which in a loop each turn would copy.

    Args:
        stages: For each segment, a tree of arrays [stages, chunks, layers, ...].

    Returns:
        By chunk, segment and layer, arrays [stages, ...].
    """

    def layers(segment: Any, chunk: int) -> list[Any]:
        number = jax.tree.leaves(segment)[0].shape[2]
        return [
            jax.tree.map(lambda x, i=i: x[:, chunk, i], segment) for i in range(number)
        ]

    num_chunks = jax.tree.leaves(stages)[0].shape[1]
    return [[layers(segment, c) for segment in stages] for c in range(num_chunks)]


def stack(chunks: list[list[list[Any]]]) -> tuple[Any, ...]:
    """The inverse of `cut`."""

    def joined(trees: Sequence[Any]) -> Any:
        return jax.tree.map(lambda *x: jnp.stack(x, 1), *trees)

    segments = zip(*chunks, strict=True)
    return tuple(joined([joined(layers) for layers in each]) for each in segments)


def make_buffers(shapes: Any, num_slots: int) -> Any:
    """Room for some trees on each stage, and for one more, which none reads.

    Args:
        shapes: A tree of arrays [stages, ...] or their shapes.
        num_slots: Trees that wait at the same time.

    Returns:
        Arrays [stages, num_slots + 1, ...]. Those of floats start as different numbers,
        as far as their dtype has these: of equal arrays the compiler would make one,
        and copies of that.
    """
    values = itertools.count()

    def one(x: Any) -> jax.Array:
        size, *rest = x.shape
        value = next(values) if jnp.issubdtype(x.dtype, jnp.floating) else 0
        return make_room((size, num_slots + 1, *rest), x.dtype, value)

    return jax.tree.map(one, shapes)


def read(buffers: Any, slot: jax.Array) -> Any:
    """The tree in a slot.

    Args:
        buffers: Arrays [slots, ...].
        slot: int32[].

    Returns:
        Arrays [...].

    Example:
        >>> read({"x": jnp.arange(6).reshape(3, 2)}, jnp.int32(1))["x"].tolist()
        [2, 3]
    """

    def one(x: jax.Array) -> jax.Array:
        # Of one slot the tree is what there is, and not a copy.
        return x[0] if x.shape[0] == 1 else _in_order(x[slot])

    return jax.tree.map(one, buffers)


def written(buffers: Any, tree: Any, slot: jax.Array | int) -> Any:
    """The buffers with a tree in a slot.

    Args:
        buffers: Arrays [slots, ...].
        tree: Arrays [...].
        slot: int32[].

    Returns:
        Arrays [slots, ...].
    """

    def one(x: jax.Array, value: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(x, value.astype(x.dtype), slot, 0)

    return jax.tree.map(one, buffers, tree)


def either(condition: jax.Array, first: Any, second: Any) -> Any:
    """One of two trees.

    Args:
        condition: bool[].
        first: Where it holds.
        second: Where not.

    Returns:
        Either of them.
    """
    return jax.tree.map(functools.partial(jnp.where, condition), first, second)


def tell(is_teller: jax.Array, tree: Any) -> Any:
    """What one stage has, on all of them.

    Args:
        is_teller: bool[], true on that stage alone, or on none.
        tree: Of each stage.

    Returns:
        That of the teller; zeros where there is none.
    """

    def add(x: jax.Array) -> jax.Array:
        return jax.lax.psum(x, PIPELINE)

    return jax.tree.map(lambda x: by_parts(add, jnp.where(is_teller, x, 0)), tree)


def _in_order(x: jax.Array) -> jax.Array:
    # For a reader that wants its bytes in another order, all slots would be copied.
    mesh = jax.sharding.get_abstract_mesh()
    if any(mesh.shape[name] > 1 for name in mesh.auto_axes):
        return x  # JAX 0.10 would gather what these axes split
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))
