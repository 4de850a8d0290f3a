"""Magnitudes of floats as integers, which order as they do, with NaN above all.

The maximum of floats may ignore NaN, depending on the compiler.
"""

import jax
import jax.numpy as jnp


def magnitude_bits(x: jax.Array) -> jax.Array:
    """The words int32[...] of the magnitudes of float32[...]."""
    return jax.lax.bitcast_convert_type(jnp.abs(x), jnp.int32)


def as_magnitudes(bits: jax.Array) -> jax.Array:
    """The floats of `magnitude_bits`."""
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
