"""The codec of 1-bit Adam: signs, and one scale per block."""

import dataclasses

import jax
import jax.numpy as jnp

_SHIFTS = range(7, -1, -1)
"""The first of eight signs is the highest bit of its byte."""


@dataclasses.dataclass(frozen=True)
class OneBit:
    """Replaces each number by its sign times the root mean square of its block.

    The sign of 0 is positive, so a vector needs error feedback to come out right. One
    scale for arrays of unlike magnitudes would drown the small ones, whose steps are as
    large as those of others: the scales of blocks add 0.8 % to the bits.

    Args:
        block: Numbers per scale, a multiple of 8.

    Reference:
        Tang et al., 1-bit Adam (arXiv:2102.02888), section 4, with a scale per tensor.
    """

    block: int = 4096

    def encode(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Packs float32[n] to uint8[n / 8] and float32[n / block]."""
        squares = (x * x).reshape(-1, 8).sum(axis=1)
        # Both read x, in one pass: the compiler must not sum all squares in another.
        bits, squares = jax.lax.optimization_barrier((jnp.packbits(x >= 0), squares))
        squares = squares.reshape(-1, self.block // 8).sum(axis=1)
        return bits, jnp.sqrt(squares / self.block)

    def decode(self, packed: tuple[jax.Array, ...]) -> jax.Array:
        """Restores float32[n]."""
        bits, scales = packed
        is_positive = bits[:, None] >> jnp.array([_SHIFTS], jnp.uint8) & 1
        signs = jnp.where(is_positive == 1, 1.0, -1.0)
        return (signs.reshape(-1, self.block) * scales[:, None]).reshape(-1)
