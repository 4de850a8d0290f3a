"""Names and sizes of mesh axes, computed without JAX devices."""

import dataclasses
import math
from collections.abc import Sequence

from zjax.settings import schema

AXES = ("pipeline", "replica", "data", "expert", "sequence", "tensor")
BATCH_AXES = ("replica", "data", "expert")
OPEN_AXES = ("pipeline", "sequence", "tensor")
"""Axes whose size zjax chooses if set to 0."""
AUTO = "auto"
"""Value of `mesh` that sets all `OPEN_AXES` to 0."""


def axis_sizes(config: schema.Config, num_devices: int) -> dict[str, int]:
    """Sizes of all mesh axes; an axis of -1 takes the remaining devices."""
    sizes = {axis: getattr(config.mesh, axis) for axis in AXES}
    remaining = num_devices // math.prod(size for size in sizes.values() if size > 0)
    return {axis: remaining if size == -1 else size for axis, size in sizes.items()}


def close_axes(mesh: schema.Mesh) -> schema.Mesh:
    """Sets open axes to 1, the smallest mesh that `mesh="auto"` may choose.

    Example:
        >>> close_axes(schema.Mesh(pipeline=0, sequence=0, tensor=2)).pipeline
        1
    """
    sizes = {axis: getattr(mesh, axis) or 1 for axis in OPEN_AXES}
    return dataclasses.replace(mesh, **sizes)


def mesh_fills(config: schema.Config, num_devices: int) -> bool:
    """Whether the product of axis sizes is the number of devices."""
    return math.prod(axis_sizes(config, num_devices).values()) == num_devices


def suggest_divisors(number: int) -> str:
    """Remedy that lists the divisors of a number.

    Example:
        >>> suggest_divisors(4)
        'use 1, 2 or 4'
    """
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    if len(divisors) > 8:
        return f"use a divisor of {number}"
    return suggest_choices(divisors)


def suggest_choices(numbers: Sequence[int]) -> str:
    """Remedy that lists the working values.

    Example:
        >>> suggest_choices([1]), suggest_choices([1, 2])
        ('use 1', 'use 1 or 2')
    """
    *first, last = map(str, numbers)
    return f"use {', '.join(first)} or {last}" if first else f"use {last}"
