"""Moves of tokens between the GPU's memory and shared memory."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from zjax_kernels.sparse.cells import HALF, TILE
from zjax_kernels.sparse.mosaic_gpu.arithmetic import index
from zjax_kernels.sparse.mosaic_gpu.work import Item, Work
from zjax_kernels.sparse.tuning import Tuning


def copy_all(
    work: Work,
    tuning: Tuning,
    copy_tile: Callable[[Item, Sequence[jax.Array], jax.Array], None],
    copy_chunk: Callable[[Item, jax.Array, jax.Array], None],
    tile_used: Sequence[tuple[Any, int]],
    chunk_used: Sequence[Any],
) -> None:
    """Fills shared memory with the tile and the chunks of one item after another.

    Args:
        work: The items.
        tuning: How many tiles and chunks there is room for.
        copy_tile: Starts to copy the tile of an item, given its rows and how many were
            copied; it waits for room itself.
        copy_chunk: The same for a chunk, given which.
        tile_used: Say that parts of the tile in a slot were used, and how many slots
            there are for each.
        chunk_used: Say the same of parts of a chunk.
    """
    early = int(tuning.tiles == 1 < tuning.stages)  # chunks with room before the tile

    def copy_item(number, item, copied):
        rows = read_rows(work, item, index(0), TILE)

        def copy(nth, copied):
            copy_chunk(item, item.first + nth, copied)
            return copied + 1

        copied = lax.fori_loop(0, early, copy, copied)
        copy_tile(item, rows, number)
        return lax.fori_loop(early, item.count, copy, copied)

    copied = work.for_each(copy_item, index(0))
    for used, slots in tile_used:
        _drain(used, work.count, slots)
    for used in chunk_used:
        _drain(used, copied, tuning.stages)


def wait_for_room(used: Any, number: jax.Array, slots: int) -> None:
    """Waits until a slot can be filled again.

    Args:
        used: Says that what was in a slot was used.
        number: How many were filled before.
        slots: Number of slots.
    """

    @pl.when(number >= index(slots))
    def _():
        plgpu.barrier_wait(used.at[lax.rem(number, index(slots))])


def _drain(used, filled, slots):
    """Waits until the last of what was copied has been used, as barriers must."""

    @pl.loop(jnp.maximum(filled - index(slots), 0), filled)
    def _(number):
        plgpu.barrier_wait(used.at[lax.rem(number, index(slots))])


def read_rows(work: Work, item: Item, first: jax.Array, count: int) -> list[jax.Array]:
    """Reads which tokens make up a tile, or a part of it.

    Args:
        work: Where rows are.
        item: Of which the tile is.
        first: The first row of the part.
        count: Rows of the part.

    Returns:
        The first token of each unit.
    """
    size = work.sizes.row_unit
    units: Any = work.schedule.rows
    start = lax.div(first, index(size))
    return [
        units[item.pattern, item.tile, start + number] * index(size)
        for number in range(count // size)
    ]


def copy_rows(
    work: Work,
    rows: Sequence[jax.Array],
    there: Any,
    moves: Sequence[tuple[Callable[[Any], Any], Any]],
) -> None:
    """Starts to copy the tokens of a tile.

    Args:
        work: What they are read by.
        rows: From `read_rows`.
        there: Hears of each copy.
        moves: Per array, its part for some tokens, and where all of them go:
            [halves, HALF, ...].
    """
    size = work.sizes.row_unit
    for number, row in enumerate(rows):
        half, within = divmod(number * size, HALF)
        for source, buffer in moves:
            place = half, pl.ds(within, size)
            plgpu.copy_gmem_to_smem(source(_tokens(row, size)), buffer.at[place], there)


def store_rows(
    work: Work,
    rows: Sequence[jax.Array],
    moves: Sequence[tuple[Any, Callable[[Any], Any]]],
) -> None:
    """Starts to copy what a half of a tile computed.

    Args:
        work: What rows are read by.
        rows: From `read_rows`.
        moves: Per array, what was computed, [HALF, ...], and where some tokens go.
    """
    size = work.sizes.row_unit
    plgpu.commit_smem()
    for number, row in enumerate(rows):
        for buffer, target in moves:
            part = buffer.at[pl.ds(number * size, size)]
            plgpu.copy_smem_to_gmem(part, target(_tokens(row, size)))


def wait_until_stored() -> None:
    """Waits until what was last stored may be written over."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def rows_of(
    ref: Any, item: Item, channels: slice = slice(None)
) -> Callable[[Any], Any]:
    """Where some tokens of the item's sequence and head are.

    Args:
        ref: [sequences, tokens, heads, channels].
        item: Of which sequence and head.
        channels: Which of them.

    Returns:
        A function of the tokens.
    """
    return lambda tokens: ref.at[item.sequence, tokens, item.head, channels]


def numbers_of(ref: Any, item: Item) -> Callable[[Any], Any]:
    """As `rows_of`, of numbers per token.

    Args:
        ref: [sequences, heads, tokens].
        item: Of which sequence and head.

    Returns:
        A function of the tokens.
    """
    return lambda tokens: ref.at[item.sequence, item.head, tokens]


def store_part(item: Item, moves: Sequence[tuple[Any, jax.Array]]) -> None:
    """Writes what an item computed of a tile that several items make up.

    Args:
        item: Of which the tile is.
        moves: Per array, where parts are, [sequences, heads, slots, TILE, ...], and the
            half of this warpgroup.
    """

    @pl.when(item.slot >= 0)
    def _():
        rows = pl.ds(lax.axis_index("warpgroup") * index(HALF), HALF)
        for ref, x in moves:
            ref.at[item.sequence, item.head, item.slot, rows][...] = x


def read_columns(work: Work, chunk: jax.Array) -> list[tuple[Any, jax.Array]]:
    """Reads which tokens make up a chunk.

    Args:
        work: Where columns are.
        chunk: Which chunk.

    Returns:
        Per unit its tokens, and the number of their head in the group.
    """
    sizes = work.sizes
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
    there: Any,
    moves: Sequence[tuple[Callable[..., Any], Any]],
) -> None:
    """Starts to copy the tokens of a chunk.

    Args:
        columns: From `read_columns`.
        there: Hears of each copy.
        moves: Per array, its part for some tokens of the head of that number in the
            group, and where all of them go: [chunk, ...].
    """
    for lane, (tokens, member) in enumerate(columns):
        for source, buffer in moves:
            size = buffer.shape[0] // len(columns)
            place = buffer.at[pl.ds(lane * size, size)]
            plgpu.copy_gmem_to_smem(source(tokens, member), place, there)


def _tokens(first, size):
    return pl.ds(pl.multiple_of(first, size), size)
