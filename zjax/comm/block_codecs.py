"""Codecs that divide each block of a vector by a scale of its own."""

import dataclasses

import jax
import jax.numpy as jnp

_SMALLEST = 2.0**-100
"""Blocks below it in magnitude are sent as zeros: the inverse of their scale could
overflow."""


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
