"""Rings of shared memory, and copies of tokens between global and shared memory."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from zjax_kernels.sparse.chunks import HALF, TILE
from zjax_kernels.sparse.mosaic_gpu.arithmetic import index
from zjax_kernels.sparse.mosaic_gpu.work import Item, Work


class Ring(NamedTuple):
    """Slots of shared memory that copies fill in turn.

    Args:
        slots: Number of slots.
        streams: Names of arrays that arrive on one barrier and are freed together. The
            first name is the name of the stream.
        last_first: Whether the last stream is copied first.
    """

    slots: int
    streams: Sequence[Sequence[str]]
    last_first: bool = False

    @property
    def names(self) -> list[str]:
        """Names of all arrays."""
        return [name for stream in self.streams for name in stream]

    def only(self, arrays: Mapping[str, Any]) -> "Ring":
        """Drops arrays that are not given, such as segments."""
        streams = [[name for name in each if name in arrays] for each in self.streams]
        return self._replace(streams=streams)


class Memory(NamedTuple):
    """Shared memory of arrays, and barriers of streams, by name.

    Args:
        buffers: Shared memory; `stats` has a row for each vector of columns.
        ready: Barriers per slot on which the copies of a stream arrive.
        free: Barriers per slot on which both warpgroups arrive when they have read.
        vectors: Names of the rows of `stats`.
    """

    buffers: dict[str, Any]
    ready: dict[str, Any]
    free: dict[str, Any]
    vectors: Sequence[str]

    def at(self, name: str, *place: Any) -> Any:
        """Slices the shared memory of an array: slot first."""
        if name in self.vectors:
            return self.buffers["stats"].at[self.vectors.index(name), *place]
        return self.buffers[name].at[place]

    def num_slots(self, stream: str) -> int:
        """Returns the number of slots of a stream."""
        return self.ready[stream].shape[0]

    def slot(self, stream: str, number: jax.Array) -> jax.Array:
        """Returns the slot of copy `number`."""
        return lax.rem(number, index(self.num_slots(stream)))

    def wait(self, stream: str, slot: jax.Array) -> None:
        """Waits until the copies into a slot have arrived."""
        plgpu.barrier_wait(self.ready[stream].at[slot])

    def release(self, stream: str, slot: jax.Array) -> None:
        """Tells the producer that a warpgroup has read a slot."""
        plgpu.barrier_arrive(self.free[stream].at[slot])

    def wait_until_free(self, stream: str, number: jax.Array) -> None:
        """Waits until the slot of copy `number` may be overwritten."""

        # Slots are free at first: nobody arrives for the first round.
        @pl.when(number >= index(self.num_slots(stream)))
        def _():
            plgpu.barrier_wait(self.free[stream].at[self.slot(stream, number)])

    def drain(self, stream: str, copied: jax.Array) -> None:
        """Waits for the last reads: a kernel must observe every arrival."""

        @pl.loop(jnp.maximum(copied - index(self.num_slots(stream)), 0), copied)
        def _(number):
            plgpu.barrier_wait(self.free[stream].at[self.slot(stream, number)])


def produce(
    work: Work,
    arrays: Mapping[str, Any],
    memory: Memory,
    rows: Sequence[Ring],
    columns: Ring,
) -> None:
    """Fills shared memory with the tile and the chunks of one item after another."""
    # With one slot for tiles, a slot for chunks is free before: copy a chunk first.
    early = int(rows[0].slots == 1 < columns.slots)

    def copy_item(number, item, copied):
        units = read_rows(work, item, index(0), TILE)

        def copy(nth, copied):
            _copy_chunk(work, arrays, memory, columns, item, item.first + nth, copied)
            return copied + 1

        copied = lax.fori_loop(0, early, copy, copied)
        _copy_tile(work, arrays, memory, rows, item, units, number)
        return lax.fori_loop(early, item.num_chunks, copy, copied)

    copied = work.for_each(copy_item, index(0))
    for ring in rows:
        for stream in ring.streams:
            memory.drain(stream[0], work.count)
    for stream in columns.streams:
        memory.drain(stream[0], copied)


def _copy_tile(work, arrays, memory, rows, item, units, number):
    """Starts to copy the rows of a tile, in units that begin at tokens `units`."""
    size = work.static.row_unit
    for ring in rows:
        slot = memory.slot(ring.names[0], number)
        for stream in ring.streams:
            memory.wait_until_free(stream[0], number)
            ready = memory.ready[stream[0]].at[slot]
            for nth, unit in enumerate(units):
                half, within = divmod(nth * size, HALF)
                for name in stream:
                    source = _find(arrays[name], item, _tokens(unit, size), item.head)
                    target = memory.at(name, slot).at[half, pl.ds(within, size)]
                    plgpu.copy_gmem_to_smem(source, target, ready)


def _copy_chunk(work, arrays, memory, ring, item, chunk, copied):
    """Starts to copy the columns of a chunk."""
    transposed, size = work.static.transposed, work.static.column_unit
    units = _read_columns(work, chunk)
    # Columns are keys, of one head for a group, or queries of all heads of the group.
    head = None if transposed else lax.div(item.head, index(work.group))
    slot = memory.slot(ring.names[0], copied)
    first = item.head * index(work.group) if transposed else head
    for stream in ring.streams[:: -1 if ring.last_first else 1]:
        memory.wait_until_free(stream[0], copied)
        ready = memory.ready[stream[0]].at[slot]
        for lane, (tokens, member) in enumerate(units):
            for name in stream:
                ref = arrays[name]
                if transposed and len(ref.shape) > 2:
                    head = first + member
                target = memory.at(name, slot).at[pl.ds(lane * size, size)]
                source = _find(ref, item, tokens, head)
                plgpu.copy_gmem_to_smem(source, target, ready)


def _find(ref, item, tokens, head, channels=slice(None)):
    """Slices an array in global memory: [B, S, H, D], [B, H, S], or segments [B, S]."""
    if len(ref.shape) == 2:
        return ref.at[item.sequence, tokens]
    if len(ref.shape) == 3:
        return ref.at[item.sequence, head, tokens]
    return ref.at[item.sequence, tokens, head, channels]


def read_rows(work: Work, item: Item, first: jax.Array, count: int) -> list[jax.Array]:
    """Returns the first token of each row unit, for `count` rows from row `first`."""
    size = work.static.row_unit
    units: Any = work.schedule.rows
    start = lax.div(first, index(size))
    return [
        units[item.pattern, item.tile, start + number] * index(size)
        for number in range(count // size)
    ]


def _read_columns(work, chunk):
    """Returns the tokens of each column unit of a chunk, and the head in the group."""
    sizes = work.static
    size, group = sizes.column_unit, work.group if sizes.transposed else 1
    per_head = index(sizes.num_columns // size // group)
    found = []
    for lane in range(sizes.chunk // size):
        unit = work.schedule.columns[chunk, lane]
        # Columns of a key head are the queries of a group, one head after another.
        member = lax.div(unit, per_head) if group > 1 else index(0)
        first = (unit - member * per_head) * index(size)
        found.append((_tokens(first, size), member))
    return found


def store_rows(
    work: Work,
    item: Item,
    rows: Sequence[jax.Array],
    moves: Sequence[tuple[Any, Any]],
    channels: slice = slice(None),
) -> None:
    """Starts to store the results of half a tile to units that begin at `rows`.

    `moves` has, per array, the results in shared memory, [HALF, ...], and the array in
    global memory, of which `channels` are stored.
    """
    size = work.static.row_unit
    plgpu.commit_smem()  # copies must see the writes of registers
    for number, row in enumerate(rows):
        for buffer, ref in moves:
            piece = buffer.at[pl.ds(number * size, size)]
            target = _find(ref, item, _tokens(row, size), item.head, channels)
            plgpu.copy_smem_to_gmem(piece, target)


def wait_for_stores() -> None:
    """Waits until the buffers of the last stores may be overwritten."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _tokens(first, size):
    # Mosaic must know that copies begin at multiples of their size.
    return pl.ds(pl.multiple_of(first, size), size)
