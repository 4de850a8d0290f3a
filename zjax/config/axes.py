"""The axes of the mesh as numbers, before any device is asked for."""

import dataclasses
import math
from collections.abc import Sequence

from zjax.config import schema

AXES = ("pipeline", "replica", "data", "expert", "sequence", "tensor")
BUILT_AXES = ("pipeline", "replica", "data", "sequence", "tensor")
BATCH_AXES = ("replica", "data", "expert")
OPEN_AXES = ("pipeline", "sequence", "tensor")
"""Axes whose size of 0 leaves it to zjax."""
AUTO = "auto"
"""In place of a mesh: all of these are left to zjax."""


def axis_sizes(config: schema.Config, num_devices: int) -> dict[str, int]:
    """Sizes of all axes, where an axis of -1 has the rest of the devices."""
    sizes = {axis: getattr(config.mesh, axis) for axis in AXES}
    rest = num_devices // math.prod(size for size in sizes.values() if size > 0)
    return {axis: rest if size == -1 else size for axis, size in sizes.items()}


def closed(mesh: schema.Mesh) -> schema.Mesh:
    """The plainest mesh of those that `mesh="auto"` may choose.

    Example:
        >>> closed(schema.Mesh(pipeline=0, sequence=0, tensor=2)).pipeline
        1
    """
    sizes = {axis: getattr(mesh, axis) or 1 for axis in OPEN_AXES}
    return dataclasses.replace(mesh, **sizes)


def mesh_fills(config: schema.Config, num_devices: int) -> bool:
    """Whether the axes take all devices, neither fewer nor more."""
    return math.prod(axis_sizes(config, num_devices).values()) == num_devices


def name_divisors(number: int) -> str:
    """The remedy for what does not divide a number.

    Example:
        >>> name_divisors(4)
        'use 1, 2 or 4'
    """
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    if len(divisors) > 8:
        return f"use a divisor of {number}"
    return name_choices(divisors)


def name_choices(numbers: Sequence[int]) -> str:
    """The remedy that lists what works.

    Example:
        >>> name_choices([1]), name_choices([1, 2])
        ('use 1', 'use 1 or 2')
    """
    *first, last = map(str, numbers)
    return f"use {', '.join(first)} or {last}" if first else f"use {last}"
