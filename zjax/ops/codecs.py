"""Codecs: float32 vectors as the bytes that a link carries, and back."""

import dataclasses
import math
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from zjax.errors import ConfigError, Problem

_SMALLEST = 2.0**-100
"""Blocks of smaller magnitude are sent as zeros: the inverse of the scale could
overflow."""
_BOUNDARY = 1.25
"""Boundary between the two magnitudes of a block, over the mean magnitude; the best
boundary is 1.23 for normal numbers, 1.59 for numbers of two exponential tails."""


@dataclasses.dataclass(frozen=True)
class IntegerBlocks:
    """Rounds numbers to multiples of the block's largest magnitude over 2^(bits-1).

    The error is at most half a multiple. It is a whole multiple for a positive maximum,
    whose code would be 2^(bits-1) and is one less.

    Args:
        bits: 8, or 4 for two codes a byte, the first in the low half.
        block: Consecutive numbers that share a float32 scale.

    Reference:
        Wang et al., ZeRO++ (arXiv:2306.10209), section 4.1.
    """

    bits: int
    block: int = 2048

    def encode(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Packs float32[n] to int8[n] or uint8[n / 2], and one scale a block."""
        levels = 2.0 ** (self.bits - 1)
        blocks, scales = _scaled(x, self.block, levels)
        # The positive maximum rounds to `levels`, which has no code.
        codes = jnp.clip(jnp.round(blocks), -levels, levels - 1).astype(jnp.int8)
        return _pack_nibbles(codes) if self.bits == 4 else codes.reshape(-1), scales

    def decode(self, packed: tuple[jax.Array, ...]) -> jax.Array:
        """Restores float32[n]."""
        codes, scales = packed
        if self.bits == 4:
            codes = _unpack_nibbles(codes)
        return _rescaled(codes, scales, self.block)


@dataclasses.dataclass(frozen=True)
class Float8Blocks:
    """Casts numbers to float8_e4m3fn, scaled to a maximum of 448 in each block.

    Args:
        block: Consecutive numbers that share a float32 scale.

    Reference:
        Micikevicius et al., FP8 Formats for Deep Learning (arXiv:2209.05433).
    """

    block: int = 2048

    def encode(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Packs float32[n] to uint8[n] and one scale a block."""
        largest = float(jnp.finfo(jnp.float8_e4m3fn).max)
        blocks, scales = _scaled(x, self.block, largest)
        codes = blocks.reshape(-1).astype(jnp.float8_e4m3fn)
        return jax.lax.bitcast_convert_type(codes, jnp.uint8), scales

    def decode(self, packed: tuple[jax.Array, ...]) -> jax.Array:
        """Restores float32[n]."""
        codes, scales = packed
        numbers = jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn)
        return _rescaled(numbers, scales, self.block)


@dataclasses.dataclass(frozen=True)
class TwoBitBlocks:
    """Replaces numbers by a low or a high magnitude of the block, with the sign.

    The two magnitudes are the mean magnitudes of the numbers below and from a boundary
    on, so the error is never larger than the block. A code has the sign in the high
    bit; four codes go in a byte, the first lowest.

    Args:
        block: Consecutive numbers that share the two float32 magnitudes.

    Reference:
        Therien et al., MuLoCo (arXiv:2505.23725), on statistical quantization.
    """

    block: int = 2048

    def encode(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Packs float32[n] to uint8[n / 4] and float32[n / block * 2]."""
        blocks = x.reshape(-1, self.block)
        magnitudes = jnp.abs(blocks)
        mean = (magnitudes / self.block).sum(axis=1, keepdims=True)  # may not overflow
        # Multiples of the largest magnitude would send most numbers of a block as 0.
        is_high = magnitudes >= _BOUNDARY * mean
        means = [mean_where(magnitudes, ~is_high), mean_where(magnitudes, is_high)]
        codes = is_high.astype(jnp.uint8) | (blocks < 0).astype(jnp.uint8) << 1
        a, b, c, d = codes.reshape(-1, 4).T
        fours = a | b << 2 | c << 4 | d << 6
        return fours, jnp.stack(means, axis=1).reshape(-1)

    def decode(self, packed: tuple[jax.Array, ...]) -> jax.Array:
        """Restores float32[n]."""
        fours, scales = packed
        codes = fours[:, None] >> jnp.array([[0, 2, 4, 6]], jnp.uint8)
        codes = codes.reshape(-1, self.block)
        low, high = scales.reshape(-1, 2, 1).swapaxes(0, 1)
        magnitudes = jnp.where(codes & 1 == 1, high, low)
        return jnp.where(codes & 2 == 2, -magnitudes, magnitudes).reshape(-1)


def mean_where(x: jax.Array, where: jax.Array) -> jax.Array:
    """Means of rows over selected numbers; 0 where no number is selected."""
    count = jnp.maximum(where.sum(axis=1, keepdims=True), 1)
    # Divided before the sum, which could overflow.
    return jnp.where(where, x / count, 0).sum(axis=1)


def _scaled(x: jax.Array, block: int, largest: float) -> tuple[jax.Array, jax.Array]:
    """Scales blocks to a maximum of `largest`; returns blocks and scales."""
    blocks = x.reshape(-1, block)
    magnitudes = _largest_magnitudes(blocks)
    scales = jnp.where(magnitudes < _SMALLEST, 1.0, magnitudes / largest)
    # One division per block instead of one per number.
    return blocks * (1 / scales)[:, None], scales


def _largest_magnitudes(blocks: jax.Array) -> jax.Array:
    """Largest magnitudes of blocks; NaN for blocks with NaN.

    The maximum of floats may ignore NaN on CPUs. The words of floats order as
    magnitudes do, with NaN above all.
    """
    words = jax.lax.bitcast_convert_type(jnp.abs(blocks), jnp.int32)
    return jax.lax.bitcast_convert_type(words.max(axis=1), jnp.float32)


def _rescaled(codes: jax.Array, scales: jax.Array, block: int) -> jax.Array:
    """Multiplies codes by the scale of the block."""
    numbers = codes.astype(jnp.float32).reshape(-1, block)
    return (numbers * scales[:, None]).reshape(-1)


def _pack_nibbles(codes: jax.Array) -> jax.Array:
    """Packs two 4-bit codes into a byte, the first in the low half."""
    low, high = codes.astype(jnp.uint8).reshape(-1, 2).T
    # Masked: the upper half of a negative code is all ones.
    return low & 15 | high << 4


def _unpack_nibbles(pairs: jax.Array) -> jax.Array:
    """Unpacks bytes into signed 4-bit codes."""
    signed = jax.lax.bitcast_convert_type(pairs, jnp.int8)
    # A right shift of a signed integer repeats the sign bit.
    return (signed[:, None] << jnp.array([[4, 0]], jnp.int8) >> 4).reshape(-1)


@dataclasses.dataclass(frozen=True)
class Cast:
    """Sends `dtype`, float32 or bfloat16, rounded to nearest even.

    The words are sent as unsigned integers: XLA for CPUs would widen bfloat16.
    """

    dtype: str
    block: int = 1

    def encode(self, x: jax.Array) -> tuple[jax.Array]:
        """Packs float32[n] to uint32[n] or uint16[n]."""
        words = jnp.dtype(f"uint{8 * jnp.dtype(self.dtype).itemsize}")
        return (jax.lax.bitcast_convert_type(x.astype(self.dtype), words),)

    def decode(self, packed: tuple[jax.Array, ...]) -> jax.Array:
        """Restores float32[n]."""
        (words,) = packed
        x = jax.lax.bitcast_convert_type(words, jnp.dtype(self.dtype))
        return x.astype(jnp.float32)


_SHIFTS = range(7, -1, -1)
"""Shifts of the eight signs of a byte: `jnp.packbits` puts the first highest."""


@dataclasses.dataclass(frozen=True)
class OneBit:
    """Replaces each number by the sign times the root mean square of the block.

    The sign of 0 is positive, so a vector needs error feedback to come out right. One
    scale for arrays of unlike magnitudes would drown the small arrays, whose steps are
    as large as the steps of large arrays: the scales of blocks add 0.8 % to the bits.

    Args:
        block: Numbers per scale, a multiple of 8.

    Reference:
        Tang et al., 1-bit Adam (arXiv:2102.02888), section 4, with a scale per tensor.
    """

    block: int = 4096

    def encode(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Packs float32[n] to uint8[n / 8] and float32[n / block]."""
        squares = (x * x).reshape(-1, 8).sum(axis=1)
        # Both read x in one pass: XLA must not sum all squares in a second pass.
        bits, squares = jax.lax.optimization_barrier((jnp.packbits(x >= 0), squares))
        squares = squares.reshape(-1, self.block // 8).sum(axis=1)
        return bits, jnp.sqrt(squares / self.block)

    def decode(self, packed: tuple[jax.Array, ...]) -> jax.Array:
        """Restores float32[n]."""
        bits, scales = packed
        is_positive = bits[:, None] >> jnp.array([_SHIFTS], jnp.uint8) & 1
        signs = jnp.where(is_positive == 1, 1.0, -1.0)
        return (signs.reshape(-1, self.block) * scales[:, None]).reshape(-1)


_INDEX_BITS = 14
"""Bits of the position in a block; a code adds a bit of magnitude, and the sign."""


@dataclasses.dataclass(frozen=True)
class TopK:
    """Sends the `kept` largest magnitudes of each block as one of two values.

    The two values of a block are mean magnitudes: of kept numbers above the middle
    between the largest and the smallest kept magnitude, and of kept numbers below. The
    error is never larger than the vector.

    Args:
        kept: Numbers sent of a block.
        block: Consecutive numbers to choose from, at most 2^14.

    Reference:
        Sarfi et al., Communication Efficient LLM Pre-training with SparseLoCo
        (arXiv:2508.15706), section 3.
    """

    kept: int = 64
    block: int = 4096

    def encode(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Packs float32[n] to uint16[n / block * kept] and float32[n / block * 2]."""
        blocks = x.reshape(-1, self.block)
        magnitudes, positions = jax.lax.top_k(jnp.abs(blocks), self.kept)
        is_negative = jnp.take_along_axis(blocks, positions, axis=1) < 0
        # Not `magnitudes[:, 0]`: XLA would sort whole blocks for slices of the result.
        # NaN is first.
        largest, smallest = magnitudes.max(axis=1), magnitudes.min(axis=1)
        # Halved before the sum, which could overflow.
        is_high = magnitudes >= (largest / 2 + smallest / 2)[:, None]
        means = [mean_where(magnitudes, ~is_high), mean_where(magnitudes, is_high)]
        scales = jnp.stack(means, axis=1)
        codes = positions | is_high << _INDEX_BITS | is_negative << _INDEX_BITS + 1
        return codes.astype(jnp.uint16).reshape(-1), scales.reshape(-1)

    def decode(self, packed: tuple[jax.Array, ...]) -> jax.Array:
        """Restores float32[n]."""
        codes = packed[0].astype(jnp.int32).reshape(-1, self.kept)
        low, high = packed[1].reshape(-1, 2, 1).swapaxes(0, 1)
        magnitudes = jnp.where(codes >> _INDEX_BITS & 1 == 1, high, low)
        values = jnp.where(codes >> _INDEX_BITS + 1 == 1, -magnitudes, magnitudes)
        rows = jnp.arange(len(codes))[:, None]
        positions = codes & 2**_INDEX_BITS - 1
        blocks = jnp.zeros((len(codes), self.block)).at[rows, positions].set(values)
        return blocks.reshape(-1)


Packed = tuple[jax.Array, ...]
"""A vector on the wire: codes, then float32 scales where the codec has any. Dim 0
follows the vector, so an N-th of each array holds an N-th of the vector."""


@runtime_checkable
class Codec(Protocol):
    """A lossy packing of float32 vectors; implementations are frozen dataclasses.

    A vector with a number that is not finite is decoded to a vector with such a number.
    """

    @property
    def block(self) -> int:
        """Divisor of the lengths that can be packed."""
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
    """Returns a codec by the name in a config.

    Args:
        name: `float32`, `bfloat16`, `int8`, `float8`, `int4`, `int2`, `onebit` or
            `top_k`.

    Raises:
        ConfigError: There is no such codec.
    """
    if name not in _CODECS:
        remedy = f"use one of {', '.join(_CODECS)}"
        raise ConfigError(Problem("codec", name, "does not exist", remedy))
    return _CODECS[name]


def packed_bytes(codec: Codec, n: int) -> int:
    """Bytes of a packed vector of `n` numbers, `n` a multiple of the codec's block."""
    packed = jax.eval_shape(codec.encode, jax.ShapeDtypeStruct((n,), jnp.float32))
    return sum(math.prod(part.shape) * part.dtype.itemsize for part in packed)
