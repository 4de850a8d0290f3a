"""Codecs: float32 vectors as the bytes that a link carries, and back."""

import math
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from zjax.comm.block_codecs import Float8Blocks, IntegerBlocks, TwoBitBlocks
from zjax.comm.cast_codec import Cast
from zjax.comm.one_bit import OneBit
from zjax.comm.top_k import TopK
from zjax.errors import ConfigError, Problem

Packed = tuple[jax.Array, ...]
"""A vector on the wire: its codes, then float32 scales where the codec has any. Dim 0
follows the vector, so an N-th of each array holds an N-th of the vector."""


@runtime_checkable
class Codec(Protocol):
    """A lossy packing of float32 vectors; implementations are frozen dataclasses.

    A vector with a number that is not finite is decoded to one with such a number.
    """

    @property
    def block(self) -> int:
        """The divisor of the lengths that can be packed."""
        ...

    def encode(self, x: jax.Array) -> Packed:
        """Packs float32[n], n a multiple of `block`."""
        ...

    def decode(self, packed: Packed) -> jax.Array:
        """Restores float32[n] approximately."""
        ...


_CODECS: dict[str, Codec] = {
    "float32": Cast("float32"),
    "bfloat16": Cast("bfloat16"),
    "int8": IntegerBlocks(bits=8),
    "float8": Float8Blocks(),
    "int4": IntegerBlocks(bits=4),
    "int2": TwoBitBlocks(),
    "onebit": OneBit(),
    "top_k": TopK(),
}


def make_codec(name: str) -> Codec:
    """Returns a codec by its name in a config.

    Args:
        name: `float32`, `bfloat16`, `int8`, `float8`, `int4`, `int2`, `onebit` or
            `top_k`.

    Raises:
        ConfigError: There is no such codec.

    Example:
        >>> make_codec("int4").block
        2048
    """
    if name not in _CODECS:
        remedy = f"use one of {', '.join(_CODECS)}"
        raise ConfigError(Problem("codec", name, "does not exist", remedy))
    return _CODECS[name]


def packed_bytes(codec: Codec, n: int) -> int:
    """Bytes of a packed vector of `n` numbers, `n` a multiple of the codec's block.

    Example:
        >>> packed_bytes(make_codec("onebit"), 8192)
        1032
    """
    packed = jax.eval_shape(codec.encode, jax.ShapeDtypeStruct((n,), jnp.float32))
    return sum(math.prod(part.shape) * part.dtype.itemsize for part in packed)
