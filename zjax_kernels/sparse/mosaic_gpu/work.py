"""Work items of a program, read from a schedule; merged results of split tiles."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from zjax_kernels.sparse.mosaic_gpu.arithmetic import index
from zjax_kernels.sparse.schedule import Schedule


@dataclasses.dataclass(frozen=True)
class Work:
    """The items of one program, read from the arrays of a schedule.

    Args:
        schedule: Schedule of references to global memory.
        static: Schedule outside of the kernel; read for shapes and sizes.
        batch: Number of sequences.
        group: Query heads per key head.
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
            # Two dependent loads, an item apart: `order` says which item is next.
            item, after, carry = state
            following = self._item(number + 1, after), self._order_entry(number + 2)
            return *following, run(number, item, carry)

        first = (
            self._item(index(0), self._order_entry(index(0))),
            self._order_entry(index(1)),
        )
        return lax.fori_loop(0, self.count, body, (*first, carry))[-1]

    @property
    def count(self) -> jax.Array:
        """Number of items of the program, for all sequences."""
        return self.size * index(self.batch)

    def _order_entry(self, number):
        """Returns head, pattern, and index of an item within the pattern's items."""
        nth = lax.rem(number, jnp.maximum(self.size, 1))
        # Loads run ahead, also in a program without items, which may begin at the end.
        at = jnp.minimum(self.start + nth, index(self.static.order.shape[0] - 1))
        return tuple(self.schedule.order[at, field] for field in range(3))

    def _item(self, number, entry):
        """Returns an item of an entry of `order`."""
        head, pattern, nth = entry
        fields = (self.schedule.items[pattern, nth, field] for field in range(5))
        sequence = lax.div(number, jnp.maximum(self.size, 1))
        return Item(sequence, head, pattern, *fields)


def find_work(schedule: Schedule, static: Schedule, batch: int, group: int) -> Work:
    """Returns the items of the current program."""
    program = lax.axis_index("program")
    ends: Any = schedule.ends
    start = ends[program]
    size = ends[program + 1] - start
    return Work(schedule, static, batch, group, start, size)


class Item(NamedTuple):
    """Some chunks of a tile, for one sequence and head.

    Args:
        sequence: Index of the sequence.
        head: Index of the head of the rows.
        pattern: Pattern of the head.
        tile: Index of the tile.
        first: First chunk.
        num_chunks: Number of chunks, 1 or more.
        full: Number of full chunks, which come first.
        slot: Slot of the partial result, or -1.
    """

    sequence: jax.Array
    head: jax.Array
    pattern: jax.Array
    tile: jax.Array
    first: jax.Array
    num_chunks: jax.Array
    full: jax.Array
    slot: jax.Array


def merge_outputs(
    out: jax.Array,
    lse: jax.Array,
    partial: Sequence[jax.Array],
    schedule: Schedule,
) -> tuple[jax.Array, jax.Array]:
    """Merges the partial results of split tiles, if any, into `out` and `lse`.

    `out` is [B, S, H, D] and `lse` [B, H, S]. `partial` are outputs over some of the
    keys, float32[B, H, slots, TILE, D], and log-sum-exps, float32[B, H, slots, TILE].
    """
    if not partial:
        return out, lse
    partial_out, partial_lse = partial
    slots, tokens = _splits(schedule)
    heads = jnp.arange(len(slots))[:, None, None]
    exists = slots >= 0
    lses = jnp.where(exists[None, ..., None], partial_lse[:, heads, slots], -jnp.inf)
    merged = jax.nn.logsumexp(lses, axis=3)
    # -inf minus -inf is NaN, in rows without keys.
    level = jnp.where(jnp.isneginf(merged), 0.0, merged)
    weights = jnp.exp(lses - level[:, :, :, None])
    outputs = jnp.where(
        exists[None, ..., None, None], partial_out[:, heads, slots], 0.0
    )
    outputs = (outputs * weights[..., None]).sum(axis=3)
    # Set: the kernel has not written rows of split tiles.
    out = out.at[:, tokens, heads].set(outputs.astype(out.dtype), mode="drop")
    return out, lse.at[:, heads, tokens].set(merged, mode="drop")


def merge_gradients(
    gradients: Sequence[jax.Array], partial: Sequence[jax.Array], schedule: Schedule
) -> list[jax.Array]:
    """Merges partial sums, if any, float32[B, H, slots, TILE, D], into [B, S, H, D]."""
    if not partial:
        return list(gradients)
    return [
        _add_parts(*each, schedule) for each in zip(gradients, partial, strict=True)
    ]


def _add_parts(x, partial, schedule):
    """Puts the sums of partial results in the rows of split tiles of `x`."""
    slots, tokens = _splits(schedule)
    heads = jnp.arange(len(slots))[:, None, None]
    exists = (slots >= 0)[None, ..., None, None]
    sums = jnp.where(exists, partial[:, heads, slots], 0.0).sum(axis=3)
    return x.at[:, tokens, heads].set(sums.astype(x.dtype), mode="drop")


def _splits(schedule):
    """Returns slots [H, tiles, pieces] and tokens [H, tiles, TILE] of split tiles."""
    splits = schedule.splits[schedule.head_patterns]
    tiles, slots = splits[..., 0], splits[..., 1:]
    patterns = schedule.head_patterns[:, None]
    units = schedule.rows[patterns, jnp.maximum(tiles, 0)]
    within = jnp.arange(schedule.row_unit).reshape(1, 1, 1, -1)
    tokens = units[..., None] * schedule.row_unit + within
    tokens = tokens.reshape(*tiles.shape, -1)
    # Padding gets a token beyond the last, which `mode="drop"` drops.
    return slots, jnp.where(tiles[..., None] >= 0, tokens, schedule.num_rows)
