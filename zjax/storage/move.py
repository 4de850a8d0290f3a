"""Moves of arrays between the memory of devices, that of the host, and disks."""

import collections
from collections.abc import Iterable, Iterator
from typing import Any

import jax

from zjax.sharding.mesh import is_simulated
from zjax.sharding.placement import ArrayPlan
from zjax.sharding.plan import DEVICE, NVME
from zjax.storage.array import DiskArray
from zjax.storage.lanes import send
from zjax.storage.progress import tell


def move(x: Any, row: ArrayPlan, memory: str, *, is_consumed: bool) -> Any:
    """Sends one array to another memory, unless it rests on the devices.

    Args:
        x: The array, in `row.memory` or on the devices.
        row: Where it rests.
        memory: Where it goes: `row.memory`, or the devices.
        is_consumed: Whether `x` is given up.

    Returns:
        The array there, perhaps still on its way.
    """
    if row.memory == DEVICE:
        return x
    if memory == NVME:
        moved = DiskArray.write(x, row)
    elif row.memory == NVME:
        moved = x.to_devices()
    else:
        moved = send(x, row.rest_in(memory).stored)
    if is_consumed:
        x.delete()  # its memory is free once the copy is done
    return moved


def rest(arrays: Any, rows: Any) -> Any:
    """Sends arrays to where they rest; those that move are consumed.

    Args:
        arrays: A tree, on the devices.
        rows: A tree of `ArrayPlan` of the same structure.

    Returns:
        Arrays at rest, perhaps still on their way.
    """

    def one(x: Any, row: ArrayPlan) -> Any:
        moved = move(x, row, row.memory, is_consumed=True)
        if row.memory != DEVICE:
            tell(row.device_bytes * len(row.stored.addressable_devices))
        return moved

    return jax.tree.map(one, arrays, rows)


def rest_all(arrays: Any, rows: Any, limit_bytes: int) -> Any:
    """Sends arrays that exist already to where they rest, few of them at a time.

    Args:
        arrays: A tree, on the devices; those that move are consumed.
        rows: A tree of `ArrayPlan` of the same structure.
        limit_bytes: As of `rest_in_turn`.

    Returns:
        The arrays at rest.
    """
    leaves, tree = jax.tree.flatten(arrays)
    pairs = list(zip(leaves, tree.flatten_up_to(rows), strict=True))
    going = [(x, row) for x, row in pairs if row.memory != DEVICE]
    there = iter(list(rest_in_turn(going, limit_bytes)))
    return tree.unflatten(
        x if row.memory == DEVICE else next(there) for x, row in pairs
    )


def rest_in_turn(
    pairs: Iterable[tuple[Any, ArrayPlan]], limit_bytes: int
) -> Iterator[Any]:
    """Sends arrays to where they rest, few of them at a time.

    Args:
        pairs: Arrays on the devices, made as they are asked for, and their places;
            those that move are consumed.
        limit_bytes: On one device, of arrays on their way; one goes whatever its size.

    Yields:
        The arrays at rest, perhaps still on their way; none is once the last has come.
    """
    going: collections.deque[tuple[Any, int]] = collections.deque()
    num_bytes = 0
    for x, row in pairs:
        if is_simulated(row.stored.mesh):
            jax.block_until_ready(x)
        resting = rest(x, row)
        del x  # or it stays on the device while the next is made
        going.append((resting, row.device_bytes))
        num_bytes += row.device_bytes
        while num_bytes > limit_bytes:
            first, size = going.popleft()
            jax.block_until_ready(first)
            num_bytes -= size
        yield resting
    jax.block_until_ready([resting for resting, _ in going])
