"""Skeleton of the three kernels: tiles of rows stay, chunks of columns pass by.

One warpgroup copies, two compute half a tile each. A kernel names the arrays that are
copied together; shared memory, barriers, copies and partial results follow from them.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from zjax_kernels.sparse.chunks import HALF, TILE
from zjax_kernels.sparse.mosaic_gpu import arithmetic as logits
from zjax_kernels.sparse.mosaic_gpu import copies
from zjax_kernels.sparse.mosaic_gpu.arithmetic import COLUMNS, ROWS, Arithmetic, index
from zjax_kernels.sparse.mosaic_gpu.copies import Memory, Ring
from zjax_kernels.sparse.mosaic_gpu.work import Item, Work, find_work
from zjax_kernels.sparse.reference import BackwardInputs, Options
from zjax_kernels.sparse.schedule import Schedule
from zjax_kernels.sparse.tuning import Tuning
from zjax_kernels.warpgroups import AXIS, NUM_COMPUTE, launch, specialize_warpgroups

NUM_HALVES = TILE // HALF
"""Warpgroups that compute, each half a tile."""
assert NUM_HALVES == NUM_COMPUTE


@dataclasses.dataclass(frozen=True)
class Program:
    """Half of the tiles of one program, for the warpgroup that computes them.

    Args:
        work: Items of the program.
        options: Scale and cap of scores.
        arithmetic: Operations on registers.
        memory: Shared memory.
        outputs: References to the results.
        partial: References to results of split tiles; empty without such tiles.
        half: Number of the warpgroup.
    """

    work: Work
    options: Options
    arithmetic: Arithmetic
    memory: Memory
    outputs: Sequence[Any]
    partial: Sequence[Any]
    half: jax.Array

    @property
    def segmented(self) -> bool:
        """Whether queries see only keys of equal segment."""
        return "row_segments" in self.memory.buffers

    def read_rows(self, item: Item) -> list[jax.Array]:
        """Returns the first token of each row unit of the half."""
        return copies.read_rows(self.work, item, self.half * index(HALF), HALF)

    def read_words(self, chunk: jax.Array) -> logits.Words:
        """Reads the bits of the half of a chunk."""
        return logits.read_words(self.arithmetic, self.work.schedule, chunk, self.half)

    def row_vector(self, name: str, slot: jax.Array) -> jax.Array:
        """Loads the segments or statistics of the rows of half a tile."""
        return self.arithmetic.load(self.memory.at(name, slot, self.half), ROWS)

    def column_vector(self, name: str, stage: jax.Array) -> jax.Array:
        """Loads the segments or statistics of the columns of a chunk."""
        return self.arithmetic.load(self.memory.at(name, stage), COLUMNS)

    def mask_weights(
        self, p: jax.Array, words: Any, row_segments: Any, stage: jax.Array
    ) -> jax.Array:
        """Puts 0 where a row does not see a column.

        Weights are masked, not scores: there is no maximum to keep finite.
        """
        p = logits.mask_cells(self.arithmetic, p, self.work.static, words, 0.0)
        if row_segments is None:
            return p
        column_segments = self.column_vector("column_segments", stage)
        return logits.mask_segments(p, row_segments, column_segments, 0.0)

    def store_gradients(
        self,
        item: Item,
        rows: Sequence[jax.Array],
        slot: jax.Array,
        gradients: Mapping[str, jax.Array],
    ) -> None:
        """Stores gradients, by the names of arrays in the tile."""
        memory = self.memory

        @pl.when(item.slot < 0)
        def _():
            for ref, (name, grad) in zip(self.outputs, gradients.items(), strict=True):
                # A gradient takes the place of an array that nobody reads any more:
                # two tiles fit.
                buffer = memory.at(name, slot, self.half)
                if "result" in memory.buffers:
                    copies.wait_for_stores()
                    buffer = memory.at("result", self.half)
                buffer[...] = grad.astype(ref.dtype)
                copies.store_rows(self.work, item, rows, [(buffer, ref)])

        self.store_partial(item, *gradients.values())

    def store_partial(self, item: Item, *results: jax.Array) -> None:
        """Writes the results of an item that is part of a split tile."""

        def store():
            rows = pl.ds(lax.axis_index(AXIS) * index(HALF), HALF)
            for ref, x in zip(self.partial, results, strict=True):
                ref.at[item.sequence, item.head, item.slot, rows][...] = x

        if self.partial:
            pl.when(item.slot >= 0)(store)


def fold_chunks(
    chunk: Callable[..., Any], carry: Any, num_full: jax.Array, count: jax.Array
) -> Any:
    """Folds `chunk(nth, carry, masked)` over chunks; full ones come first, unmasked."""
    for masked, first, end in ((False, 0, num_full), (True, num_full, count)):

        def body(nth, carry, masked=masked):
            return chunk(nth, carry, masked)

        carry = lax.fori_loop(first, end, body, carry)
    return carry


def name_arrays(inputs: BackwardInputs, *segments: str) -> dict[str, jax.Array]:
    """Names arrays of a backward pass, and segments of queries and keys, if any.

    Kernels read log-sum-exps in base 2.
    """
    *arrays, pair = inputs._replace(lse=logits.base_2(inputs.lse))
    names = *inputs._fields[:-1], *segments
    return dict(zip(names, (*arrays, *(pair or ())), strict=False))


def run(
    compute: Callable[[Program], None],
    arrays: Mapping[str, Any],
    outputs: Sequence[jax.ShapeDtypeStruct],
    schedule: Schedule,
    options: Options,
    *,
    rows: Sequence[Ring],
    columns: Ring,
    scratch: Mapping[str, Any],
    tuning: Tuning,
    interpret: Any,
) -> tuple[Sequence[jax.Array], Sequence[jax.Array]]:
    """Runs `compute` on the work of a schedule, one persistent program per SM.

    `arrays` are [B, S, H, D], [B, H, S] or segments [B, S], by name; `scratch` is
    further shared memory. Returns `outputs`, which are like the arrays, and results of
    split tiles, float32[B, H, slots, TILE, ...]. `interpret` holds the interpreter's
    parameters, None on a GPU.
    """
    rows, columns = [ring.only(arrays) for ring in rows], columns.only(arrays)
    types = _allocate(arrays, schedule, rows, columns, scratch)
    batch, _, heads, _ = arrays[rows[0].names[0]].shape
    group = arrays["q"].shape[2] // arrays["k"].shape[2]
    split = batch, heads, schedule.num_slots, TILE
    partial = [
        jax.ShapeDtypeStruct((*split, *x.shape[3:]), jnp.float32)
        for x in outputs
        if schedule.num_slots
    ]

    def body(inputs, results, refs):
        schedule_refs, array_refs = inputs
        work = find_work(schedule_refs, schedule, batch, group)
        named = dict(zip(arrays, array_refs, strict=True))
        buffers, ready, free = (
            dict(zip(*x, strict=True)) for x in zip(types[:3], refs, strict=True)
        )
        memory = Memory(buffers, ready, free, types.vectors)
        given = work, options, Arithmetic(interpret), memory
        halves = results[: len(outputs)], results[len(outputs) :]
        specialize_warpgroups(
            lambda: compute(Program(*given, *halves, lax.axis_index(AXIS))),
            lambda: copies.produce(work, named, memory, rows, columns),
        )

    semantics = plgpu.LoweringSemantics
    found = launch(
        body,
        (_without_unread(schedule), list(arrays.values())),
        [*outputs, *partial],
        # Lists, as JAX would sort dictionaries, and move offsets.
        [list(x.values()) for x in types[:3]],
        num_programs=schedule.num_programs,
        num_warpgroups=NUM_COMPUTE + 1,
        interpret=interpret,
        approx_math=True,  # exp2 and tanh are single instructions
        reduction_scratch_bytes=0,  # rows are reduced within a warp
        lowering_semantics=semantics.Warpgroup if tuning.warpgroup else semantics.Lane,
    )
    return found[: len(outputs)], found[len(outputs) :]


def _allocate(arrays, schedule, rows, columns, scratch):
    """Returns types of shared memory and barriers, as a `Memory`."""
    row_leads, column_lead = {}, (columns.slots, schedule.chunk)
    for ring in rows:
        row_leads |= dict.fromkeys(ring.names, (ring.slots, NUM_HALVES, HALF))
    column_leads = dict.fromkeys(columns.names, column_lead)

    def allocate(leads, num_dims):
        make = smem_matrix if num_dims == 4 else plgpu.SMEM
        return {
            name: make((*lead, *x.shape[3:]), x.dtype)
            for name, lead in leads.items()
            if (x := arrays[name]).ndim == num_dims
        }

    # Matrices, which are aligned, before vectors, and segments last.
    buffers = allocate(row_leads, 4) | allocate(row_leads, 3)
    buffers |= allocate(column_leads, 4)
    vectors = list(allocate(column_leads, 3))
    if vectors:
        buffers["stats"] = plgpu.SMEM((len(vectors), *column_lead), jnp.float32)
    buffers |= scratch | allocate(row_leads, 2) | allocate(column_leads, 2)
    units = TILE // schedule.row_unit, schedule.chunk // schedule.column_unit
    rings = [*((ring, units[0]) for ring in rows), (columns, units[1])]
    streams = [(x, ring.slots, count) for ring, count in rings for x in ring.streams]
    # Arrivals are copies, or warpgroups that have read.
    ready = {
        names[0]: plgpu.Barrier(num_arrivals=count * len(names), num_barriers=slots)
        for names, slots, count in streams
    }
    free = {
        names[0]: plgpu.Barrier(num_arrivals=NUM_HALVES, num_barriers=slots)
        for names, slots, _ in streams
    }
    return Memory(buffers, ready, free, vectors)


def _without_unread(schedule: Schedule) -> Schedule:
    """Drops arrays that the kernel does not read; XLA would copy each per call."""
    unused = dict.fromkeys(("num_items", "splits", "head_patterns"))
    return dataclasses.replace(schedule, **unused)


def smem_matrix(shape: Sequence[int], dtype: Any) -> Any:
    """Allocates 16-bit matrices, tiled and swizzled for tensor cores."""
    # 64 numbers are 128 bytes, the widest swizzle; 96 channels take 32.
    width = 64 if shape[-1] % 64 == 0 else 32
    tiling = plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(2 * width)
    return plgpu.SMEM(tuple(shape), dtype, transforms=tiling)


def channel_slices(head_size: int, *, segmented: bool) -> list[slice]:
    """Returns equal slices of the channels of a result, which fit in shared memory.

    Segments take shared memory, too.
    """
    size = min(head_size, 64 if segmented and head_size >= 128 else 128)
    return [slice(start, start + size) for start in range(0, head_size, size)]
