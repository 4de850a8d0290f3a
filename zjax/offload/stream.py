"""Arrays at rest on their way to the devices, and back once they have changed."""

import collections
import dataclasses
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import jax

from zjax.sharding.placement import ArrayPlan
from zjax.sharding.plan import DEVICE, NVME
from zjax.storage.array import DiskArray
from zjax.storage.move import move, rest
from zjax.storage.passing import READ_AHEAD_BYTES

GOING_SHARE = 8
"""Of the same room, one part more is for what leaves before its group comes up."""


@dataclasses.dataclass(frozen=True)
class Load:
    """Arrays that come up together.

    Args:
        name: By which they are taken.
        arrays: At rest, or on the devices already.
        rows: Where each rests.
        is_consumed: Whether the host's copies are given up.
    """

    name: Hashable
    arrays: list[Any]
    rows: list[ArrayPlan]
    is_consumed: bool

    @property
    def moved_bytes(self) -> int:
        """On one device, of what has to come up."""
        return sum(row.device_bytes for row in self.rows if row.memory != DEVICE)

    @property
    def disk_bytes(self) -> int:
        """On one device, of what has to be read from disks."""
        return sum(row.device_bytes for row in self.rows if row.memory == NVME)

    def prefetch(self) -> None:
        """Starts to read what is on disks into the memory of the host."""
        for x in self._on_disk():
            x.prefetch()

    def forget(self) -> None:
        """Gives up what was read ahead."""
        for x in self._on_disk():
            x.forget()

    def is_read(self) -> bool:
        """Whether nothing has to be waited for any more."""
        return all(x.is_read() for x in self._on_disk())

    def _on_disk(self) -> list[DiskArray]:
        return [x for x in self.arrays if isinstance(x, DiskArray)]


class Stream:
    """Brings loads up ahead of their use, as many as the devices have room for.

    Nothing here waits for a copy, except to keep small what is on the way, and for what
    comes from disks.

    Args:
        limit_bytes: On a device, of loads that came up and have not left; one load
            comes up whatever its size.
    """

    def __init__(self, limit_bytes: int):
        self.limit = limit_bytes
        self.waiting: collections.deque[Load] = collections.deque()
        self.here: dict[Hashable, tuple[list[jax.Array], int]] = {}
        self.leaving: collections.deque[tuple[int, Sequence[Any]]] = collections.deque()
        self.in_flight = 0

    def begin(self, loads: Iterable[Load]) -> None:
        """Announces loads, and starts to bring them up.

        What was announced before and not taken, by a pass that failed, is forgotten.

        Args:
            loads: In the order in which they will be taken.
        """
        for load in self.waiting:
            load.forget()
        self.waiting = collections.deque(loads)
        self.here = {}
        self.in_flight = sum(num_bytes for num_bytes, _ in self.leaving)
        self.fill()

    def extend(self, loads: Iterable[Load]) -> None:
        """Announces more loads.

        Args:
            loads: To be taken after those announced before.
        """
        self.waiting.extend(loads)
        self.fill()

    def add(
        self, name: Hashable, arrays: list[jax.Array], rows: list[ArrayPlan]
    ) -> None:
        """Adds arrays to a load; if that is not here yet, they rest until it comes.

        Args:
            name: Of a load that was announced and not taken.
            arrays: On the devices.
            rows: Where each may rest.
        """
        if name in self.here:
            self.here[name][0].extend(arrays)
            return
        load = next(load for load in self.waiting if load.name == name)
        load.arrays.extend(self.send(arrays, rows))
        load.rows.extend(rows)

    def send(self, arrays: list[Any], rows: list[ArrayPlan]) -> list[Any]:
        """Sends arrays of no load to where they rest, few of them at a time.

        Args:
            arrays: On the devices; those that move are consumed.
            rows: Where each rests.

        Returns:
            The arrays at rest, perhaps still on their way.
        """
        resting = rest(arrays, rows)
        gone = [x for x, row in zip(resting, rows, strict=True) if row.memory != DEVICE]
        size = sum(row.device_bytes for row in rows if row.memory != DEVICE)
        self.in_flight += size
        self.leaving.append((size, gone))
        while self.in_flight > self.limit + self.limit // GOING_SHARE and self.leaving:
            self._release(wait=True)
        return resting

    def take(self, name: Hashable) -> tuple[list[jax.Array], int]:
        """A load on the devices.

        Args:
            name: Of the next that was announced and not taken.

        Returns:
            Its arrays, perhaps still on their way, and bytes to be given to `leave`.
        """
        while name not in self.here:
            self._make_room()
            self._bring()
        taken = self.here.pop(name)
        # On a GPU, what comes up waits for programs that were called before it. Those
        # that read the load are not called until more is on its way.
        while self._is_next_due():
            self._make_room()
            self._bring()
        return taken

    def leave(self, num_bytes: int, tokens: Sequence[Any]) -> None:
        """Gives back the room of a load.

        Args:
            num_bytes: As `take` told them.
            tokens: Arrays that are ready once the load is no longer needed.
        """
        self.leaving.append((num_bytes, tokens))
        self.fill()

    def fill(self) -> None:
        """Starts to bring up what there is room for."""
        while self.leaving and all(map(_is_done, self.leaving[0][1])):
            self._release(wait=False)
        self._read_ahead()
        while self.waiting and self._fits() and self.waiting[0].is_read():
            self._bring()

    def _read_ahead(self) -> None:
        ahead = 0
        for load in self.waiting:
            ahead += load.disk_bytes
            if ahead > READ_AHEAD_BYTES:
                return
            load.prefetch()

    def _is_next_due(self) -> bool:
        if not self.waiting or not self.waiting[0].is_read():
            return False
        ahead = sum(num_bytes for _, num_bytes in self.here.values())
        size = self.waiting[0].moved_bytes
        held = self.in_flight - sum(num_bytes for num_bytes, _ in self.leaving)
        return ahead + size <= self.limit // 2 and held + size <= self.limit

    def _make_room(self) -> None:
        while self.leaving and not self._fits():
            self._release(wait=True)

    def _fits(self) -> bool:
        size = self.waiting[0].moved_bytes
        return self.in_flight == 0 or self.in_flight + size <= self.limit

    def _bring(self) -> None:
        load = self.waiting.popleft()
        load.prefetch()
        pairs = zip(load.arrays, load.rows, strict=True)
        arrays = [
            move(x, row, DEVICE, is_consumed=load.is_consumed) for x, row in pairs
        ]
        self.here[load.name] = arrays, load.moved_bytes
        self.in_flight += load.moved_bytes

    def _release(self, *, wait: bool) -> None:
        num_bytes, tokens = self.leaving.popleft()
        if wait:
            jax.block_until_ready([x for x in tokens if not x.is_deleted()])
        self.in_flight -= num_bytes


def _is_done(x: Any) -> bool:
    # What came down for the last step may have gone up for this one.
    return x.is_deleted() or x.is_ready()
