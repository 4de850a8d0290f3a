"""Moves of arrays between the memory of devices, that of the host, and disks."""

from typing import Any

import jax

from zjax.sharding.placement import Row
from zjax.sharding.plan import DEVICE, NVME
from zjax.storage.array import DiskArray
from zjax.storage.lanes import LANES
from zjax.storage.progress import tell


def move(x: Any, row: Row, memory: str, *, is_consumed: bool) -> Any:
    """Sends one array to another memory, unless it rests on the devices.

    Args:
        x: The array, in `row.memory` or on the devices.
        row: Where it rests.
        memory: Where it goes: `row.memory`, or the devices.
        is_consumed: Whether `x` is given up; on the way to disks it stays until nobody
            holds it.

    Returns:
        The array there, perhaps still on its way.
    """
    if row.memory == DEVICE:
        return x
    if memory == NVME:
        return DiskArray.write(x, row)
    if row.memory == NVME:
        moved = x.to_devices()
    else:
        LANES.enter(memory, row.sharding)
        moved = jax.device_put(x, row.rest_in(memory).sharding, may_alias=False)
    if is_consumed:
        x.delete()  # its memory is free once the copy is done
    return moved


def rest(arrays: Any, rows: Any) -> Any:
    """Sends arrays to where they rest; those that move are consumed.

    Args:
        arrays: A tree, on the devices.
        rows: A tree of `Row` of the same structure.

    Returns:
        Arrays at rest, perhaps still on their way.
    """

    def one(x: Any, row: Row) -> Any:
        moved = move(x, row, row.memory, is_consumed=True)
        if row.memory != DEVICE:
            tell(row.device_bytes * len(row.sharding.addressable_devices))
        return moved

    return jax.tree.map(one, arrays, rows)
