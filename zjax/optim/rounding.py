"""Numbers rounded at random to fewer bits, so that they are right on average.

To the nearest, a number that moves by less than half of the gap between its neighbours
never moves. Here it is rounded up as often as it lies near the upper neighbour. The
random bits are a function of step and element, and so the same on every mesh.

In eight bits a number is a sign, if it may have one, an exponent, and three bits of
fraction, relative to the largest number of its row or of its column, whichever is
smaller. Unlike the largest of a block, neither is cut apart when a matrix is split.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int8, Int32, UInt8, UInt32

_DROPPED_BITS = 20
"""Of the 23 bits of fraction in float32."""
_ONE = 127 << 3
"""The other bits of 1.0."""


class Quantized(NamedTuple):
    """A matrix in eight bits.

    Args:
        codes: int8, or uint8 for numbers that are never negative; 0 is zero.
        scales: float32, one array for each dim that does not stack matrices: the
            largest magnitudes over the other dims, which have size 1.
    """

    codes: Any
    scales: tuple[Any, ...]


def random_bits(
    shape: tuple[int, ...], step: Int32[Array, ""], salt: int
) -> UInt32[Array, "..."]:
    """One word of random bits per element, by hashing its index.

    Args:
        shape: Of the array.
        step: Another step gives other bits.
        salt: Another array gives other bits; below 2**32.

    Returns:
        The words: the same on every mesh, and computed without communication.

    Reference:
        The finalizer of MurmurHash3 by Appleby.
    """
    seed = jnp.uint32(salt) + jnp.asarray(step).astype(jnp.uint32)
    index = jnp.broadcast_to(_mix(seed), shape)
    for dim in range(len(shape)):
        stride = jnp.uint32(math.prod(shape[dim + 1 :]) % 2**32)
        index += stride * jax.lax.broadcasted_iota(jnp.uint32, shape, dim)
    return _mix(index)


def round_to_bfloat16(
    x: Float[Array, "..."], bits: UInt32[Array, "..."]
) -> Float[Array, "..."]:
    """Rounds to one of the two nearest bfloat16, to `x` on average.

    Args:
        x: float32.
        bits: Random words.

    Returns:
        bfloat16 of the same shape.

    Reference:
        Stochastic rounding, Gupta et al., arXiv:1502.02551.
    """
    words = jax.lax.bitcast_convert_type(x, jnp.uint32) + (bits >> 16)
    upper = jax.lax.bitcast_convert_type(words & jnp.uint32(0xFFFF0000), jnp.float32)
    return upper.astype(jnp.bfloat16)


def measure(
    x: Float[Array, "..."], shapes: list[tuple[int, ...]]
) -> tuple[Float[Array, "..."], ...]:
    """The largest magnitudes over some dims.

    Args:
        x: float32.
        shapes: That of `x` with 1 for the dims that are to go, one for each result.

    Returns:
        One array for each shape.
    """
    dims = [tuple(d for d, n in enumerate(shape) if n == 1) for shape in shapes]
    return tuple(jnp.max(jnp.abs(x), axis=axes, keepdims=True) for axes in dims)


def quantize(
    x: Float[Array, "..."],
    scales: tuple[Float[Array, "..."], ...],
    bits: UInt32[Array, "..."],
    dtype: Any,
) -> Quantized:
    """Rounds to eight bits, to `x` on average.

    Signed codes reach from the scale down to 2**-16 of it, and below to zero. Unsigned
    ones reach down to 2**-32, and what is less becomes that, unless it is zero: nothing
    that is to be divided by is rounded to zero.

    Args:
        x: float32; not negative if the codes have no sign.
        scales: As `measure` finds them.
        bits: Random words.
        dtype: Of the codes, int8 or uint8.

    Returns:
        Codes and scales.

    Reference:
        Scales of rows and columns: Li et al., arXiv:2309.01507. Optimizers in eight
        bits: Dettmers et al., arXiv:2110.02861.
    """
    scale = functools.reduce(jnp.minimum, scales)
    part = jnp.where(scale > 0, jnp.abs(x) / jnp.where(scale > 0, scale, 1), 0)
    most = jnp.iinfo(dtype).max
    words = jax.lax.bitcast_convert_type(part, jnp.uint32)
    words = (words + (bits >> (32 - _DROPPED_BITS))) >> _DROPPED_BITS
    codes = jnp.clip(words.astype(jnp.int32) - (_ONE - most), 1, most)
    smallest = _value(jnp.ones((), dtype))
    signed = jnp.issubdtype(dtype, jnp.signedinteger)
    chance = (bits >> 8).astype(jnp.float32) * 2.0**-24 if signed else 0.0
    codes = jnp.where((part < smallest) & (part <= smallest * chance), 0, codes)
    return Quantized((jnp.sign(x).astype(jnp.int32) * codes).astype(dtype), scales)


def dequantize(quantized: Quantized) -> Float[Array, "..."]:
    """The numbers that codes and scales stand for.

    Args:
        quantized: A matrix in eight bits.

    Returns:
        float32 in the shape of the codes.
    """
    return _value(quantized.codes) * functools.reduce(jnp.minimum, quantized.scales)


def _value(codes: Int8[Array, "..."] | UInt8[Array, "..."]) -> Float[Array, "..."]:
    most = jnp.iinfo(codes.dtype).max
    wide = codes.astype(jnp.int32)
    words = (jnp.abs(wide) + (_ONE - most)) << _DROPPED_BITS
    return jnp.sign(wide) * jax.lax.bitcast_convert_type(words, jnp.float32)


def _mix(words: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    words = (words ^ (words >> 16)) * jnp.uint32(0x85EBCA6B)
    words = (words ^ (words >> 13)) * jnp.uint32(0xC2B2AE35)
    return words ^ (words >> 16)
