"""Checks of arguments that several rules share."""

import numbers
from collections.abc import Sequence
from typing import Any

from zjax_kernels.errors import describe


def below(field: str, value: object, least: int) -> list[str]:
    """Tells of an argument that is no integer, or too small.

    Args:
        field: Name of the argument.
        value: What was given.
        least: Smallest integer that it may be.

    Returns:
        One line, or none where it is fine.

    Example:
        >>> below("num_heads", 0, 1)
        ['num_heads=0 is not an integer >= 1; give 1 or more']
    """
    if _is_integer(value, least):
        return []
    remedy = f"give {least} or more"
    value = repr(value) if isinstance(value, str) else value
    return [describe(field, value, f"is not an integer >= {least}", remedy)]


def any_below(field: str, values: object, least: int) -> list[str]:
    """Tells of an argument that is no list of integers, or holds one too small.

    Args:
        field: Name of the argument.
        values: What was given.
        least: Smallest integer that may be in it.

    Returns:
        One line, or none where it is fine.

    Example:
        >>> any_below("local_window_blocks", (4, 0), 1)
        ['local_window_blocks=(4, 0) is not a list of integers >= 1; give one like [1]']
    """
    if isinstance(values, tuple) and all(_is_integer(value, least) for value in values):
        return []
    problem = f"is not a list of integers >= {least}"
    return [describe(field, values, problem, f"give one like [{least}]")]


def no_array(field: str, value: Any, shape: str) -> list[str]:
    """Tells of an argument that is no array, or has another number of dims.

    Args:
        field: Name of the argument.
        value: What was given.
        shape: Its dims in words.

    Returns:
        One line, or none where it is fine.

    Example:
        >>> no_array("lse", None, "[B, H, S]")
        ['lse=NoneType is not an array; give one of shape [B, H, S]']
    """
    remedy = f"give one of shape {shape}"
    if not hasattr(value, "dtype"):
        return [describe(field, type(value).__name__, "is not an array", remedy)]
    num_dims = shape.count(",") + 1
    if value.ndim == num_dims:
        return []
    problem = f"has not {num_dims} dims"
    return [describe(f"{field}.shape", value.shape, problem, remedy)]


def wrong_ranges(indices: Sequence[int], ends: Sequence[int] | None) -> list[str]:
    """Tells of global blocks, or ranges of them, that cannot be.

    Args:
        indices: `global_block_indices`.
        ends: `global_block_end_indices`.

    Returns:
        A line for each that is wrong, or one on how they fit.

    Example:
        >>> print(*wrong_ranges((0, 4), (2, 4)))
        global_block_end_indices=(2, 4) is not beyond global_block_indices=(0, 4); \
give each range an end after its start
    """
    name = "global_block_end_indices"
    found = any_below("global_block_indices", indices, 0)
    if ends is None:
        return found
    found += any_below(name, ends, 1)
    if found:
        return found
    if len(ends) != len(indices):
        problem = f"has not one end for each of global_block_indices={indices}"
        return [describe(name, ends, problem, f"give {len(indices)} ends")]
    if any(start >= end for start, end in zip(indices, ends, strict=True)):
        problem = f"is not beyond global_block_indices={indices}"
        remedy = "give each range an end after its start"
        return [describe(name, ends, problem, remedy)]
    return []


def _is_integer(value: object, least: int) -> bool:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        return False
    return int(value) >= least
