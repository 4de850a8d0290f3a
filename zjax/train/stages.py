"""A model on the stages of a pipeline: arrays in slots, functions by chunk."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from zjax.ops import shards
from zjax.ops.keys import block_key
from zjax.parallel import slots as arrays
from zjax.parallel.pipeline import ChunkLayers, StackTree, StageChain
from zjax.parallel.pipeline_schedule import Schedule
from zjax.parallel.slots import SegmentSlots, assign_slots, whole_slots
from zjax.sharding.mesh import EXPERT, PIPELINE, SEQUENCE, TENSOR
from zjax.sharding.placement import ArrayPlan
from zjax.stack.dropping import (
    BlockInput,
    block_on_tokens,
    make_input,
    of_block,
    on_span,
    run_block,
)
from zjax.stack.forward import check_totals, combine, loss_of_sums
from zjax.train import microbatches
from zjax.train.gradients import LocalGradients
from zjax.train.partition import StagePartition, as_integers, no_totals, with_block
from zjax.typing import Auxiliary, Batch, Dropping, Loss, Params


@dataclasses.dataclass(frozen=True, eq=False)
class StagedModel:
    """The program of the devices that hold equal rows, one device in each stage.

    Args:
        partition: Partition of trees into embedding, blocks and head.
        local: Gradients of the local rows.
        schedule: Order of the passes of a step.
        keeps: Policy of `jax.checkpoint` for the residuals of a block; None saves all.
        gathers_in_ticks: Whether each pass gathers the parameters that the pass uses.
    """

    partition: StagePartition
    local: LocalGradients
    schedule: Schedule
    keeps: Callable[..., Any] | None
    gathers_in_ticks: bool

    @functools.cached_property
    def rows(self) -> StackTree:
        """Plans of the stored parameters, by part."""
        return self.partition.split(self.local.plan.master)

    @functools.cached_property
    def block_rows(self) -> tuple[Any, ...]:
        """Plans of the stored parameters of one block of each segment."""
        return jax.tree.map(lambda row: row.layer, self.rows.stages)

    def by_slot(self, rows: StackTree) -> StackTree:
        """Expands plans of blocks to one tree for each slot of a chunk, by segment."""
        blocks = jax.tree.map(lambda row: row.layer, rows.stages)
        pairs = zip(blocks, self.slots, strict=True)
        return dataclasses.replace(
            rows, stages=[[block] * slots.size for block, slots in pairs]
        )

    @functools.cached_property
    def slots(self) -> tuple[SegmentSlots, ...]:
        """The slots in which the blocks of each segment run."""
        schedule = self.schedule
        return assign_slots(
            [segment.num_blocks for segment in self.partition.stack.segments],
            schedule.num_stages * schedule.num_chunks,
            [
                sum(math.prod(row.shape) for row in jax.tree.leaves(rows))
                for rows in self.block_rows
            ],
        )

    @functools.cached_property
    def blocks(self) -> tuple[Callable[..., Any], ...]:
        """`block(params, carry, context, input) -> (carry, Auxiliary)` by segment."""
        runs = (
            functools.partial(self.run_block, segment)
            for segment in range(len(self.slots))
        )
        keeps = self.keeps
        if keeps is None:
            return tuple(runs)
        return tuple(jax.checkpoint(run, policy=keeps) for run in runs)

    @property
    def communicates(self) -> bool:
        """Whether devices exchange anything within a chunk."""
        sizes = self.local.plan.mesh.shape
        axes = EXPERT, SEQUENCE, TENSOR
        return self.gathers_in_ticks or any(sizes[axis] > 1 for axis in axes)

    def chain(
        self, scale: jax.Array, unit: jax.Array, dropping: Dropping
    ) -> StageChain:
        """Builds the functions of one microbatch.

        `scale`, float32[], is the loss scale, and `unit`, float32[], the weight that
        counts as 1.
        """
        return StageChain(
            functools.partial(self.embed, dropping),
            self.chunk,
            functools.partial(self.head, scale, unit),
            gathers=self.gathers_in_ticks,
            communicates=self.communicates,
        )

    def embed(
        self, dropping: Dropping, params: Params, batch: Batch, key: Any
    ) -> tuple[Any, Any]:
        """Returns a microbatch's stream, with context and what the blocks drop."""
        params, batch = self.gather_after(params, batch, self.rows.embed)
        device_key = block_key(self.local.device_key(key), 0)
        carry, context = self.partition.stack.embed(params, batch, device_key)
        sums = self.zero_sums(carry, context, device_key, dropping)
        stream = carry, sums, no_totals(self.partition.stack.segments)
        return stream, (context, dropping)

    def zero_sums(
        self, carry: Any, context: Any, key: Any, dropping: Dropping
    ) -> tuple[Auxiliary, ...]:
        """Returns zeros for auxiliary losses and metrics of each segment."""
        rows = self.partition.split(self.local.plan.compute).stages
        layers = jax.tree.map(
            lambda row: jax.ShapeDtypeStruct(row.shape[1:], row.dtype), rows
        )
        stack, sums = self.partition.stack, []
        given = make_input(key, 0, 1, of_block(dropping, False), carry)
        for segment, layer in zip(stack.segments, layers, strict=True):
            run = functools.partial(run_block, block_on_tokens(stack, segment))
            _, auxiliary = jax.eval_shape(run, layer, carry, context, given)
            scalars = auxiliary._replace(totals={})
            # Shapes are enough: the block is not run for them.
            sums.append(jax.tree.map(lambda _: jnp.zeros((), jnp.float32), scalars))
        return tuple(sums)

    def chunk(
        self, layers: ChunkLayers, stream: Any, context: Any, key: Any, number: Any
    ) -> Any:
        """Runs the blocks of a chunk, by segment and slot.

        All chunks are one program: the slots of the first and the last block of the
        model run on all tokens in every chunk.
        """
        key, (context, dropping) = self.local.device_key(key), context
        places = [(i, j) for i, each in enumerate(layers) for j in range(len(each))]
        inner = {*places} - whole_slots(self.slots)
        for is_inner, group in itertools.groupby(places, inner.__contains__):
            inputs = key, number, of_block(dropping, is_inner)
            run = functools.partial(self.run_slots, [*group], layers, inputs)
            if is_inner and dropping.once:
                # All chunks draw from the key of the second block of the model.
                second = block_key(key, 2)
                run = on_span(run, self.partition.stack, dropping, second)
            stream = run(stream, context)
        return stream

    def run_slots(
        self,
        places: Sequence[tuple[int, int]],
        layers: ChunkLayers,
        inputs: tuple[Any, jax.Array, Dropping],
        stream: Any,
        context: Any,
    ) -> Any:
        """Runs adjacent slots of a chunk; `places` are pairs of segment and slot.

        `inputs` are the key of the microbatch, the number of the chunk, and what each
        block drops.
        """
        key, chunk, dropping = inputs
        num_blocks = sum(slots.num_blocks for slots in self.slots)
        for segment, slot in places:
            slots = self.slots[segment]
            index = slots.block(chunk, slot)
            number = index + slots.first_block
            # 0 is the embedding: keys count blocks from 1, as without a pipeline.
            own_key = block_key(key, number + 1)
            given = make_input(own_key, number, num_blocks, dropping, stream[0])
            run = functools.partial(
                self.run_slot, segment, layers[segment][slot], index, context, given
            )
            stream = unless_empty(slots, index, run, stream)
        return stream

    def run_slot(
        self,
        segment: int,
        layer: Params,
        index: jax.Array,
        context: Any,
        given: BlockInput,
        stream: Any,
    ) -> Any:
        """Runs block `index` of a segment, and adds auxiliary results to the stream."""
        carry, sums, stacks = stream
        block = self.blocks[segment]
        carry, auxiliary = run_block(block, layer, carry, context, given)
        # Totals are written per block, not added up.
        scalars = auxiliary._replace(totals={})
        added = jax.tree.map(jnp.add, sums[segment], scalars)
        sums = (*sums[:segment], added, *sums[segment + 1 :])
        return carry, sums, with_block(stacks, segment, index, auxiliary.totals)

    def run_block(
        self, segment: int, params: Params, carry: Any, context: Any, given: BlockInput
    ) -> tuple[Any, Auxiliary]:
        """Runs one block on the tokens of `given`."""
        # Inside the checkpointed function: gathered parameters are no residuals.
        params = self.gathered(params, self.block_rows[segment])
        of_segment = self.partition.stack.segments[segment]
        block = block_on_tokens(self.partition.stack, of_segment)
        carry, auxiliary = block(params, carry, context, given)
        check_totals(of_segment, auxiliary)
        return carry, auxiliary

    def head(
        self,
        scale: jax.Array,
        unit: jax.Array,
        params: Params,
        stream: Any,
        batch: Batch,
        weight: jax.Array,
    ) -> tuple[jax.Array, Loss]:
        """Returns a microbatch's objective to differentiate and loss to report."""
        params, stream = self.gather_after(params, stream, self.rows.head)
        carry, auxiliaries, stacks = stream
        total_loss, divisor, sums = self.partition.stack.head(params, carry, batch)
        mean = combine(auxiliaries, [slots.num_blocks for slots in self.slots])
        # Without weight this is a copy of another microbatch, which counts there.
        totals = jax.tree.map(
            lambda x: jnp.where(weight > 0, x, 0), as_integers(stacks)
        )
        loss = loss_of_sums(total_loss, divisor, sums, mean, totals)
        loss = microbatches.check_names(loss)
        part, total = self.local.part_of(loss._replace(weight=weight))
        # No weight exceeds 1 in this unit, so that no gradient grows out of its dtype.
        objective = loss.value * (weight / unit) * scale
        return objective, self.local.mean(loss, part, total)

    def gathered(self, params: Params, rows: Any) -> Params:
        """Gathers parameters if ticks gather, else returns parameters as given."""
        if not self.gathers_in_ticks:
            return params

        def one(x: jax.Array, row: ArrayPlan) -> jax.Array:
            return shards.gather_params(x, x, row, row, self.local.axes)

        return jax.tree.map(one, params, rows)

    def gather_after(
        self, params: Params, inputs: Any, rows: Any
    ) -> tuple[Params, Any]:
        """Gathers parameters no earlier than the inputs are computed."""
        if self.gathers_in_ticks:
            # Parameters do not change between ticks: XLA could gather all of them once,
            # in front.
            params, inputs = jax.lax.optimization_barrier((params, inputs))
        return self.gathered(params, rows), inputs

    def staged(self, parts: StackTree) -> StackTree:
        """Puts blocks into slots, [stages, chunks, slots, ...]."""
        stages, chunks = self.schedule.num_stages, self.schedule.num_chunks

        def by_stage(slots: SegmentSlots, x: jax.Array, row: ArrayPlan) -> jax.Array:
            x = slots.spread(x)
            # Blocks are in model order: chunk c of stage s is part c * stages + s.
            x = x.reshape(chunks, stages, -1, *x.shape[1:]).swapaxes(0, 1)
            return _held(x, P(PIPELINE, None, None, *_besides_batch(row)[1:]))

        return StackTree(
            in_place(parts.embed, self.rows.embed),
            self.map_segments(by_stage, parts.stages),
            in_place(parts.head, self.rows.head),
        )

    def unstaged(self, parts: StackTree) -> StackTree:
        """Stacks blocks by segment: the inverse of `staged`."""

        def one(slots: SegmentSlots, x: jax.Array, row: ArrayPlan) -> jax.Array:
            x = x.swapaxes(0, 1).reshape(-1, *x.shape[3:])
            return _held(slots.collect(x, row.shape[0]), _besides_batch(row))

        stages = self.map_segments(one, parts.stages)
        return dataclasses.replace(parts, stages=stages)

    def map_segments(self, run: Callable[..., Any], stages: Any) -> tuple[Any, ...]:
        """Calls `run(slots, array, row)` for all arrays of blocks that are not None."""
        segments = zip(self.slots, stages, self.rows.stages, strict=True)
        return tuple(
            _map_present(functools.partial(run, slots), tree, rows)
            for slots, tree, rows in segments
        )


def unless_empty(
    slots: SegmentSlots, index: jax.Array, run: Callable[..., Any], stream: Any
) -> Any:
    """Runs `run(stream)`; hands the stream on if the slot has no block at `index`."""
    if slots.are_full:
        return run(stream)
    is_block = index < slots.num_blocks
    if slots.first_chunk:
        is_block &= index >= 0
    # Stop gradients of empty slots: at weights of 0 a block may divide 0 by 0.
    entering = arrays.where(is_block, stream, jax.lax.stop_gradient(stream))
    return arrays.where(is_block, run(entering), stream)


def in_place(params: Params, rows: Any) -> Params:
    """Constrains arrays to the sharding over all axes except the batch axes."""
    return _map_present(lambda x, row: _held(x, _besides_batch(row)), params, rows)


def _map_present(run: Callable[..., Any], tree: Any, rows: Any) -> Any:
    """Calls `run(array, row)` where an array of the tree is not None."""
    return jax.tree.map(lambda row, x: None if x is None else run(x, row), rows, tree)


def _held(x: jax.Array, spec: P) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, spec)


def _besides_batch(row: ArrayPlan) -> P:
    """Returns the spec of an array over all axes except the batch axes."""
    return shards.manual_spec(row, (PIPELINE, SEQUENCE, TENSOR))
