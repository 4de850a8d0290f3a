"""Prefetches stored arrays onto the devices, and writes new arrays back."""

import collections
import dataclasses
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import jax

from zjax.sharding.placement import ArrayPlan
from zjax.storage.array import DiskArray
from zjax.storage.move import store, to_devices
from zjax.storage.transfers import READ_AHEAD_BYTES

WRITE_BACK_SHARE = 8
"""Arrays that are written back may exceed a stream's limit by 1 / WRITE_BACK_SHARE."""


def moved_bytes(rows: Iterable[ArrayPlan]) -> int:
    """Counts the bytes on one device of the arrays that are stored elsewhere."""
    return sum(row.device_bytes for row in rows if not row.is_on_device)


@dataclasses.dataclass(frozen=True)
class Load:
    """Arrays that are prefetched together.

    Args:
        name: Key by which `Stream.wait` finds the load.
        arrays: Arrays as stored, or on the devices already.
        rows: Plan of each array.
        is_consumed: Whether the stored arrays are deleted.
    """

    name: Hashable
    arrays: list[Any]
    rows: list[ArrayPlan]
    is_consumed: bool

    @property
    def moved_bytes(self) -> int:
        """Bytes on one device that have to be copied to the device."""
        return moved_bytes(self.rows)

    @property
    def disk_bytes(self) -> int:
        """Bytes on one device that have to be read from disks."""
        return sum(row.device_bytes for row in self.rows if row.is_on_disk)

    def read_ahead(self) -> None:
        """Starts to read from disks into host memory."""
        for x in self._on_disk():
            x.prefetch()

    def cancel(self) -> None:
        """Drops the host copies of `read_ahead`."""
        for x in self._on_disk():
            x.forget()

    def is_read(self) -> bool:
        """Whether all arrays have been read from disks."""
        return all(x.is_read() for x in self._on_disk())

    def _on_disk(self) -> list[DiskArray]:
        return [x for x in self.arrays if isinstance(x, DiskArray)]


class Stream:
    """Prefetches loads in order, as many as fit on the devices.

    The stream blocks only to stay within the limit, and for disks.

    Args:
        limit_bytes: Bytes on a device of loads that are prefetched and not yet
            released; one load is prefetched whatever the size.
    """

    def __init__(self, limit_bytes: int):
        self.limit = limit_bytes
        self.waiting: collections.deque[Load] = collections.deque()
        self.arrived: dict[Hashable, tuple[list[jax.Array], int]] = {}
        self.leaving: collections.deque[tuple[int, Sequence[Any]]] = collections.deque()
        self.in_flight = 0

    def most_bytes(self, loads: Sequence[int]) -> int:
        """Returns the most bytes that loads take: one load, or as many as fit."""
        return max(max(loads, default=0), min(self.limit, sum(loads)))

    def prefetch(self, loads: Iterable[Load]) -> None:
        """Starts to prefetch, in order of use; drops loads that a failed pass left."""
        for load in self.waiting:
            load.cancel()
        self.waiting = collections.deque(loads)
        self.arrived = {}
        # Arrays that are still leaving occupy memory, even after a failed pass.
        self.in_flight = sum(num_bytes for num_bytes, _ in self.leaving)
        self.fill()

    def prefetch_more(self, loads: Iterable[Load]) -> None:
        """Prefetches further loads after the loads of `prefetch`."""
        self.waiting.extend(loads)
        self.fill()

    def add(
        self, name: Hashable, arrays: list[jax.Array], rows: list[ArrayPlan]
    ) -> None:
        """Adds arrays to a load; stores each if the load is not prefetched yet."""
        if name in self.arrived:
            # The load is on the devices already, where the gradients stay, too.
            self.arrived[name][0].extend(arrays)
            return
        load = next(load for load in self.waiting if load.name == name)
        load.arrays.extend(self.write_back(arrays, rows))
        load.rows.extend(rows)

    def write_back(self, arrays: list[Any], rows: list[ArrayPlan]) -> list[Any]:
        """Stores arrays as `storage.move.store` does, few at a time."""
        stored = store(arrays, rows)
        off_device = [
            x for x, row in zip(stored, rows, strict=True) if not row.is_on_device
        ]
        size = moved_bytes(rows)
        self.in_flight += size
        self.leaving.append((size, off_device))
        limit = self.limit + self.limit // WRITE_BACK_SHARE
        while self.in_flight > limit and self.leaving:
            self._free(wait=True)
        return stored

    def wait(self, name: Hashable) -> tuple[list[jax.Array], int]:
        """Returns the arrays of the next load, and the bytes to release after use.

        Copies to the devices may still run.
        """
        while name not in self.arrived:
            self._make_room()
            self._copy_next()
        arrived = self.arrived.pop(name)
        # On a GPU, copies to it wait for programs that were called before them. Those
        # that read this load are not called until the next copies are enqueued.
        while self._is_next_due():
            self._make_room()
            self._copy_next()
        return arrived

    def release(self, num_bytes: int, tokens: Sequence[Any]) -> None:
        """Frees the bytes of a load once `tokens`, results of its use, are ready."""
        self.leaving.append((num_bytes, tokens))
        self.fill()

    def fill(self) -> None:
        """Prefetches as many loads as fit."""
        while self.leaving and all(map(_is_done, self.leaving[0][1])):
            self._free(wait=False)
        self._read_ahead()
        while self.waiting and self._fits() and self.waiting[0].is_read():
            self._copy_next()

    def _read_ahead(self) -> None:
        """Starts disk reads for the next loads, within `READ_AHEAD_BYTES`."""
        ahead = 0
        for load in self.waiting:
            ahead += load.disk_bytes
            if ahead > READ_AHEAD_BYTES:
                return
            load.read_ahead()

    def _is_next_due(self) -> bool:
        """Whether the next load can be copied beside the arrays that have arrived."""
        if not self.waiting or not self.waiting[0].is_read():
            return False
        ahead = sum(num_bytes for _, num_bytes in self.arrived.values())
        size = self.waiting[0].moved_bytes
        held = self.in_flight - sum(num_bytes for num_bytes, _ in self.leaving)
        return ahead + size <= self.limit // 2 and held + size <= self.limit

    def _make_room(self) -> None:
        """Waits for arrays to leave until the next load fits."""
        while self.leaving and not self._fits():
            self._free(wait=True)

    def _fits(self) -> bool:
        """Whether the next load fits; any load fits into an empty stream."""
        size = self.waiting[0].moved_bytes
        return self.in_flight == 0 or self.in_flight + size <= self.limit

    def _copy_next(self) -> None:
        """Starts to copy the next load to the devices."""
        load = self.waiting.popleft()
        # Start all reads at once: `to_devices` waits for each in turn.
        load.read_ahead()
        arrays = [
            to_devices(x, row, is_consumed=load.is_consumed)
            for x, row in zip(load.arrays, load.rows, strict=True)
        ]
        self.arrived[load.name] = arrays, load.moved_bytes
        self.in_flight += load.moved_bytes

    def _free(self, *, wait: bool) -> None:
        """Releases the oldest bytes that leave; `wait` blocks until the use ends."""
        num_bytes, tokens = self.leaving.popleft()
        if wait:
            jax.block_until_ready([x for x in tokens if not x.is_deleted()])
        self.in_flight -= num_bytes


def _is_done(x: Any) -> bool:
    # An array of the last step may have been prefetched and deleted in this one.
    return x.is_deleted() or x.is_ready()
