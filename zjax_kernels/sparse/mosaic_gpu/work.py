"""The work items of each program."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zjax_kernels.sparse.mosaic_gpu.arithmetic import index
from zjax_kernels.sparse.schedule import Schedule


@dataclasses.dataclass(frozen=True)
class Work:
    """The items of one program, read from the arrays of a schedule.

    Args:
        schedule: Schedule whose fields are references to global memory.
        static: The same schedule outside of the kernel; read for shapes and sizes.
        batch: Number of sequences.
        group: Query heads per key head if columns are queries, else 1.
        start: Position in `order` of the first item of the program.
        size: Number of items of the program per sequence.
    """

    schedule: Schedule
    static: Schedule
    batch: int
    group: int
    start: jax.Array
    size: jax.Array

    def for_each(self, run: Callable[[jax.Array, "Item", Any], Any], carry: Any) -> Any:
        """Calls `run(number, item, carry) -> carry`; loads the next item meanwhile."""

        def body(number, state):
            item, after, carry = state
            following = self._item(number + 1, after), self._order_entry(number + 2)
            return *following, run(number, Item(*item), carry)

        first = (
            self._item(index(0), self._order_entry(index(0))),
            self._order_entry(index(1)),
        )
        return lax.fori_loop(0, self.count, body, (*first, carry))[-1]

    @property
    def count(self) -> jax.Array:
        """Number of items of this program."""
        return self.size * index(self.batch)

    def _order_entry(self, number):
        """Head, pattern, and index of an item within the pattern's items."""
        nth = lax.rem(number, jnp.maximum(self.size, 1))
        at = jnp.minimum(self.start + nth, index(self.static.order.shape[0] - 1))
        return tuple(self.schedule.order[at, field] for field in range(3))

    def _item(self, number, entry):
        head, pattern, nth = entry
        fields = (self.schedule.items[pattern, nth, field] for field in range(5))
        sequence = lax.div(number, jnp.maximum(self.size, 1))
        return sequence, head, pattern, *fields


def find_work(schedule: Schedule, static: Schedule, batch: int, group: int = 1) -> Work:
    """The items of this program."""
    program = lax.axis_index("program")
    ends: Any = schedule.ends
    start = ends[program]
    size = ends[program + 1] - start
    return Work(schedule, static, batch, group, start, size)


@dataclasses.dataclass(frozen=True)
class Item:
    """Some chunks of a tile, for one sequence and head.

    Args:
        sequence: Index of the sequence.
        head: Index of the head of the rows.
        pattern: Pattern of the head.
        tile: Index of the tile.
        first: First chunk.
        count: Number of chunks, 1 or more.
        full: Number of full chunks, which come first.
        slot: Slot of the partial result, or -1.
    """

    sequence: jax.Array
    head: jax.Array
    pattern: jax.Array
    tile: jax.Array
    first: jax.Array
    count: jax.Array
    full: jax.Array
    slot: jax.Array
