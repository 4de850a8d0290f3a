"""Random keys of what has a number or a name."""

import zlib
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


def fold_in(key: jax.Array | None, number: int | Int[Array, ""]) -> jax.Array | None:
    """Derives the key of something that has a number.

    Args:
        key: Random key; None is evaluation.
        number: 0 or more.

    Returns:
        A key of its own; None where there is none.

    Example:
        >>> fold_in(None, 3) is None
        True
    """
    return None if key is None else jax.random.fold_in(key, number)


def fold_name(key: jax.Array, name: str) -> jax.Array:
    """Derives the key of something that has a name.

    Args:
        key: Random key.
        name: Any text; other names give other keys (but for one pair in 2**32).

    Returns:
        A key that depends on nothing else, whatever else draws from `key`.

    Example:
        >>> key = jax.random.key(0)
        >>> bool(fold_name(key, "loss") == fold_name(key, "model"))
        False
    """
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


def key_of(batch: Any) -> jax.Array:
    """Derives a key from numbers: the same for equal batches, on every mesh.

    Args:
        batch: A tree of arrays of numbers.

    Returns:
        A random key.

    Example:
        >>> one, other = {"x": jnp.arange(3.0)}, {"x": jnp.arange(1.0, 4.0)}
        >>> bool(key_of(one) == key_of(one)), bool(key_of(one) == key_of(other))
        (True, False)
    """
    key = jax.random.key(0)
    for leaf in jax.tree.leaves(batch):
        key = jax.random.fold_in(key, jnp.sum(_bits(leaf), dtype=jnp.uint32))
    return key


def _bits(x: jax.Array) -> jax.Array:
    """Numbers as unsigned integers, whose sum is exact in any order."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        width = jnp.finfo(x.dtype).bits
        x = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{width}"))
    return x.astype(jnp.uint32)


def loss_key(key: jax.Array | None) -> jax.Array | None:
    """The key that a loss of yours gets.

    Args:
        key: Of the microbatch; None is evaluation.

    Returns:
        A key of its own; None where there is none.

    Example:
        >>> loss_key(None) is None
        True
    """
    return None if key is None else fold_name(key, "loss")


def part_key(key: jax.Array | None, number: int | Int[Array, ""]) -> jax.Array | None:
    """The key of a part of a model that is a line of blocks.

    Args:
        key: Of the microbatch; None is evaluation.
        number: 0 for the embedding, i + 1 for block i.

    Returns:
        What a loss that folds the same number into its own key gets for this part.

    Example:
        >>> key = jax.random.key(0)
        >>> bool(part_key(key, 2) == fold_in(loss_key(key), 2))
        True
    """
    return fold_in(loss_key(key), number)
