"""Who computes which item."""

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
        schedule: The same fields as references to the GPU's memory.
        sizes: The schedule.
        batch: Sequences.
        group: Heads whose tokens the columns of one head are.
        start: Where its items begin in `order`.
        size: Number of its items per sequence.
    """

    schedule: Schedule
    sizes: Schedule
    batch: int
    group: int
    start: jax.Array
    size: jax.Array

    def for_each(self, run: Callable[[jax.Array, "Item", Any], Any], carry: Any) -> Any:
        """Runs one item after another, and reads the next while one runs.

        Args:
            run: Of the item's number in this program, the item and what is carried;
                returns what is carried on.
            carry: What is carried into the first.

        Returns:
            What is carried out of the last.
        """

        def body(number, state):
            item, after, carry = state
            following = self._item(number + 1, after), self._place(number + 2)
            return *following, run(number, Item(*item), carry)

        first = self._item(index(0), self._place(index(0))), self._place(index(1))
        return lax.fori_loop(0, self.count, body, (*first, carry))[-1]

    @property
    def count(self) -> jax.Array:
        """Items of this program."""
        return self.size * index(self.batch)

    def _place(self, number):
        """Head, pattern and item: what to read an item by."""
        nth = lax.rem(number, jnp.maximum(self.size, 1))
        at = jnp.minimum(self.start + nth, index(self.sizes.order.shape[0] - 1))
        return tuple(self.schedule.order[at, field] for field in range(3))

    def _item(self, number, place):
        head, pattern, nth = place
        fields = (self.schedule.items[pattern, nth, field] for field in range(5))
        sequence = lax.div(number, jnp.maximum(self.size, 1))
        return sequence, head, pattern, *fields


def find_work(schedule: Schedule, sizes: Schedule, batch: int, group: int = 1) -> Work:
    """The items of this program.

    Args:
        schedule: The fields of a schedule as references to the GPU's memory.
        sizes: The schedule.
        batch: Sequences.
        group: Heads whose tokens the columns of one head are.

    Returns:
        Its work.
    """
    program = lax.axis_index("program")
    ends: Any = schedule.ends
    start = ends[program]
    size = ends[program + 1] - start
    return Work(schedule, sizes, batch, group, start, size)


@dataclasses.dataclass(frozen=True)
class Item:
    """Some chunks of a tile, for one sequence and head.

    Args:
        sequence: Which sequence.
        head: Which head of the rows.
        pattern: Pattern of the head.
        tile: Which tile.
        first: First chunk.
        count: Number of chunks, 1 or more.
        full: How many of them are full; they come first.
        slot: Where the partial result goes, or -1.
    """

    sequence: jax.Array
    head: jax.Array
    pattern: jax.Array
    tile: jax.Array
    first: jax.Array
    count: jax.Array
    full: jax.Array
    slot: jax.Array
