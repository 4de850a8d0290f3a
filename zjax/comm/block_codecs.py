"""Codecs that give each block of a vector scales of its own."""

import dataclasses

import jax
import jax.numpy as jnp

_SMALLEST = 2.0**-100
"""Blocks below it in magnitude are sent as zeros: the inverse of their scale could
overflow."""
_BOUNDARY = 1.25
"""Between the two magnitudes of a block, over its mean magnitude; the best for normal
numbers is 1.23, for those of two exponential tails 1.59."""


@dataclasses.dataclass(frozen=True)
class IntegerBlocks:
    """Rounds numbers to multiples of their block's largest magnitude over 2^(bits-1).

    The error is at most half a multiple, and one where a number is the positive
    maximum, whose code would be 2^(bits-1) and is one less.

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
    """Casts numbers to float8_e4m3fn, whose largest, 448, is the block's maximum.

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
    """Replaces numbers by a low or a high magnitude of their block, with their sign.

    The two are the mean magnitudes of the numbers below and from a boundary on, so the
    error is never larger than the block. A code has the sign in its high bit; four go
    in a byte, the first lowest.

    Args:
        block: Consecutive numbers that share the two, which are float32.

    Reference:
        Therien et al., MuLoCo (arXiv:2505.23725), on statistical quantization.
    """

    block: int = 2048

    def encode(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Packs float32[n] to uint8[n / 4] and float32[n / block * 2]."""
        blocks = x.reshape(-1, self.block)
        magnitudes = jnp.abs(blocks)
        mean = (magnitudes / self.block).sum(axis=1, keepdims=True)  # may not overflow
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
    """Means of rows over some of their numbers; 0 for none."""
    count = jnp.maximum(where.sum(axis=1, keepdims=True), 1)
    return jnp.where(where, x / count, 0).sum(axis=1)


def _scaled(x: jax.Array, block: int, largest: float) -> tuple[jax.Array, jax.Array]:
    """Divides blocks so that their largest magnitude becomes `largest`."""
    blocks = x.reshape(-1, block)
    magnitudes = _largest_magnitudes(blocks)
    scales = jnp.where(magnitudes < _SMALLEST, 1.0, magnitudes / largest)
    return blocks * (1 / scales)[:, None], scales


def _largest_magnitudes(blocks: jax.Array) -> jax.Array:
    """NaN for blocks with NaN, which the maximum of floats may ignore on CPUs.

    The words of floats order as their magnitudes do, with NaN above all.
    """
    words = jax.lax.bitcast_convert_type(jnp.abs(blocks), jnp.int32)
    return jax.lax.bitcast_convert_type(words.max(axis=1), jnp.float32)


def _rescaled(codes: jax.Array, scales: jax.Array, block: int) -> jax.Array:
    numbers = codes.astype(jnp.float32).reshape(-1, block)
    return (numbers * scales[:, None]).reshape(-1)


def _pack_nibbles(codes: jax.Array) -> jax.Array:
    low, high = codes.astype(jnp.uint8).reshape(-1, 2).T
    return low & 15 | high << 4


def _unpack_nibbles(pairs: jax.Array) -> jax.Array:
    signed = jax.lax.bitcast_convert_type(pairs, jnp.int8)
    # A right shift of a signed integer repeats its sign bit.
    return (signed[:, None] << jnp.array([[4, 0]], jnp.int8) >> 4).reshape(-1)
