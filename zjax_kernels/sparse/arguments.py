"""Checks of arguments; boolean arrays as hashable values for caches."""

import dataclasses
import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np

from zjax_kernels.device import describe


def integer_problems(field: str, value: object, minimum: int) -> list[str]:
    """Reports a value that is not an integer, or too small.

    Example:
        >>> integer_problems("num_heads", 0, 1)
        ['num_heads=0 is not an integer >= 1; give 1 or more']
    """
    if _is_integer(value, minimum):
        return []
    remedy = f"give {minimum} or more"
    value = repr(value) if isinstance(value, str) else value
    return [describe(field, value, f"is not an integer >= {minimum}", remedy)]


def integers_problems(field: str, values: object, minimum: int) -> list[str]:
    """Reports a value that is not a tuple of integers, or has one that is too small.

    Example:
        >>> integers_problems("local_window_blocks", (4, 0), 1)
        ['local_window_blocks=(4, 0) is not a list of integers >= 1; give one like [1]']
    """
    if isinstance(values, tuple) and all(
        _is_integer(value, minimum) for value in values
    ):
        return []
    problem = f"is not a list of integers >= {minimum}"
    return [describe(field, values, problem, f"give one like [{minimum}]")]


def array_problems(field: str, value: Any, shape: str) -> list[str]:
    """Reports a value that is not an array, or has other dims than `shape`.

    Example:
        >>> array_problems("lse", None, "[B, H, S]")
        ['lse=NoneType is not an array; give one of shape [B, H, S]']
    """
    remedy = f"give one of shape {shape}"
    if not hasattr(value, "dtype"):
        return [describe(field, type(value).__name__, "is not an array", remedy)]
    num_dims = shape.count(",") + 1
    if value.ndim == num_dims:
        return []
    problem = f"does not have {num_dims} dims"
    return [describe(f"{field}.shape", value.shape, problem, remedy)]


def range_problems(indices: Sequence[int], ends: Sequence[int] | None) -> list[str]:
    """Reports malformed global blocks, or malformed ranges of global blocks.

    Example:
        >>> print(*range_problems((0, 4), (2, 4)))
        global_block_end_indices=(2, 4) is not beyond global_block_indices=(0, 4); \
give each range an end after its start
    """
    name = "global_block_end_indices"
    found = integers_problems("global_block_indices", indices, 0)
    if ends is None:
        return found
    found += integers_problems(name, ends, 1)
    if found:
        return found
    if len(ends) != len(indices):
        problem = f"does not have one end for each of global_block_indices={indices}"
        return [describe(name, ends, problem, f"give {len(indices)} ends")]
    if any(start >= end for start, end in zip(indices, ends, strict=True)):
        problem = f"is not beyond global_block_indices={indices}"
        remedy = "give each range an end after its start"
        return [describe(name, ends, problem, remedy)]
    return []


def _is_integer(value: object, minimum: int) -> bool:
    """Whether a value is an integer of at least `minimum`; bools are not."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        return False
    return int(value) >= minimum


@dataclasses.dataclass(frozen=True)
class Bits:
    """A hashable Boolean array.

    Example:
        >>> Bits.of(np.eye(3)) == Bits.of(np.eye(3, dtype=bool))
        True
    """

    shape: tuple[int, ...]
    packed: bytes = dataclasses.field(repr=False)

    @classmethod
    def of(cls, array: np.ndarray) -> "Bits":
        """Packs an array; everything other than 0 is True."""
        return cls(array.shape, np.packbits(array != 0).tobytes())

    def array(self) -> np.ndarray:
        """Unpacks to bool[shape]."""
        values = np.frombuffer(self.packed, np.uint8)
        count = int(np.prod(self.shape))
        # `count` leaves out the padding of the last byte.
        return np.unpackbits(values, count=count).view(bool).reshape(self.shape)
