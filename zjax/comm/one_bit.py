"""The codec of 1-bit Adam: signs, and one scale of the whole vector."""

import dataclasses

import jax
import jax.numpy as jnp

_SHIFTS = range(7, -1, -1)
"""The first of eight signs is the highest bit of its byte."""


@dataclasses.dataclass(frozen=True)
class OneBit:
    """Replaces each number by its sign times the root mean square of the vector.

    The sign of 0 is positive, so a vector needs error feedback to come out right.

    Reference:
        Tang et al., 1-bit Adam (arXiv:2102.02888), section 4.
    """

    block: int = 8

    def encode(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Packs float32[n] to uint8[n / 8] and float32[1]."""
        squares = (x * x).reshape(-1, 8).sum(axis=1)
        # Both read x, in one pass: the compiler must not sum all squares in another.
        bits, squares = jax.lax.optimization_barrier((jnp.packbits(x >= 0), squares))
        return bits, jnp.sqrt(squares.sum() / x.size)[None]

    def decode(self, packed: tuple[jax.Array, ...]) -> jax.Array:
        """Restores float32[n]."""
        bits, scale = packed
        is_positive = bits[:, None] >> jnp.array([_SHIFTS], jnp.uint8) & 1
        return (jnp.where(is_positive == 1, 1.0, -1.0) * scale[0]).reshape(-1)
