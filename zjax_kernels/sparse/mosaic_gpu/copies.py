"""Copies of tokens between global and shared memory."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from zjax_kernels.sparse.chunks import HALF, TILE
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

    `copy_tile` and `copy_chunk` wait for a free slot and start a copy; the last
    argument counts earlier copies. `tile_free` has barriers that free slots of tiles,
    each with the number of slots; `chunk_free` has barriers that free slots of chunks.
    """
    # With one slot for tiles, a slot for chunks is free before: copy a chunk first.
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
    """Waits until the consumers have freed the slot of copy `number`."""

    # Slots are free at first: nobody arrives for the first round.
    @pl.when(number >= index(slots))
    def _():
        plgpu.barrier_wait(free.at[lax.rem(number, index(slots))])


def _drain(free, filled, slots):
    """Waits for the last copies to be consumed: a kernel must observe every arrival."""

    @pl.loop(jnp.maximum(filled - index(slots), 0), filled)
    def _(number):
        plgpu.barrier_wait(free.at[lax.rem(number, index(slots))])


def read_rows(work: Work, item: Item, first: jax.Array, count: int) -> list[jax.Array]:
    """Returns the first token of each row unit, for `count` rows from row `first`."""
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
    """Starts to copy the tokens of a tile from units that begin at `rows`.

    `ready` is the barrier on which each copy arrives. `moves` has, per array, a
    function from tokens to a slice of global memory, and the target in shared memory,
    [halves, HALF, ...].
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
    """Starts to store the results of half a tile to units that begin at `rows`.

    `moves` has, per array, the results in shared memory, [HALF, ...], and a function
    from tokens to a slice of global memory.
    """
    size = work.static.row_unit
    plgpu.commit_smem()  # copies must see the writes of registers
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
    """Returns a function from tokens to [sequences, tokens, heads, channels] rows."""
    return lambda tokens: ref.at[item.sequence, tokens, item.head, channels]


def token_scalars(ref: Any, item: Item) -> Callable[[Any], Any]:
    """Returns a function from tokens to [sequences, heads, tokens] scalars."""
    return lambda tokens: ref.at[item.sequence, item.head, tokens]


def store_partial(item: Item, moves: Sequence[tuple[Any, jax.Array]]) -> None:
    """Writes the partial result of a tile that several items make up.

    `moves` has, per array, the target [sequences, heads, slots, TILE, ...], and the
    half of a warpgroup.
    """

    @pl.when(item.slot >= 0)
    def _():
        rows = pl.ds(lax.axis_index("warpgroup") * index(HALF), HALF)
        for ref, x in moves:
            ref.at[item.sequence, item.head, item.slot, rows][...] = x


def read_columns(work: Work, chunk: jax.Array) -> list[tuple[Any, jax.Array]]:
    """Returns the tokens of each column unit of a chunk, and the head in the group."""
    sizes = work.static
    size = sizes.column_unit
    per_head = index(sizes.num_columns // size // work.group)
    found = []
    for lane in range(sizes.chunk // size):
        unit = work.schedule.columns[chunk, lane]
        # Columns of a key head are the queries of a group, one head after another.
        member = lax.div(unit, per_head) if work.group > 1 else index(0)
        first = (unit - member * per_head) * index(size)
        found.append((_tokens(first, size), member))
    return found


def copy_columns(
    columns: Sequence[tuple[Any, jax.Array]],
    ready: Any,
    moves: Sequence[tuple[Callable[..., Any], Any]],
) -> None:
    """Starts to copy the tokens of a chunk, from the result of `read_columns`.

    `ready` is the barrier on which each copy arrives. `moves` has, per array, a
    function from tokens and head to a slice of global memory, and the target in shared
    memory, [chunk, ...].
    """
    for lane, (tokens, member) in enumerate(columns):
        for source, buffer in moves:
            size = buffer.shape[0] // len(columns)
            place = buffer.at[pl.ds(lane * size, size)]
            plgpu.copy_gmem_to_smem(source(tokens, member), place, ready)


def _tokens(first, size):
    # Mosaic must know that copies begin at multiples of their size.
    return pl.ds(pl.multiple_of(first, size), size)
