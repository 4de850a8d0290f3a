"""Forms of weights that runs and checkpoints share, for arrays of JAX and of NumPy."""

from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np


def low_bits(x: Any) -> Any:
    """Distance of float32 weights from their bfloat16 rounding, in steps: int16[...].

    A weight half-way between two bfloat16 numbers may be restored one step off; all
    other weights are restored exactly. Takes and returns arrays of JAX or NumPy.
    """
    # Neighbouring floats of one sign have adjacent bit patterns.
    difference = x.view(np.int32) - _as_float32(x.astype(jnp.bfloat16)).view(np.int32)
    # Half-way weights lie 2**15 steps off, one more than int16 holds.
    return difference.clip(-(2**15), 2**15 - 1).astype(np.int16)


def join_bits(high: Any, low: Any) -> Any:
    """Restores float32[...] weights from bfloat16 and the int16 of `low_bits`."""
    bits = _as_float32(high).view(np.int32) + low.astype(np.int32)
    return bits.view(np.float32)


def _as_float32(high: Any) -> Any:
    """Widens bfloat16 by bits: a compiler may remove a pair of dtype conversions."""
    bits = high.view(np.uint16).astype(np.uint32) << 16
    return bits.view(np.float32)


def column_lengths(squares: Any, numpy: ModuleType = np) -> Any:
    """Turns sums of squares of columns into the lengths that DoRA divides by.

    A column of zeros, as of a padded vocabulary, gets the smallest positive length.

    Example:
        >>> column_lengths(np.float32([0, 9])).tolist()
        [1.0842021724855044e-19, 3.0]
    """
    # Not 0, by which the column's magnitude of 0 would be divided.
    return numpy.sqrt(numpy.maximum(squares, np.finfo(np.float32).tiny))
