"""Float32 master weights split into bfloat16 parameters and 16 residual bits.

Where the compute parameters are bfloat16, they are the high half of the master weights,
and only the low bits, two bytes a parameter, are stored and moved beside them.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

LOW_BITS_DTYPE = jnp.dtype(jnp.int16)
"""Low bits count float32 steps from the rounded weight."""


def low_bits(x: Any) -> Any:
    """Distance of float32 weights from their bfloat16 rounding, in steps: int16[...].

    A weight half-way between two bfloat16 numbers may be restored one step off; all
    others are restored exactly. Takes and returns arrays of JAX or NumPy.

    Example:
        >>> low_bits(np.float32([1.0, 1.0 + 2**-20, 1.0 - 2**-20]))
        array([  0,   8, -16], dtype=int16)
    """
    difference = x.view(np.int32) - _as_float32(x.astype(jnp.bfloat16)).view(np.int32)
    return difference.clip(-(2**15), 2**15 - 1).astype(np.int16)


def join_bits(high: Any, low: Any) -> Any:
    """Restores float32[...] weights from bfloat16 and the int16 of `low_bits`.

    Example:
        >>> x = np.float32([0.1, -3e-5, 7e30])
        >>> bool((join_bits(x.astype(jnp.bfloat16), low_bits(x)) == x).all())
        True
    """
    bits = _as_float32(high).view(np.int32) + low.astype(np.int32)
    return bits.view(np.float32)


def _as_float32(high: Any) -> Any:
    """Widens by bits: a compiler may remove a pair of dtype conversions."""
    bits = high.view(np.uint16).astype(np.uint32) << 16
    return bits.view(np.float32)
