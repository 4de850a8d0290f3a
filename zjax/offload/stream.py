"""Arrays of the host on their way through the devices: up, and changed down again."""

import collections
from collections.abc import Iterable, Sequence

import jax

from zjax.sharding.placement import Row
from zjax.sharding.plan import DEVICE

IN_FLIGHT_BYTES = 4e9
"""On a device, of groups on their way; the next waits until one has left."""


class Stream:
    """Moves groups of arrays, the next ones up while the last go down.

    Nothing here waits for a copy, except to keep what is on the way small.

    Args:
        rows: Of each group, the places where its arrays rest.
        in_flight_bytes: On a device; one group moves whatever its size.
    """

    def __init__(
        self,
        rows: Sequence[Sequence[Row]],
        in_flight_bytes: float = IN_FLIGHT_BYTES,
    ):
        self.rows = rows
        self.limit = in_flight_bytes
        self.sizes = [sum(map(_moved_bytes, group)) for group in rows]
        self.waiting: collections.deque[tuple[int, list[jax.Array]]] = (
            collections.deque()
        )
        self.here: dict[int, list[jax.Array]] = {}
        self.leaving: collections.deque[tuple[int, list[jax.Array]]] = (
            collections.deque()
        )
        self.in_flight = 0

    def begin(self, groups: Iterable[tuple[int, list[jax.Array]]]) -> None:
        """Announces what will be taken, and starts to bring it up.

        Args:
            groups: Numbers and resting arrays, which are consumed, in the order in
                which they will be taken.
        """
        self.waiting.extend(groups)
        self.fill()

    def take(self, group: int) -> list[jax.Array]:
        """The arrays of a group on the devices.

        Args:
            group: The next of those announced that has not been taken.

        Returns:
            Arrays, perhaps still on their way.
        """
        while group not in self.here:
            while self.leaving and not self._fits():
                self._release(wait=True)
            self._bring()
        return self.here.pop(group)

    def put(self, group: int, arrays: list[jax.Array]) -> list[jax.Array]:
        """Sends the changed arrays of a group to where they rest.

        Args:
            group: One that was taken.
            arrays: On the devices; those that move are consumed.

        Returns:
            Arrays at rest, perhaps still on their way.
        """
        resting = [
            _move(x, row, row.memory)
            for x, row in zip(arrays, self.rows[group], strict=True)
        ]
        self.leaving.append((self.sizes[group], resting))
        self.fill()
        return resting

    def fill(self) -> None:
        """Starts to bring up what there is room for."""
        while self.leaving and all(x.is_ready() for x in self.leaving[0][1]):
            self._release(wait=False)
        while self.waiting and self._fits():
            self._bring()

    def _fits(self) -> bool:
        size = self.sizes[self.waiting[0][0]]
        return self.in_flight == 0 or self.in_flight + size <= self.limit

    def _bring(self) -> None:
        group, arrays = self.waiting.popleft()
        self.here[group] = [
            _move(x, row, DEVICE)
            for x, row in zip(arrays, self.rows[group], strict=True)
        ]
        self.in_flight += self.sizes[group]

    def _release(self, *, wait: bool) -> None:
        size, arrays = self.leaving.popleft()
        if wait:
            jax.block_until_ready(arrays)
        self.in_flight -= size


def _move(x: jax.Array, row: Row, memory: str) -> jax.Array:
    if row.memory == DEVICE:
        return x
    moved = jax.device_put(x, row.rest_in(memory).sharding, may_alias=False)
    x.delete()  # its memory is free once the copy is done
    return moved


def _moved_bytes(row: Row) -> int:
    return 0 if row.memory == DEVICE else row.device_bytes
