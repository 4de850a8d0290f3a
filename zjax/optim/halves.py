"""Float32 weights in two halves: bfloat16, and what rounding to it took away.

Where the parameters in use are bfloat16, they are the upper half of the master weights.
Only the lower half, two bytes a parameter, has to rest and to move beside them.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

LOWER = jnp.dtype(jnp.int16)
"""Of the lower half: a count of steps between float32 numbers."""


def lower_half(x: Any) -> Any:
    """What is left of weights once they are rounded to bfloat16.

    A weight half-way between two numbers of bfloat16 may come back one float32 number
    nearer to that to which it was rounded; all others come back as they were.

    Args:
        x: float32[...] of JAX or NumPy.

    Returns:
        int16[...] of the same library.

    Example:
        >>> lower_half(np.float32([1.0, 1.0 + 2**-20, 1.0 - 2**-20]))
        array([  0,   8, -16], dtype=int16)
    """
    rest = x.view(np.int32) - _as_float32(x.astype(jnp.bfloat16)).view(np.int32)
    return rest.clip(-(2**15), 2**15 - 1).astype(np.int16)


def joined(upper: Any, lower: Any) -> Any:
    """Weights from both halves.

    Args:
        upper: bfloat16[...] of JAX or NumPy.
        lower: int16[...], as of `lower_half`.

    Returns:
        float32[...].

    Example:
        >>> x = np.float32([0.1, -3e-5, 7e30])
        >>> bool((joined(x.astype(jnp.bfloat16), lower_half(x)) == x).all())
        True
    """
    bits = _as_float32(upper).view(np.int32) + lower.astype(np.int32)
    return bits.view(np.float32)


def _as_float32(upper: Any) -> Any:
    """By its bits: a compiler may leave a pair of conversions out."""
    bits = upper.view(np.uint16).astype(np.uint32) << 16
    return bits.view(np.float32)
