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
        programs: Programs that share the work.
        group: Heads whose tokens the columns of one head are.
    """

    schedule: Schedule
    sizes: Schedule
    batch: int
    programs: int
    group: int = 1

    @property
    def heads(self) -> int:
        """Heads of the rows."""
        return self.sizes.head_patterns.shape[0]

    def for_each(
        self, run: Callable[[jax.Array, "Item", Any], Any], carry: Any
    ) -> tuple[jax.Array, Any]:
        """Runs one item after another, and reads the next while one runs.

        Args:
            run: Of the item's number in this program, the item and what is carried;
                returns what is carried on.
            carry: What is carried into the first.

        Returns:
            The number of items, and what is carried out of the last.
        """

        def body(number, state):
            item, carry = state
            after = self._item(jnp.minimum(number + 1, count - 1))
            return after, run(number, Item(*item), carry)

        count = self._count()
        state = lax.fori_loop(0, count, body, (self._item(index(0)), carry))
        return count, state[1]

    def _count(self):
        total = self.schedule.num_items[0] * index(self.batch * self.heads)
        rounds = lax.div(total, index(self.programs))
        return rounds + (self._place(rounds) < total).astype(jnp.int32)

    def _item(self, number):
        """Heads come one after another, so that keys and values stay in the cache."""
        per_head = self.schedule.num_items[0]
        at = self._place(number)
        rest = lax.div(at, per_head)
        head = lax.rem(rest, index(self.heads))
        shared = self.sizes.items.shape[0] == 1
        pattern = index(0) if shared else self.schedule.head_patterns[head]
        nth = lax.rem(at, per_head)
        fields = (self.schedule.items[pattern, nth, field] for field in range(5))
        return lax.div(rest, index(self.heads)), head, pattern, *fields

    def _place(self, number):
        """Long items come first, so that every other round turns the order about."""
        program = lax.axis_index("program")
        last = index(self.programs - 1)
        turned = jnp.where(lax.rem(number, index(2)) == 0, program, last - program)
        return number * index(self.programs) + turned


@dataclasses.dataclass(frozen=True)
class Item:
    """Some chunks of a tile, for one sequence and head.

    Args:
        sequence: Which sequence.
        head: Which head of the rows.
        pattern: Pattern of the head.
        tile: Which tile; -1 is no item.
        first: First chunk.
        count: Number of chunks.
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
