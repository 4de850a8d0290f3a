"""A codec that sends the largest numbers of each block, with 2 bits a number."""

import dataclasses

import jax
import jax.numpy as jnp

from zjax.comm.block_codecs import mean_where

_INDEX_BITS = 14
"""A code is a position in the block, a bit of magnitude, and the sign."""


@dataclasses.dataclass(frozen=True)
class TopK:
    """Sends the `kept` largest magnitudes of each block as one of two values.

    The two values of a block are the mean magnitudes of what is above and below the
    middle between the largest and the smallest kept, so the error is never larger than
    the vector.

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
        # No slices of the result, for which XLA would sort whole blocks. NaN is first.
        largest, smallest = magnitudes.max(axis=1), magnitudes.min(axis=1)
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
