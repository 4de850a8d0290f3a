"""Who computes which item."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from zjax_kernels.sparse_attention.mosaic_gpu.arithmetic import index
from zjax_kernels.sparse_attention.schedule import Schedule


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

    def count(self) -> jax.Array:
        """How many items this program has.

        Returns:
            int32[].
        """
        total = self.schedule.num_items[0] * index(self.batch * self.heads)
        rounds = lax.div(total, index(self.programs))
        return rounds + (self._place(rounds) < total).astype(jnp.int32)

    def item(self, number: jax.Array) -> "Item":
        """Reads an item.

        Heads come one after another, so that keys and values stay in the cache.

        Args:
            number: int32[], below `count()`.

        Returns:
            The item.
        """
        per_head = self.schedule.num_items[0]
        at = self._place(number)
        rest, head = lax.div(at, per_head), index(self.heads)
        nth, sequence, head = (
            lax.rem(at, per_head),
            lax.div(rest, head),
            lax.rem(rest, head),
        )
        pattern = self.schedule.head_patterns[head]
        fields = (self.schedule.items[pattern, nth, field] for field in range(5))
        return Item(sequence, head, pattern, *fields)

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
