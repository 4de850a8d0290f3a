"""Vectors on the wire in another float dtype."""

import dataclasses

import jax
import jax.numpy as jnp


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
