"""Random keys derived from a number, a name or data."""

import zlib
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


def fold_in(key: jax.Array | None, number: int | Int[Array, ""]) -> jax.Array | None:
    """Folds a number into a key, and passes None, the key in evaluation, through."""
    return None if key is None else jax.random.fold_in(key, number)


def fold_name(key: jax.Array, name: str) -> jax.Array:
    """Derives a key from a name; two names collide with probability 2**-32."""
    # Not `hash`, which differs between processes.
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


def key_from_data(batch: Any) -> jax.Array:
    """Derives a key from a tree of numeric arrays: equal for equal batches on any mesh.

    Example:
        >>> one, other = {"x": jnp.arange(3.0)}, {"x": jnp.arange(1.0, 4.0)}
        >>> keys = key_from_data(one), key_from_data(one), key_from_data(other)
        >>> bool(keys[0] == keys[1]), bool(keys[0] == keys[2])
        (True, False)
    """
    key = jax.random.key(0)
    for leaf in jax.tree.leaves(batch):
        key = jax.random.fold_in(key, jnp.sum(_bits(leaf), dtype=jnp.uint32))
    return key


def _bits(x: jax.Array) -> jax.Array:
    """Views numbers as unsigned integers, to be summed exactly in any order."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        width = jnp.finfo(x.dtype).bits
        x = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{width}"))
    return x.astype(jnp.uint32)


def loss_key(key: jax.Array | None) -> jax.Array | None:
    """Derives the key of a user's loss from the microbatch key; None in evaluation."""
    return None if key is None else fold_name(key, "loss")


def block_key(key: jax.Array | None, number: int | Int[Array, ""]) -> jax.Array | None:
    """Derives the key of a block from the microbatch key; None in evaluation.

    The key equals `fold_in(loss_key(key), number)`; `number` is 0 for the embedding and
    i + 1 for block i.
    """
    return fold_in(loss_key(key), number)
