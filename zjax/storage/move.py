"""Copies of arrays between device memory, host memory and disks."""

import collections
from collections.abc import Iterable, Iterator
from typing import Any

import jax

from zjax.sharding.mesh import is_simulated
from zjax.sharding.placement import ArrayPlan
from zjax.storage.array import DiskArray
from zjax.storage.io_threads import send
from zjax.storage.transfers import report_moved


def to_devices(x: Any, row: ArrayPlan, *, is_consumed: bool) -> Any:
    """Starts to copy a stored array to the devices, unless the array is stored there.

    `is_consumed` deletes `x`. The copy may still run.
    """
    if row.is_on_device:
        return x
    staged = x.to_devices() if row.is_on_disk else send(x, row.on_device.stored)
    if is_consumed:
        x.delete()  # its memory is free once the copy has ended
    return staged


def store(arrays: Any, rows: Any) -> Any:
    """Starts to copy arrays to where `rows` store each, and consumes what moves."""

    def one(x: Any, row: ArrayPlan) -> Any:
        if row.is_on_device:
            return x
        stored = DiskArray.write(x, row) if row.is_on_disk else send(x, row.stored)
        x.delete()  # its memory is free once the copy has ended
        report_moved(row.device_bytes * len(row.stored.addressable_devices))
        return stored

    return jax.tree.map(one, arrays, rows)


def store_all(arrays: Any, rows: Any, limit_bytes: int) -> Any:
    """Stores a tree of arrays that exist already, as `store_in_turn` does."""
    leaves, tree = jax.tree.flatten(arrays)
    pairs = list(zip(leaves, tree.flatten_up_to(rows), strict=True))
    moving = [(x, row) for x, row in pairs if not row.is_on_device]
    stored = iter(list(store_in_turn(moving, limit_bytes)))
    return tree.unflatten(x if row.is_on_device else next(stored) for x, row in pairs)


def store_in_turn(
    pairs: Iterable[tuple[Any, ArrayPlan]], limit_bytes: int
) -> Iterator[Any]:
    """Stores arrays as an iterator creates each, with few in transfer at a time.

    `limit_bytes` bounds the bytes on one device of arrays in transfer; one array is
    stored whatever the size. Arrays that move are consumed, and copies may run until
    the iterator ends.
    """
    moving: collections.deque[tuple[Any, int]] = collections.deque()
    num_bytes = 0
    for x, row in pairs:
        if is_simulated(row.stored.mesh):
            # On simulated devices, collectives of two programs at once could deadlock.
            jax.block_until_ready(x)
        stored = store(x, row)
        del x  # free it on the device before the next one is created
        moving.append((stored, row.device_bytes))
        num_bytes += row.device_bytes
        while num_bytes > limit_bytes:
            first, size = moving.popleft()
            jax.block_until_ready(first)
            num_bytes -= size
        yield stored
    jax.block_until_ready([stored for stored, _ in moving])
