"""Runs a schedule: all stages in one program, which hands results on after each tick.

Blocks run where their parameters are, mapped by hand over the `pipeline` axis. What
communicates never hangs on what a stage decides, and no pass on whether there is one: a
stage that has nothing to do computes what nobody reads, and adds gradients that are 0.
Embedding and head run outside of the map, in the ticks that have a microbatch for them,
on whatever devices their parameters are on; where the vocabulary is split over the
stages, these share their work and their memory.

Reference: vocabulary parallelism in pipelines (arXiv:2411.05288).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from zjax.ops.keys import fold_in
from zjax.parallel import staged as arrays
from zjax.parallel import sums
from zjax.parallel.feed import Feed
from zjax.parallel.here import Here
from zjax.parallel.line import Line, Parts
from zjax.parallel.parts import (
    Halves,
    Passes,
    differentiate_in_passes,
    split_backward,
)
from zjax.parallel.schedule import IDLE, Kind, Lane, Schedule
from zjax.parallel.staged import EVERYWHERE, STAGED
from zjax.parallel.tensor import by_parts
from zjax.parallel.turns import Turn, due, make_turns, where_due
from zjax.sharding.mesh import PIPELINE
from zjax.typing import Loss, Params


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """The passes of a step.

    Args:
        line: The model.
        schedule: Which passes each tick takes.
        recomputes: Whether a stage keeps only what entered it until its backward pass,
            and computes the rest again.
        reduce: For each of the `Parts`, `reduce(grads) -> grads`, as they are added;
            those of stages are lists of layers, one for each segment.
        adds_in_products: Whether products add to the sums of stages by themselves;
            `reduce` then says where these are, and no more.
    """

    line: Line
    schedule: Schedule
    recomputes: bool
    reduce: Parts
    adds_in_products: bool

    def differentiate(
        self, params: Parts, zeros: Parts, feed: Feed, key: jax.Array
    ) -> tuple[Parts, Loss]:
        """Gradients of the objectives of all microbatches.

        Args:
            params: Parameters in use; `stages` are split over the pipeline axis.
            zeros: Sums of gradients at their start.
            feed: Microbatches.
            key: Folded with the number of each microbatch.

        Returns:
            The sum of gradients; and the losses, stacked.
        """
        step = _Step(self, params, feed, key)
        state = step.start(zeros)
        for phase in self.schedule.phases:
            ticks = slice(phase.start, phase.end)
            turns = {kind: step.turns[kind] for kind in phase.kinds}
            turns = jax.tree.map(lambda x, ticks=ticks: x[ticks], turns)
            run = functools.partial(step.tick, turns)
            state, _ = jax.lax.scan(run, state, turns)
        stages = arrays.stack(state.grads.stages)
        return dataclasses.replace(state.grads, stages=stages), state.losses

    def evaluate(self, params: Parts, feed: Feed, key: jax.Array | None) -> Loss:
        """Losses of all microbatches, without gradients.

        Args:
            params: Parameters in use.
            feed: Microbatches.
            key: Folded with the number of each microbatch; None evaluates.

        Returns:
            The losses, stacked.
        """
        step = _Step(self, params, feed, key)
        busy = (self.schedule.lanes["forward"].microbatch != IDLE).any(1)
        turns = jax.tree.map(lambda x: x[: busy.sum()], step.turns["forward"])
        start = step.empty_stream(), step.no_losses()
        run = functools.partial(step.forward_alone, turns)
        (_, losses), _ = jax.lax.scan(run, start, turns)
        return losses


@dataclasses.dataclass(frozen=True)
class _State:
    """What goes from tick to tick.

    Args:
        up: What came from the stage before, [stages, ...].
        down: The cotangent that came from the stage behind, [stages, ...].
        kept: What forward passes left, [stages, slots, ...].
        handed: What backward passes left to those of weights, the same.
        grads: Sums of gradients.
        losses: Of the microbatches that are through.
    """

    up: Any
    down: Any
    kept: Any
    handed: Any
    grads: Parts
    losses: Loss


_FIELDS = [field.name for field in dataclasses.fields(_State)]
jax.tree_util.register_dataclass(_State, _FIELDS, [])


class _Step:
    """The passes of one step, on its parameters and microbatches."""

    def __init__(
        self, pipeline: Pipeline, params: Parts, feed: Feed, key: jax.Array | None
    ):
        self.line, self.schedule = pipeline.line, pipeline.schedule
        self.reduce, self.recomputes = pipeline.reduce, pipeline.recomputes
        self.adds_in_products = pipeline.adds_in_products
        self.splits = "weights" in self.schedule.lanes
        self.params, self.feed, self.key = params, feed, key
        self.chunks = arrays.cut(params.stages)
        self.turns = make_turns(self.schedule)
        numbers = jnp.arange(self.schedule.num_microbatches)
        self.stream, _ = jax.eval_shape(self.embed, params.embed, numbers[0])
        self.contexts = jax.lax.map(lambda i: self.embed(params.embed, i)[1], numbers)

    def start(self, zeros: Parts) -> _State:
        lane = jax.tree.map(lambda x: x[0], self.turns["forward"].lane)

        def leave(here, stream):
            left = here.in_chunk(self.run_forward, stream)[1]
            if not self.splits:
                return left, ()
            cotangent = jax.tree.map(jnp.zeros_like, stream)
            return left, here.in_chunk(self.of_stream, left[0], cotangent)[1]

        empty = self.empty_stream()
        mapped = functools.partial(self.mapped, leave, lane, (STAGED, STAGED))
        kept, handed = jax.eval_shape(mapped, staged=(empty,))
        kept = arrays.make_buffers(kept, self.schedule.num_slots)
        handed = arrays.make_buffers(handed, self.schedule.num_handed)
        grads = dataclasses.replace(zeros, stages=arrays.cut(zeros.stages))
        return _State(empty, empty, kept, handed, grads, self.no_losses())

    def tick(
        self, phase: dict[Kind, Turn], state: _State, turns: dict[Kind, Turn]
    ) -> tuple[_State, None]:
        if "forward" in turns:
            state = self.forward(state, turns["forward"])
        if "backward" in turns:
            state = self.backward(phase["backward"], state, turns["backward"])
        if "weights" in turns:
            state = self.weights(state, turns["weights"])
        return state, None

    def forward(self, state: _State, turn: Turn) -> _State:
        def run(here, up, kept, entering):
            stream = arrays.either(here.is_first, entering, up)
            out, left = here.in_chunk(self.run_forward, stream)
            return self.passed(out, 1), arrays.written(kept, left, here.lane.slot)

        staged, everywhere = (state.up, state.kept), (self.embedded(turn),)
        up, kept = self.mapped(run, turn.lane, (STAGED, STAGED), staged, everywhere)
        return dataclasses.replace(state, up=up, kept=kept)

    def forward_alone(self, phase: Turn, state: Any, turn: Turn) -> tuple[Any, None]:
        def run(here, up, entering):
            stream = arrays.either(here.is_first, entering, up)
            out = here.in_chunk(self.run_alone, stream)
            return self.passed(out, 1), arrays.tell(here.is_last, out)

        up, losses = state
        everywhere = (self.embedded(turn),)
        up, last = self.mapped(run, turn.lane, (STAGED, EVERYWHERE), (up,), everywhere)

        def note(number, losses):
            loss = self.head(self.params.head, last, number)[1]
            return arrays.written(losses, loss, number)

        return (up, where_due(phase.last, turn.last, note, losses)), None

    def backward(self, phase: Turn, state: _State, turn: Turn) -> _State:
        def recall(here, kept):
            left = arrays.read(kept, here.lane.slot)
            left, out = (
                here.in_chunk(self.recomputed, left) if self.recomputes else left
            )
            return arrays.tell(here.is_last, out), left

        def run(here, left, down, total, handed, seed):
            cotangent = arrays.either(here.is_last, seed, down)
            nothing = jax.tree.map(jnp.zeros_like, cotangent)
            cotangent = arrays.either(here.is_due, cotangent, nothing)
            if self.splits:
                stream, own = here.in_chunk(self.of_stream, left, cotangent)
                handed = arrays.written(handed, own, here.lane.handed)
            else:
                given = total, left, cotangent
                total, stream = self.added(here, self.run_backward, *given)
            first = arrays.tell(here.is_first, stream)
            return self.passed(stream, -1), total, handed, first

        last, left = self.mapped(recall, turn.lane, (EVERYWHERE, STAGED), (state.kept,))
        state, seed = self.through_head(phase, state, last, turn)
        staged = left, state.down, state.grads.stages, state.handed
        outs = STAGED, STAGED, STAGED, EVERYWHERE
        down, total, handed, first = self.mapped(run, turn.lane, outs, staged, (seed,))

        def add(number, grads):
            own = self.embed_backward(number, first)
            return sums.add(grads, self.reduce.embed(own))

        embed = where_due(phase.first, turn.first, add, state.grads.embed)
        grads = Parts(embed, total, state.grads.head)
        return dataclasses.replace(state, down=down, handed=handed, grads=grads)

    def through_head(
        self, phase: Turn, state: _State, last: Any, turn: Turn
    ) -> tuple[_State, Any]:
        """Adds the gradients of the head; returns that of what entered it, too."""
        differentiate = jax.grad(self.head, argnums=(0, 1), has_aux=True)

        def run(number, start):
            head, losses, _ = start
            (own, seed), loss = differentiate(self.params.head, last, number)
            losses = arrays.written(losses, loss, number)
            return sums.add(head, self.reduce.head(own)), losses, seed

        nothing = jax.tree.map(jnp.zeros_like, last)
        start = state.grads.head, state.losses, nothing
        head, losses, seed = where_due(phase.last, turn.last, run, start)
        grads = dataclasses.replace(state.grads, head=head)
        return dataclasses.replace(state, grads=grads, losses=losses), seed

    def weights(self, state: _State, turn: Turn) -> _State:
        # No stage is idle in these ticks: nothing here keeps it from adding.
        def run(here, kept, handed, total):
            left, _ = arrays.read(kept, here.lane.slot)
            own = arrays.read(handed, here.lane.handed)
            return self.added(here, self.of_params, total, left, own)[0]

        staged = state.kept, state.handed, state.grads.stages
        total = self.mapped(run, turn.lane, STAGED, staged)
        grads = dataclasses.replace(state.grads, stages=total)
        return dataclasses.replace(state, grads=grads)

    def run_alone(self, here: Here, stream: Any) -> Any:
        return self.chunk(*here.args(stream))

    def run_forward(self, here: Here, stream: Any) -> tuple[Any, Any]:
        """What leaves a stage, and what waits for the backward pass."""
        if self.recomputes:
            return self.run_alone(here, stream), stream
        left, out = self.recomputed(here, stream)
        return out, (left, out)

    def recomputed(self, here: Here, stream: Any) -> tuple[Any, Any]:
        out, left = self.passes(here, stream).forward(*here.args(stream))
        return left, out

    def run_backward(self, here: Here, left: Any, cotangent: Any) -> tuple[Any, Any]:
        return self.passes(here, cotangent).backward(*here.args(left), cotangent)

    def of_stream(self, here: Here, left: Any, cotangent: Any) -> tuple[Any, Any]:
        halves = self.halves(here, left, cotangent)
        return halves.of_stream(*here.args(left), cotangent)

    def of_params(self, here: Here, left: Any, handed: Any) -> tuple[Any, Any]:
        halves = self.halves(here, left, self.stream)
        return halves.of_params(*here.args(left), handed), ()

    def passes(self, here: Here, stream: Any) -> Passes:
        return differentiate_in_passes(self.chunk, *here.args(stream))

    def halves(self, here: Here, left: Any, cotangent: Any) -> Halves:
        backward = self.passes(here, cotangent).backward
        return split_backward(backward, *here.args(left), cotangent)

    def chunk(self, layers: list[list[Params]], stream: Any, rest: Any) -> Any:
        return self.line.chunk(layers, stream, *rest)

    def added(
        self, here: Here, run: Callable[..., Any], total: Any, *args: Any
    ) -> tuple[Any, Any]:
        """Calls `run(here, *args) -> (grads, other)`; adds gradients to their sum."""

        def run_adding(here, total, *args):
            function = functools.partial(run, here)
            own, other = sums.add_in_products(function, total[here.chunk], *args)
            return sums.of_chunk(total, here.chunk, self.reduce.stages(own)), other

        if self.adds_in_products:
            return here.in_chunk(run_adding, total, *args)
        grads, other = here.in_chunk(run, *args)
        grads = self.reduce.stages(grads)
        return sums.add_to_chunk(total, grads, here.lane.chunk), other

    def passed(self, stream: Any, by: int) -> Any:
        size, is_ring = self.schedule.num_stages, self.schedule.num_chunks > 1
        ends = [(stage, stage + by) for stage in range(size)]
        pairs = [(a, b % size) for a, b in ends if is_ring or 0 <= b < size]
        send = functools.partial(jax.lax.ppermute, axis_name=PIPELINE, perm=pairs)
        return jax.tree.map(functools.partial(by_parts, send), stream)

    def mapped(
        self,
        run: Callable[..., Any],
        lane: Lane,
        outs: Any,
        staged: tuple[Any, ...] = (),
        everywhere: tuple[Any, ...] = (),
    ) -> Any:
        """Calls `run(here, *staged, *everywhere)` on every stage."""
        last_stage = self.schedule.num_stages - 1
        last_chunk = self.schedule.num_chunks - 1
        num_staged = len(staged)

        def of_stage(chunks, stage, lane, *args):
            own, (contexts, key, *rest) = args[:num_staged], args[num_staged:]
            context = arrays.read(contexts, lane.context)
            chunk_number = lane.chunk * (last_stage + 1) + stage
            here = Here(
                chunks=chunks,
                lane=lane,
                rest=(context, fold_in(key, lane.context), chunk_number),
                is_due=lane.microbatch != IDLE,
                is_first=(stage == 0) & (lane.chunk == 0),
                is_last=(stage == last_stage) & (lane.chunk == last_chunk),
                fetches=self.line.fetches,
                communicates=self.line.communicates,
            )
            return run(here, *own, *rest)

        given = self.chunks, jnp.arange(last_stage + 1), lane
        shared = self.contexts, self.key
        return arrays.map_stages(
            of_stage, outs, (*given, *staged), *shared, *everywhere
        )

    def embedded(self, turn: Turn) -> Any:
        """What enters the first stage in a tick."""
        return self.embed(self.params.embed, due(turn.first)[0])[0]

    def embed(self, params: Params, number: jax.Array) -> tuple[Any, Any]:
        batch = self.feed.batch(number)
        return self.line.embed(params, batch, fold_in(self.key, number))

    def embed_backward(self, number: jax.Array, cotangent: Any) -> Params:
        _, pull = jax.vjp(lambda p: self.embed(p, number)[0], self.params.embed)
        return pull(cotangent)[0]

    def head(self, params: Params, stream: Any, number: jax.Array) -> Any:
        batch, weight = self.feed.batch(number), self.feed.weights[number]
        return self.line.head(params, stream, batch, weight)

    def empty_stream(self) -> Any:
        size = self.schedule.num_stages
        return jax.tree.map(
            lambda x: arrays.make_room((size, *x.shape), x.dtype), self.stream
        )

    def no_losses(self) -> Loss:
        first = jnp.int32(0)
        _, loss = jax.eval_shape(self.head, self.params.head, self.stream, first)
        size = self.schedule.num_microbatches
        return jax.tree.map(lambda x: jnp.zeros((size, *x.shape), x.dtype), loss)
