"""Stochastic rounding of float32 to bfloat16 and to eight bits.

Rounding to nearest loses every change below half of the gap between two numbers. Here a
number is rounded up with a probability equal to its distance from the lower neighbour,
which is right on average. The random bits are a function of step and element, hence the
same on every mesh.

An eight-bit number has an exponent, three bits of fraction and, if signed, a sign. It
is relative to the largest number of its row or of its column, whichever is smaller;
unlike blocks, rows and columns stay whole when a matrix is sharded.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int8, Int32, UInt8, UInt32

_DROPPED_BITS = 20
"""Fraction bits of float32 (23) that eight-bit numbers lack."""
_ONE = 127 << 3
"""1.0 without its dropped bits."""


class Quantized(NamedTuple):
    """A matrix in eight bits.

    Args:
        codes: int8, or uint8 for numbers that are never negative; 0 is zero.
        scales: float32 arrays, one for each dim that does not stack matrices: the
            largest magnitudes over the other dims, which have size 1.
    """

    codes: Any
    scales: tuple[Any, ...]


def random_bits(
    shape: tuple[int, ...], step: Int32[Array, ""], salt: int
) -> UInt32[Array, "..."]:
    """One word of random bits per element, from a hash of its index.

    The words depend on the step and, below 2**32, the `salt` of the array. They are the
    same on every mesh, and need no communication.

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
    """Rounds float32[...] to a neighbouring bfloat16 number, to `x` on average.

    Reference:
        Stochastic rounding, Gupta et al., arXiv:1502.02551.
    """
    words = jax.lax.bitcast_convert_type(x, jnp.uint32) + (bits >> 16)
    upper = jax.lax.bitcast_convert_type(words & jnp.uint32(0xFFFF0000), jnp.float32)
    return upper.astype(jnp.bfloat16)


def measure(x: Float[Array, "..."], shape: tuple[int, ...]) -> Float[Array, "..."]:
    """Computes the largest magnitudes of float32[...] over the dims of size 1."""
    axes = tuple(dim for dim, size in enumerate(shape) if size == 1)
    return jnp.max(jnp.abs(x), axis=axes, keepdims=True)


def quantize(
    x: Float[Array, "..."],
    scales: tuple[Float[Array, "..."], ...],
    bits: UInt32[Array, "..."],
    dtype: Any,
) -> Quantized:
    """Rounds float32[...] to eight bits, to `x` on average.

    Signed codes reach from the scale down to 2**-16 of it, then to zero. Unsigned ones,
    for numbers that are not negative, reach down to 2**-32; smaller numbers become
    that, so that no divisor becomes zero. `scales` come from `measure`.

    Reference:
        Scales of rows and columns: Li et al., arXiv:2309.01507. Optimizers in eight
        bits: Dettmers et al., arXiv:2110.02861.
    """
    relative = jnp.abs(x) * functools.reduce(jnp.maximum, map(_inverse, scales))
    max_code = jnp.iinfo(dtype).max
    words = jax.lax.bitcast_convert_type(relative, jnp.uint32)
    words = (words + (bits >> (32 - _DROPPED_BITS))) >> _DROPPED_BITS
    codes = jnp.clip(words.astype(jnp.int32) - (_ONE - max_code), 1, max_code)
    smallest = _value(jnp.ones((), dtype))
    signed = jnp.issubdtype(dtype, jnp.signedinteger)
    chance = (bits >> 8).astype(jnp.float32) * (2.0**-24 * smallest) if signed else 0.0
    codes = jnp.where(relative <= chance, 0, codes)
    return Quantized(jnp.where(x < 0, -codes, codes).astype(dtype), scales)


def dequantize(quantized: Quantized) -> Float[Array, "..."]:
    """Converts codes and scales to float32 in the shape of the codes."""
    return _value(quantized.codes) * functools.reduce(jnp.minimum, quantized.scales)


def _inverse(scale: Float[Array, "..."]) -> Float[Array, "..."]:
    """1 / scale, and 0 for 0; small enough to be divided once per row and column."""
    return jnp.where(scale > 0, 1 / jnp.where(scale > 0, scale, 1), 0)


def _value(codes: Int8[Array, "..."] | UInt8[Array, "..."]) -> Float[Array, "..."]:
    max_code = jnp.iinfo(codes.dtype).max
    wide = codes.astype(jnp.int32)
    words = (jnp.abs(wide) + (_ONE - max_code)) << _DROPPED_BITS
    return jnp.sign(wide) * jax.lax.bitcast_convert_type(words, jnp.float32)


def _mix(words: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    words = (words ^ (words >> 16)) * jnp.uint32(0x85EBCA6B)
    words = (words ^ (words >> 13)) * jnp.uint32(0xC2B2AE35)
    return words ^ (words >> 16)
