"""The largest magnitude of each block, where NaN is larger than any number.

The maximum of floats may ignore NaN, depending on the compiler; their words order as
their magnitudes do, with NaN above all.
"""

import jax
import jax.numpy as jnp


def largest_magnitudes(blocks: jax.Array) -> jax.Array:
    """float32[num_blocks] of float32[num_blocks, block]."""
    words = jax.lax.bitcast_convert_type(jnp.abs(blocks), jnp.int32)
    return jax.lax.bitcast_convert_type(words.max(axis=1), jnp.float32)
