"""Runs a pipeline schedule: all stages in one program, which sends after each tick.

Blocks run where the parameters are stored, mapped by hand over the `pipeline` axis.
Every stage runs every pass of a tick. An idle stage computes values that nobody reads,
and adds gradients of 0. Collectives are never under a condition that differs between
stages.

Embedding and head run outside of the map, in the ticks that have a microbatch for
either, on the devices that store the parameters. All devices know these ticks, so
embedding and head may communicate under this condition. Where the vocabulary is split
over the stages, the stages share work and memory of embedding and head.

Reference: vocabulary parallelism in pipelines (arXiv:2411.05288).
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zjax.ops import shards
from zjax.ops.keys import fold_in
from zjax.parallel import block_passes, sums
from zjax.parallel import slots as arrays
from zjax.parallel.pipeline_schedule import (
    IDLE,
    Kind,
    Schedule,
    StageSchedule,
    TickTable,
)
from zjax.parallel.slots import EVERYWHERE, STAGED
from zjax.parallel.tensor import by_parts
from zjax.sharding.mesh import PIPELINE
from zjax.sharding.roles import joined, trained
from zjax.typing import Batch, Loss, Params

ChunkLayers = list[list[Params]]
"""Layers of a chunk, by segment."""


@dataclasses.dataclass(frozen=True)
class StageChain:
    """A model as a pipeline runs it; a stream is any tree of arrays.

    Args:
        embed: `embed(params, batch, key) -> (stream, context)`.
        chunk: `chunk(layers, stream, context, key, number) -> stream`, of the
            `ChunkLayers` of a chunk; int32[] `number` counts the chunks of the model.
        head: `head(params, stream, batch, weight) -> (objective, loss)`: the number to
            differentiate, and the loss to report, of a microbatch of float32[]
            `weight`.
        gathers: Whether the three functions all-gather parameters, anew in each pass.
        communicates: Whether chunks exchange anything between devices.
    """

    embed: Callable[..., Any]
    chunk: Callable[..., Any]
    head: Callable[..., tuple[jax.Array, Loss]]
    gathers: bool = False
    communicates: bool = False


@dataclasses.dataclass(frozen=True)
class StackTree:
    """One tree each for the embedding, the blocks of each segment, and the head."""

    embed: Any
    stages: Any
    head: Any


jax.tree_util.register_dataclass(StackTree, ["embed", "stages", "head"], [])


@dataclasses.dataclass(frozen=True)
class MicrobatchFeed:
    """Microbatches, and the weight of each in the mean loss.

    Args:
        sources: int32[microbatches], the microbatch computed in place of each.
    """

    microbatches: Batch
    weights: jax.Array
    sources: jax.Array

    def batch(self, number: jax.Array) -> Batch:
        """Reads the arrays computed as microbatch `number`, int32[]."""
        return arrays.read_slot(self.microbatches, self.sources[number])


def make_feed(
    microbatches: Batch, weights: jax.Array, axes: Sequence[str] = ()
) -> MicrobatchFeed:
    """Replaces microbatches of weight 0 by the heaviest microbatch.

    On padding alone, a block may have a gradient of 0 / 0, which no weight of 0 clears.
    Devices along `axes`, mapped by hand, have different microbatches; a device without
    weight takes the heaviest microbatch of all devices.
    """
    numbers, heaviest = jnp.arange(weights.size), jnp.argmax(weights)
    sources = jnp.where(weights > 0, numbers, heaviest)
    if axes:
        heaviest_weight = weights[heaviest]
        microbatches = _with_borrowed(microbatches, heaviest, heaviest_weight, axes)
    return MicrobatchFeed(microbatches, weights, sources)


def _with_borrowed(
    microbatches: Batch, heaviest: jax.Array, weight: jax.Array, axes: Sequence[str]
) -> Batch:
    """Replaces microbatch `heaviest` by one of another device if the weight is 0."""
    axes = tuple(axes)
    source = jnp.argmax(jax.lax.all_gather(weight, axes))
    local = arrays.read_slot(microbatches, heaviest)
    borrowed = shards.broadcast_from(local, source == jax.lax.axis_index(axes), axes)
    chosen = arrays.where(weight > 0, local, borrowed)
    return arrays.write_slot(microbatches, chosen, heaviest)


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """The program of a step.

    Args:
        rows: Plans of the parameters; plans of stages are by segment and slot of a
            chunk. Frozen parameters have the gradient None.
        schedule: The passes of each tick.
        recomputes: Whether a stage saves only the input of a chunk for the backward
            pass.
        reduce: For each part, `reduce(grads) -> grads`, called before gradients are
            added to the sum; gradients of stages are `ChunkLayers`.
        adds_in_products: Whether matrix products add to the sums of stages; `reduce`
            then only places the sums.
    """

    chain: StageChain
    rows: StackTree
    schedule: Schedule
    recomputes: bool
    reduce: StackTree
    adds_in_products: bool

    def differentiate(
        self, params: StackTree, zeros: StackTree, feed: MicrobatchFeed, key: jax.Array
    ) -> tuple[StackTree, Loss]:
        """Adds the gradients of all microbatches to `zeros`, and returns the losses."""
        step = _Step(self, params, feed, key)
        state = step.start(zeros)
        # One loop per phase: a tick then runs no kind of pass that all stages idle in.
        for phase in self.schedule.phases:
            ticks = slice(phase.start, phase.end)
            tables = {kind: step.tables[kind] for kind in phase.kinds}
            tables = jax.tree.map(lambda x, ticks=ticks: x[ticks], tables)
            run = functools.partial(step.tick, tables)
            state, _ = jax.lax.scan(run, state, tables)
        stages = arrays.stack(state.grads.stages)
        return dataclasses.replace(state.grads, stages=stages), state.losses

    def evaluate(
        self, params: StackTree, feed: MicrobatchFeed, key: jax.Array | None
    ) -> Loss:
        """Computes the losses of all microbatches, [microbatches]; no key evaluates."""
        step = _Step(self, params, feed, key)
        busy = (self.schedule.passes["forward"].microbatch != IDLE).any(1)
        # Forward passes fill the first ticks; later ticks run backward passes alone.
        table = jax.tree.map(lambda x: x[: busy.sum()], step.tables["forward"])
        start = step.empty_stream(), step.no_losses()
        run = functools.partial(step.forward_alone, table)
        (_, losses), _ = jax.lax.scan(run, start, table)
        return losses


@dataclasses.dataclass(frozen=True)
class StageTick:
    """The pass of a stage in a tick: a chunk, and the inputs of the chunk.

    Args:
        nondiff: Context, key, and int32[], the index of the chunk in the model.
        is_due: bool[], whether the stage has a pass. If not, nobody reads the stream,
            and gradients must be 0.
        is_first: bool[], whether the chunk is the first of the model.
        is_last: bool[], whether the chunk is the last of the model.
        gathers: Whether layers all-gather parameters.
        communicates: Whether layers exchange anything between devices.
        chunk: Index of the chunk, in a program for that chunk alone.
        layers: Layers of the chunk, inside `in_chunk`.
    """

    chunks: list[ChunkLayers]
    schedule: StageSchedule
    nondiff: tuple[Any, Any, jax.Array]
    is_due: jax.Array
    is_first: jax.Array
    is_last: jax.Array
    rows: ChunkLayers
    gathers: bool
    communicates: bool
    chunk: int | None = None
    layers: ChunkLayers | None = None

    def in_chunk(self, run: Callable[..., Any], *args: Any) -> Any:
        """Calls `run(tick, *args)`, with the layers of the chunk in `tick`.

        Each chunk has a separate program, which reads the layers in place. Chunks that
        communicate must run one program, which copies the layers of the chosen chunk.
        """

        def layers_of(chunk: int) -> ChunkLayers:
            return self.chunks[chunk]

        def run_alone(chunk: int, *args: Any) -> Any:
            tick = dataclasses.replace(self, chunk=chunk, layers=layers_of(chunk))
            return run(tick, *args)

        def by_chunk(function: Callable[..., Any], *args: Any) -> Any:
            numbers = range(len(self.chunks))
            branches = [functools.partial(function, number) for number in numbers]
            return jax.lax.switch(self.schedule.chunk, branches, *args)

        if not self.communicates or len(self.chunks) == 1:
            return by_chunk(run_alone, *args)
        return run(dataclasses.replace(self, layers=by_chunk(layers_of)), *args)

    def args(self, values: Any) -> tuple[ChunkLayers, Any, Any]:
        """Arguments of a pass: layers, `values`, and a tuple without gradients.

        Frozen parameters are None among the layers; the tuple has all layers.
        """
        layers = self.layers
        assert layers is not None
        if self.gathers:
            # Else the compiler gathers once, and holds all layers for all ticks.
            layers, values = jax.lax.optimization_barrier((layers, values))
        return trained(layers, self.rows), values, (layers, *self.nondiff)


def due(number: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns a valid number for int32[] or `IDLE`, and whether a microbatch is due."""
    return jnp.maximum(number, 0), number != IDLE


def where_due(
    ticks: np.ndarray, number: jax.Array, run: Callable[..., Any], start: Any
) -> Any:
    """Runs `run(number, start)` in ticks with a microbatch, else returns `start`.

    `ticks` has the microbatch, or `IDLE`, of each tick of the loop.
    """
    microbatch, is_due = due(number)
    if (ticks != IDLE).all():
        return run(microbatch, start)
    # Under a condition, as idle ticks would run the vocabulary's products for nothing.
    # Also if all ticks are idle: JAX 0.10 fails to compile some programs in which
    # nobody reads what stages send.
    return jax.lax.cond(is_due, functools.partial(run, microbatch), lambda x: x, start)


@dataclasses.dataclass(frozen=True)
class _State:
    """The carry from tick to tick.

    Args:
        stream: [stages, ...], outputs that the previous stages sent.
        cotangent: [stages, ...], cotangents that the next stages sent.
        saved: [stages, slots, ...], residuals of forward passes for backward passes.
        operands: [stages, slots, ...], operands of the passes of weights.
    """

    stream: Any
    cotangent: Any
    saved: Any
    operands: Any
    grads: StackTree
    losses: Loss


_FIELDS = [field.name for field in dataclasses.fields(_State)]
jax.tree_util.register_dataclass(_State, _FIELDS, [])


class _Step:
    """Passes of one step, on the parameters and microbatches of the step."""

    def __init__(
        self,
        pipeline: Pipeline,
        params: StackTree,
        feed: MicrobatchFeed,
        key: jax.Array | None,
    ):
        """Slices the layers of stages, and embeds all microbatches for the contexts."""
        self.chain, self.schedule = pipeline.chain, pipeline.schedule
        self.rows = pipeline.rows
        self.reduce, self.recomputes = pipeline.reduce, pipeline.recomputes
        self.adds_in_products = pipeline.adds_in_products
        self.splits_backward = "weights" in self.schedule.passes
        self.params, self.feed, self.key = params, feed, key
        self.chunks = self.unstack(params.stages)
        self.tables = self.schedule.tables
        numbers = jnp.arange(self.schedule.num_microbatches)
        self.stream, _ = jax.eval_shape(self.embed, params.embed, numbers[0])
        # All at once: in a tick each stage reads the context of another microbatch.
        self.contexts = jax.lax.map(lambda i: self.embed(params.embed, i)[1], numbers)

    @property
    def num_layers(self) -> list[int]:
        """Layers per chunk of each segment."""
        return [len(slots) for slots in self.rows.stages]

    def unstack(self, stages: Any) -> list[list[list[Any]]]:
        """Slices the layers of stages by chunk and segment."""
        return arrays.unstack(stages, self.num_layers, self.schedule.num_chunks)

    def start(self, zeros: StackTree) -> _State:
        """Makes the carry before the first tick, with empty streams and buffers."""
        stages = jax.tree.map(lambda x: x[0], self.tables["forward"].stages)

        def save(tick, stream):
            saved = tick.in_chunk(self.run_forward, stream)[1]
            if not self.splits_backward:
                return saved, ()
            cotangent = jax.tree.map(jnp.zeros_like, stream)
            return saved, tick.in_chunk(self.run_stream, saved[0], cotangent)[1]

        empty = self.empty_stream()
        mapped = functools.partial(self.mapped, save, stages, (STAGED, STAGED))
        # Only tracing a stage tells which residuals and operands there are.
        saved, operands = jax.eval_shape(mapped, staged=(empty,))
        saved = arrays.make_buffers(saved, self.schedule.num_slots)
        operands = arrays.make_buffers(operands, self.schedule.num_operands)
        stages = self.unstack(zeros.stages)
        grads = dataclasses.replace(zeros, stages=stages)
        return _State(empty, empty, saved, operands, grads, self.no_losses())

    def tick(
        self,
        phase: dict[Kind, TickTable],
        state: _State,
        tables: dict[Kind, TickTable],
    ) -> tuple[_State, None]:
        """Runs the passes of a tick, in the order of `KINDS`."""
        if "forward" in tables:
            state = self.forward(state, tables["forward"])
        if "backward" in tables:
            state = self.backward(phase["backward"], state, tables["backward"])
        if "weights" in tables:
            state = self.weights(state, tables["weights"])
        return state, None

    def forward(self, state: _State, table: TickTable) -> _State:
        """Runs the forward passes of a tick, and sends streams to the next stages."""

        def run(tick, received, saved, embedded):
            stream = arrays.where(tick.is_first, embedded, received)
            out, residuals = tick.in_chunk(self.run_forward, stream)
            saved = arrays.write_slot(saved, residuals, tick.schedule.residuals)
            return self.sent(out, 1), saved

        staged, everywhere = (state.stream, state.saved), (self.embedded(table),)
        outs = STAGED, STAGED
        stream, saved = self.mapped(run, table.stages, outs, staged, everywhere)
        return dataclasses.replace(state, stream=stream, saved=saved)

    def forward_alone(
        self, phase: TickTable, state: Any, table: TickTable
    ) -> tuple[Any, None]:
        """Runs a tick without residuals, and computes the loss of the last chunk."""

        def run(tick, received, embedded):
            stream = arrays.where(tick.is_first, embedded, received)
            out = tick.in_chunk(self.run_alone, stream)
            return self.sent(out, 1), arrays.broadcast_from(tick.is_last, out)

        stream, losses = state
        everywhere, outs = (self.embedded(table),), (STAGED, EVERYWHERE)
        stream, last = self.mapped(run, table.stages, outs, (stream,), everywhere)

        def note(number, losses):
            loss = self.head(self.params.head, last, number)[1]
            return arrays.write_slot(losses, loss, number)

        return (stream, where_due(phase.last, table.last, note, losses)), None

    def backward(self, phase: TickTable, state: _State, table: TickTable) -> _State:
        """Runs head, backward passes and embedding of a tick; sends cotangents back."""

        def recall(tick, saved):
            slot = arrays.read_slot(saved, tick.schedule.residuals)
            residuals, out = (
                tick.in_chunk(self.recomputed, slot) if self.recomputes else slot
            )
            return arrays.broadcast_from(tick.is_last, out), residuals

        def run(tick, residuals, received, total, operands, head_cotangent):
            cotangent = arrays.where(tick.is_last, head_cotangent, received)
            # An idle stage adds gradients of 0, since the backward pass is linear.
            zeros = jax.tree.map(jnp.zeros_like, cotangent)
            cotangent = arrays.where(tick.is_due, cotangent, zeros)
            if self.splits_backward:
                stream, new_operands = tick.in_chunk(
                    self.run_stream, residuals, cotangent
                )
                operands = arrays.write_slot(
                    operands, new_operands, tick.schedule.operands
                )
            else:
                inputs = total, residuals, cotangent
                total, stream = self.added(tick, self.run_backward, *inputs)
            first = arrays.broadcast_from(tick.is_first, stream)
            return self.sent(stream, -1), total, operands, first

        outs = EVERYWHERE, STAGED
        # Before the backward passes: the head turns the last output into their
        # cotangent.
        last, residuals = self.mapped(recall, table.stages, outs, (state.saved,))
        state, head_cotangent = self.through_head(phase, state, last, table)
        staged = residuals, state.cotangent, state.grads.stages, state.operands
        outs = STAGED, STAGED, STAGED, EVERYWHERE
        cotangent, total, operands, first = self.mapped(
            run, table.stages, outs, staged, (head_cotangent,)
        )

        def add(number, grads):
            new_grads = self.embed_backward(number, first)
            return sums.add(grads, self.reduce.embed(new_grads))

        embed = where_due(phase.first, table.first, add, state.grads.embed)
        grads = StackTree(embed, total, state.grads.head)
        return dataclasses.replace(
            state, cotangent=cotangent, operands=operands, grads=grads
        )

    def through_head(
        self, phase: TickTable, state: _State, last: Any, table: TickTable
    ) -> tuple[_State, Any]:
        """Adds the gradients of the head; returns the cotangent of the last stage."""
        params, rows = self.params.head, self.rows.head

        def objective(learned, last, number):
            return self.head(joined(learned, params, rows), last, number)

        differentiate = jax.grad(objective, argnums=(0, 1), has_aux=True)

        def run(number, start):
            head, losses, _ = start
            learned = trained(params, rows)
            (grads, cotangent), loss = differentiate(learned, last, number)
            losses = arrays.write_slot(losses, loss, number)
            return sums.add(head, self.reduce.head(grads)), losses, cotangent

        # The cotangent of a tick without a microbatch.
        zeros = jax.tree.map(jnp.zeros_like, last)
        start = state.grads.head, state.losses, zeros
        head, losses, cotangent = where_due(phase.last, table.last, run, start)
        grads = dataclasses.replace(state.grads, head=head)
        return dataclasses.replace(state, grads=grads, losses=losses), cotangent

    def weights(self, state: _State, table: TickTable) -> _State:
        """Adds the gradients of weights that backward passes have delayed."""

        # Without a condition: no stage is idle in these ticks.
        def run(tick, saved, operands, total):
            residuals, _ = arrays.read_slot(saved, tick.schedule.residuals)
            own = arrays.read_slot(operands, tick.schedule.operands)
            return self.added(tick, self.run_params, total, residuals, own)[0]

        staged = state.saved, state.operands, state.grads.stages
        total = self.mapped(run, table.stages, STAGED, staged)
        grads = dataclasses.replace(state.grads, stages=total)
        return dataclasses.replace(state, grads=grads)

    def run_alone(self, tick: StageTick, stream: Any) -> Any:
        return self.chunk(*tick.args(stream))

    def run_forward(self, tick: StageTick, stream: Any) -> tuple[Any, Any]:
        """Runs a chunk; returns the stream and the residuals for the backward pass."""
        if self.recomputes:
            return self.run_alone(tick, stream), stream
        residuals, out = self.recomputed(tick, stream)
        return out, (residuals, out)

    def recomputed(self, tick: StageTick, stream: Any) -> tuple[Any, Any]:
        """Runs a chunk; returns all residuals of the chunk, and the stream."""
        out, residuals = self.passes(tick, stream).forward(*tick.args(stream))
        return residuals, out

    def run_backward(
        self, tick: StageTick, residuals: Any, cotangent: Any
    ) -> tuple[Any, Any]:
        """Computes the gradients of the layers and the cotangent of the stream."""
        passes = self.passes(tick, cotangent)
        return passes.backward(*tick.args(residuals), cotangent)

    def run_stream(
        self, tick: StageTick, residuals: Any, cotangent: Any
    ) -> tuple[Any, Any]:
        """Computes the cotangent of the stream, and operands for the weights pass."""
        split = self.split(tick, residuals, cotangent)
        return split.stream(*tick.args(residuals), cotangent)

    def run_params(
        self, tick: StageTick, residuals: Any, operands: Any
    ) -> tuple[Any, Any]:
        """Computes the gradients of the weights from saved operands."""
        split = self.split(tick, residuals, self.stream)
        return split.params(*tick.args(residuals), operands), ()

    def passes(self, tick: StageTick, stream: Any) -> block_passes.BlockPasses:
        return block_passes.differentiate_in_passes(self.chunk, *tick.args(stream))

    def split(
        self, tick: StageTick, residuals: Any, cotangent: Any
    ) -> block_passes.SplitBackward:
        backward = self.passes(tick, cotangent).backward
        return block_passes.split_backward(backward, *tick.args(residuals), cotangent)

    def chunk(self, learned: ChunkLayers, stream: Any, nondiff: Any) -> Any:
        """Runs a chunk with frozen layers filled in."""
        layers, *nondiff = nondiff
        layers = joined(learned, layers, self.rows.stages)
        return self.chain.chunk(layers, stream, *nondiff)

    def added(
        self, tick: StageTick, run: Callable[..., Any], total: Any, *args: Any
    ) -> tuple[Any, Any]:
        """Adds the gradients of `run(tick, *args) -> (grads, other)` to `total`."""

        def run_adding(tick, total, *args):
            function = functools.partial(run, tick)
            new, other = sums.add_in_products(function, total[tick.chunk], *args)
            new = self.reduce.stages(new)
            return sums.replace_chunk(total, tick.chunk, new), other

        if self.adds_in_products:
            return tick.in_chunk(run_adding, total, *args)
        grads, other = tick.in_chunk(run, *args)
        grads = self.reduce.stages(grads)
        return sums.add_to_chunk(total, grads, tick.schedule.chunk), other

    def sent(self, stream: Any, by: int) -> Any:
        """Sends a stream to the stage `by` further on, in a ring for several chunks."""
        size, is_ring = self.schedule.num_stages, self.schedule.num_chunks > 1
        ends = [(stage, stage + by) for stage in range(size)]
        # A stage without a sender receives zeros.
        pairs = [(a, b % size) for a, b in ends if is_ring or 0 <= b < size]
        send = functools.partial(jax.lax.ppermute, axis_name=PIPELINE, perm=pairs)
        return jax.tree.map(functools.partial(by_parts, send), stream)

    def mapped(
        self,
        run: Callable[..., Any],
        stages: StageSchedule,
        outs: Any,
        staged: tuple[Any, ...] = (),
        everywhere: tuple[Any, ...] = (),
    ) -> Any:
        """Calls `run(tick, *staged, *everywhere)` on every stage."""
        last_stage = self.schedule.num_stages - 1
        last_chunk = self.schedule.num_chunks - 1
        num_staged = len(staged)

        def of_stage(chunks, stage, schedule, *args):
            contexts, key, *others = args[num_staged:]
            context = arrays.read_slot(contexts, schedule.context)
            chunk_number = schedule.chunk * (last_stage + 1) + stage
            tick = StageTick(
                chunks=chunks,
                schedule=schedule,
                nondiff=(context, fold_in(key, schedule.context), chunk_number),
                is_due=schedule.microbatch != IDLE,
                is_first=(stage == 0) & (schedule.chunk == 0),
                is_last=(stage == last_stage) & (schedule.chunk == last_chunk),
                rows=self.rows.stages,
                gathers=self.chain.gathers,
                communicates=self.chain.communicates,
            )
            return run(tick, *args[:num_staged], *others)

        by_stage = self.chunks, jnp.arange(last_stage + 1), stages
        shared = self.contexts, self.key
        return arrays.map_stages(
            of_stage, outs, (*by_stage, *staged), *shared, *everywhere
        )

    def embedded(self, table: TickTable) -> Any:
        """Stream that enters the first stage in a tick."""
        return self.embed(self.params.embed, due(table.first)[0])[0]

    def embed(self, params: Params, number: jax.Array) -> tuple[Any, Any]:
        """Embeds a microbatch."""
        batch = self.feed.batch(number)
        return self.chain.embed(params, batch, fold_in(self.key, number))

    def embed_backward(self, number: jax.Array, cotangent: Any) -> Params:
        """Computes the gradients of the embedding from the cotangent of the stream."""
        params, rows = self.params.embed, self.rows.embed

        def stream(learned):
            return self.embed(joined(learned, params, rows), number)[0]

        return jax.vjp(stream, trained(params, rows))[1](cotangent)[0]

    def head(self, params: Params, stream: Any, number: jax.Array) -> Any:
        """Computes objective and loss of a microbatch."""
        batch, weight = self.feed.batch(number), self.feed.weights[number]
        return self.chain.head(params, stream, batch, weight)

    def empty_stream(self) -> Any:
        """Makes a stream of zeros on every stage."""
        size = self.schedule.num_stages
        return jax.tree.map(
            lambda x: arrays.full((size, *x.shape), x.dtype), self.stream
        )

    def no_losses(self) -> Loss:
        """Makes losses of zeros, [microbatches]."""
        first = jnp.int32(0)
        _, loss = jax.eval_shape(self.head, self.params.head, self.stream, first)
        size = self.schedule.num_microbatches
        return jax.tree.map(lambda x: jnp.zeros((size, *x.shape), x.dtype), loss)
