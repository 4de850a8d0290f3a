"""Copies of tokens between global and shared memory, by the producer warpgroup."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from zjax_kernels.sparse.cells import HALF, TILE
from zjax_kernels.sparse.mosaic_gpu.arithmetic import index
from zjax_kernels.sparse.mosaic_gpu.launch import Item, Work
from zjax_kernels.sparse.tuning import Tuning


def produce(
    work: Work,
    tuning: Tuning,
    copy_tile: Callable[[Item, Sequence[jax.Array], jax.Array], None],
    copy_chunk: Callable[[Item, jax.Array, jax.Array], None],
    tile_free: Sequence[tuple[Any, int]],
    chunk_free: Sequence[Any],
) -> None:
    """Fills shared memory with the tile and the chunks of one item after another.

    `copy_tile` and `copy_chunk` start a copy, given the number of copies before, and
    wait for a free slot. `tile_free` are barriers that free a slot of a tile, with
    their numbers of slots, and `chunk_free` those of chunks.
    """
    # Chunks whose slots are free before that of the tile.
    early = int(tuning.tiles == 1 < tuning.stages)

    def copy_item(number, item, copied):
        rows = read_rows(work, item, index(0), TILE)

        def copy(nth, copied):
            copy_chunk(item, item.first + nth, copied)
            return copied + 1

        copied = lax.fori_loop(0, early, copy, copied)
        copy_tile(item, rows, number)
        return lax.fori_loop(early, item.count, copy, copied)

    copied = work.for_each(copy_item, index(0))
    for free, slots in tile_free:
        _drain(free, work.count, slots)
    for free in chunk_free:
        _drain(free, copied, tuning.stages)


def wait_for_free_slot(free: Any, number: jax.Array, slots: int) -> None:
    """Waits until the slot of the copy `number` has been consumed."""

    @pl.when(number >= index(slots))
    def _():
        plgpu.barrier_wait(free.at[lax.rem(number, index(slots))])


def _drain(free, filled, slots):
    """Waits for the last copies to be consumed, as barriers must be at the end."""

    @pl.loop(jnp.maximum(filled - index(slots), 0), filled)
    def _(number):
        plgpu.barrier_wait(free.at[lax.rem(number, index(slots))])


def read_rows(work: Work, item: Item, first: jax.Array, count: int) -> list[jax.Array]:
    """First tokens of the row units of a tile, from row `first` on, `count` rows."""
    size = work.static.row_unit
    units: Any = work.schedule.rows
    start = lax.div(first, index(size))
    return [
        units[item.pattern, item.tile, start + number] * index(size)
        for number in range(count // size)
    ]


def copy_rows(
    work: Work,
    rows: Sequence[jax.Array],
    ready: Any,
    moves: Sequence[tuple[Callable[[Any], Any], Any]],
) -> None:
    """Starts to copy the tokens of a tile, whose units begin at `rows`.

    `ready` is the barrier on which each copy arrives. `moves` has, per array, a
    function from tokens to its slice, and the target in shared memory, [halves, HALF,
    ...].
    """
    size = work.static.row_unit
    for number, row in enumerate(rows):
        half, within = divmod(number * size, HALF)
        for source, buffer in moves:
            place = half, pl.ds(within, size)
            plgpu.copy_gmem_to_smem(source(_tokens(row, size)), buffer.at[place], ready)


def store_rows(
    work: Work,
    rows: Sequence[jax.Array],
    moves: Sequence[tuple[Any, Callable[[Any], Any]]],
) -> None:
    """Starts to copy the results of half a tile, whose units begin at `rows`.

    `moves` has, per array, the results in shared memory, [HALF, ...], and a function
    from tokens to their target in global memory.
    """
    size = work.static.row_unit
    plgpu.commit_smem()
    for number, row in enumerate(rows):
        for buffer, target in moves:
            piece = buffer.at[pl.ds(number * size, size)]
            plgpu.copy_smem_to_gmem(piece, target(_tokens(row, size)))


def wait_for_stores() -> None:
    """Waits until the buffers of the last stores may be overwritten."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def token_rows(
    ref: Any, item: Item, channels: slice = slice(None)
) -> Callable[[Any], Any]:
    """Function from tokens to their rows in [sequences, tokens, heads, channels]."""
    return lambda tokens: ref.at[item.sequence, tokens, item.head, channels]


def token_scalars(ref: Any, item: Item) -> Callable[[Any], Any]:
    """Function from tokens to their scalars in [sequences, heads, tokens]."""
    return lambda tokens: ref.at[item.sequence, item.head, tokens]


def store_partial(item: Item, moves: Sequence[tuple[Any, jax.Array]]) -> None:
    """Writes the partial result of a tile that several items make up.

    `moves` has, per array, the target [sequences, heads, slots, TILE, ...], and the
    half of this warpgroup.
    """

    @pl.when(item.slot >= 0)
    def _():
        rows = pl.ds(lax.axis_index("warpgroup") * index(HALF), HALF)
        for ref, x in moves:
            ref.at[item.sequence, item.head, item.slot, rows][...] = x


def read_columns(work: Work, chunk: jax.Array) -> list[tuple[Any, jax.Array]]:
    """Tokens of each column unit of a chunk, and their head in the group."""
    sizes = work.static
    size = sizes.column_unit
    per_head = index(sizes.num_columns // size // work.group)
    found = []
    for lane in range(sizes.chunk // size):
        unit = work.schedule.columns[chunk, lane]
        member = lax.div(unit, per_head) if work.group > 1 else index(0)
        first = (unit - member * per_head) * index(size)
        found.append((_tokens(first, size), member))
    return found


def copy_columns(
    columns: Sequence[tuple[Any, jax.Array]],
    ready: Any,
    moves: Sequence[tuple[Callable[..., Any], Any]],
) -> None:
    """Starts to copy the tokens of a chunk, as `read_columns` gives them.

    `ready` is the barrier on which each copy arrives. `moves` has, per array, a
    function from tokens and head to its slice, and the target in shared memory, [chunk,
    ...].
    """
    for lane, (tokens, member) in enumerate(columns):
        for source, buffer in moves:
            size = buffer.shape[0] // len(columns)
            place = buffer.at[pl.ds(lane * size, size)]
            plgpu.copy_gmem_to_smem(source(tokens, member), place, ready)


def _tokens(first, size):
    return pl.ds(pl.multiple_of(first, size), size)
