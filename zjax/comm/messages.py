"""Collectives that send several arrays as one message, inside `jax.shard_map`.

Over a slow link, and between busy processes, each further collective costs a wait.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


def all_gather(tree: Any, axes: str | Sequence[str]) -> Any:
    """Gathers arrays of any dtypes into arrays [N, ...] by one collective.

    Example:
        >>> gather = jax.vmap(lambda x: all_gather((x, x > 1), "i"), axis_name="i")
        >>> [found[0].tolist() for found in gather(jnp.array([1, 2]))]
        [[1, 2], [False, True]]
    """
    parts, form = jax.tree.flatten(tree)
    message = _joined(parts, rows=1)
    gathered = jax.lax.all_gather(message, axes, tiled=True)
    shapes = [x.shape for x in parts]
    return jax.tree.unflatten(form, _split(gathered, parts, shapes))


def exchange_chunks(tree: Any, axis: str) -> Any:
    """Sends the j-th of N chunks of each array to device j; returns [N, size / N]."""
    parts, form = jax.tree.flatten(tree)
    number = jax.lax.axis_size(axis)
    received = jax.lax.all_to_all(_joined(parts, rows=number), axis, 0, 0)
    shapes = [(x.size // number,) for x in parts]
    return jax.tree.unflatten(form, _split(received, parts, shapes))


def _joined(parts: Sequence[jax.Array], rows: int) -> jax.Array:
    """Joins arrays to [rows, ...]: a single array unchanged, several as bytes."""
    flat = [x.reshape(rows, -1) for x in parts]
    if len(flat) == 1:
        return flat[0]
    # XLA for CPUs may crash where it views arrays without elements.
    return jnp.concatenate([x.view(jnp.uint8) for x in flat if x.size], axis=1)


def _split(
    message: jax.Array,
    parts: Sequence[jax.Array],
    shapes: Sequence[tuple[int, ...]],
) -> list[jax.Array]:
    """Splits each row of a message into arrays in the dtypes of `parts`."""
    if len(parts) == 1:
        return [message.reshape(len(message), *shapes[0])]
    found, start = [], 0
    for part, shape in zip(parts, shapes, strict=True):
        end = start + math.prod(shape) * part.dtype.itemsize
        own = message[:, start:end]
        # Arrays without elements are not in the message, and XLA cannot view them.
        own = own.view(part.dtype) if part.size else own.astype(part.dtype)
        found.append(own.reshape(len(message), *shape))
        start = end
    return found
