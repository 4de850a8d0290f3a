"""Gradients of a model whose blocks lie on the stages of a pipeline.

Every device differentiates its own rows, as in `zjax.train.gradients.local`, with the
same communication over the batch axes: gradients are reduced once per step, or from
ZeRO stage 2 on in each tick that has a backward pass; at stage 3 the parameters of
blocks are fetched in each tick. Before the first, devices without any microbatch of
weight are lent one.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from zjax.comm import shards
from zjax.errors import PlanError, Problem
from zjax.ops.keys import part_key
from zjax.parallel.feed import Feed, make_feed
from zjax.parallel.line import Line, Parts
from zjax.parallel.pipeline import Pipeline
from zjax.parallel.schedule import Schedule
from zjax.parallel.staged import either
from zjax.sharding.mesh import BATCH_AXES, PIPELINE, SEQUENCE, TENSOR, num_shares
from zjax.sharding.placement import ArrayPlan, unpad_tree
from zjax.sharding.plan import Plan
from zjax.train.gradients import microbatches
from zjax.train.gradients.automatic import compute_dtype
from zjax.train.gradients.local import Share
from zjax.train.gradients.partition import Cut, check_no_model_state
from zjax.typing import Batch, Loss, Model, ModelState, Params


@dataclasses.dataclass(frozen=True)
class PipelinedModel:
    """A model and how its stages run.

    Args:
        model: It has a stack of one segment, whose arrays stack their layers.
        schedule: The passes of a step.
        recomputes: Whether a stage keeps only what entered it until its backward pass.
        keeps: What a block keeps besides, as a policy of `jax.checkpoint`; None keeps
            what its gradients read.
    """

    model: Model
    schedule: Schedule
    recomputes: bool
    keeps: Callable[..., Any] | None


def pipelined_gradients(
    pipelined: PipelinedModel, plan: Plan, *, reduce_dtype: Any
) -> Callable[..., tuple[Params, Loss]]:
    """Builds `gradients(master, model_state, batch, key, scale) -> (grads, loss)`.

    Args:
        pipelined: The model and its schedule.
        plan: Places parameters, gradients and their sum.
        reduce_dtype: In which gradients are added over devices.

    Returns:
        A pure function of the stored master parameters, as
        `zjax.train.gradients.local.share_gradients` builds it.

    Raises:
        PlanError: The model is not a line of equal blocks whose arrays stack them.
    """
    run = _Run(pipelined, plan, reduce_dtype)

    def of_device(
        master: Params, state: ModelState, batch: Batch, key: Any, scale: Any
    ) -> tuple[Params, Loss]:
        grads, loss = run.gradients(master, batch, key, scale)
        return grads, loss._replace(model_state=state)

    def gradients(
        master: Params, state: ModelState, batch: Batch, key: jax.Array, scale: Any
    ) -> tuple[Params, Loss]:
        outs = run.share.specs(plan.grads), P()
        stored, loss = run.mapped(of_device, outs)(master, state, batch, key, scale)
        return unpad_tree(stored, plan.grads), loss

    return gradients


def pipelined_forward(pipelined: PipelinedModel, plan: Plan) -> Callable[..., Loss]:
    """Builds `forward(master, model_state, batch, key) -> Loss`, without gradients.

    Args:
        pipelined: The model and its schedule.
        plan: Places the parameters.

    Returns:
        A pure function of the stored master parameters; a key of None evaluates.

    Raises:
        PlanError: The model is not a line of equal blocks whose arrays stack them.
    """
    run = _Run(pipelined, plan, jnp.float32)

    def of_device(master: Params, state: ModelState, batch: Batch, key: Any) -> Loss:
        return run.forward(master, batch, key)._replace(model_state=state)

    def forward(
        master: Params, state: ModelState, batch: Batch, key: jax.Array | None
    ) -> Loss:
        return run.mapped(of_device, P())(master, state, batch, key)

    return forward


class _Run:
    """The program of the devices that hold the same rows, one in each stage."""

    def __init__(self, pipelined: PipelinedModel, plan: Plan, reduce_dtype: Any):
        self.pipelined, self.schedule = pipelined, pipelined.schedule
        model = pipelined.model
        self.plan = _with_padded_layers(plan)
        num_microbatches = self.schedule.num_microbatches
        # Alone with its rows, a device has nothing to split sums of gradients over.
        stage = plan.stage if num_shares(plan.mesh, BATCH_AXES) > 1 else 0
        self.share = Share(model, self.plan, num_microbatches, reduce_dtype, stage >= 2)
        self.cut = Cut(model, self.plan)
        self.rows = self.cut.split(self.plan.master)
        self.is_split = stage >= 3
        self.check_sizes()
        size = self.schedule.num_stages
        check_no_model_state(self.plan, "mesh.pipeline", size, 1)

    def check_sizes(self) -> None:
        """Refuses what `zjax.config.stages` does, of models that it does not know."""
        (segment,), schedule = self.cut.stack.segments, self.schedule
        size, number = schedule.num_stages, segment.num_blocks
        if number < size:
            problem = f"makes more stages than the {number} blocks of the model"
            remedy = f"use at most {number}"
            raise PlanError(Problem("mesh.pipeline", size, problem, remedy))
        if schedule.num_chunks > 1 and number % (size * schedule.num_chunks):
            problem = f"does not cut {number} blocks into equal parts on {size} stages"
            remedy = "use a number that does, or pipeline.schedule='1f1b'"
            chunks = schedule.num_chunks
            raise PlanError(Problem("pipeline.num_chunks", chunks, problem, remedy))
        if schedule.name == "zb_h1" and self.pipelined.keeps:
            problem = "cannot take gradients of weights from blocks that are recomputed"
            remedy = "use '1f1b', or a model whose `keeps` is None"
            raise PlanError(Problem("pipeline.schedule", "zb_h1", problem, remedy))

    def mapped(self, run: Callable[..., Any], outs: Any) -> Callable[..., Any]:
        def call(master, state, batch, *rest):
            num_microbatches = self.schedule.num_microbatches
            shares, model = self.plan.num_batch_shares, self.pipelined.model
            microbatches.check_batch(batch, model, num_microbatches, shares)
            by_row = microbatches.row_specs(batch, model, BATCH_AXES)
            specs = (
                self.share.specs(self.plan.master),
                P(),
                by_row,
                *[P() for _ in rest],
            )
            return jax.shard_map(
                run,
                mesh=self.plan.mesh,
                in_specs=specs,
                out_specs=outs,
                axis_names=set(BATCH_AXES),
                check_vma=False,
            )(master, state, batch, *rest)

        return call

    def gradients(
        self, master: Params, batch: Batch, key: jax.Array, scale: Any
    ) -> tuple[Params, Loss]:
        params, feed = self.start(master, batch, self.share.axes)
        unit = microbatches.unit_of(self.share.sum(feed.weights))
        pipeline = self.pipeline(scale, unit)
        grads, losses = pipeline.differentiate(params, self.zeros(), feed, key)
        loss = microbatches.mean_loss(losses, ())
        inverse = jnp.where(loss.weight > 0, unit / loss.weight, 0)
        grads = jax.tree.map(lambda g: microbatches.scaled(g, inverse), grads)
        grads = self.cut.join(
            dataclasses.replace(grads, stages=self.in_line(grads.stages))
        )
        return grads if self.share.reduces_each else self.share.reduce(grads), loss

    def forward(self, master: Params, batch: Batch, key: jax.Array | None) -> Loss:
        params, feed = self.start(master, batch)
        one = jnp.float32(1)
        losses = self.pipeline(one, one).evaluate(params, feed, key)
        return microbatches.mean_loss(losses, ())

    def start(
        self, master: Params, batch: Batch, lenders: Sequence[str] = ()
    ) -> tuple[Parts, Feed]:
        params = microbatches.cast_like(master, self.plan.compute)
        params = params if self.is_split else self.share.fetch(params)
        params = self.cut.split(params)
        stages = self.by_stage(params.stages)
        batch = microbatches.cast_batch(
            batch, self.pipelined.model, compute_dtype(self.plan)
        )
        model, number = self.pipelined.model, self.schedule.num_microbatches
        parts = microbatches.split_batch(batch, model, number, 1)
        self.cut.check_context(jax.tree.map(lambda x: x[0], parts))
        embed = self.in_place(params.embed, self.rows.embed)
        head = self.in_place(params.head, self.rows.head)
        feed = make_feed(parts, self.cut.weights(parts), lenders)
        return Parts(embed, stages, head), feed

    def pipeline(self, scale: jax.Array, unit: jax.Array) -> Pipeline:
        rows = self.cut.split(self.plan.grads)
        of_layer = jax.tree.map(lambda row: row.layer, rows.stages)
        rows = dataclasses.replace(rows, stages=[of_layer] * self.chunk_size)
        return Pipeline(
            self.line(scale, unit),
            self.schedule,
            self.pipelined.recomputes,
            jax.tree.map(
                self.reducer, rows, is_leaf=lambda x: not isinstance(x, Parts)
            ),
            self.adds_in_products,
        )

    @property
    def reduces_each(self) -> bool:
        """Whether gradients are reduced in the ticks that make them."""
        return self.share.reduces_each and not self.is_split

    @property
    def communicates(self) -> bool:
        """Whether devices exchange anything within a chunk."""
        sizes = self.plan.mesh.shape
        return self.is_split or sizes[SEQUENCE] > 1 or sizes[TENSOR] > 1

    @property
    def adds_in_products(self) -> bool:
        """Whether nothing comes between a gradient and the sum of its chunk."""
        # What devices of a sequence add up would be twice as wide.
        is_whole = self.plan.mesh.shape[SEQUENCE] == 1
        is_fixed = self.schedule.num_chunks == 1 or not self.communicates
        return is_whole and is_fixed and not self.reduces_each

    def reducer(self, rows: Any) -> Callable[..., Any]:
        def reduce(grads: Params) -> Params:
            if self.reduces_each:
                grads = jax.tree.map(self.share.reduce_one, grads, rows)
            return self.in_place(grads, rows)

        return reduce

    def zeros(self) -> Parts:
        zeros = self.cut.split(self.share.zeros())
        return Parts(
            self.in_place(zeros.embed, self.rows.embed),
            self.by_stage(zeros.stages),
            self.in_place(zeros.head, self.rows.head),
        )

    def line(self, scale: jax.Array, unit: jax.Array) -> Line:
        stack, rows = self.cut.stack, self.rows
        (segment,) = stack.segments
        of_layer = jax.tree.map(lambda row: row.layer, rows.stages)
        chunk_size = self.chunk_size

        def embed(params, batch, key):
            whole, batch = self.in_turn(params, batch, rows.embed)
            own_key = part_key(self.share.own_key(key), 0)
            carry, context = stack.embed(whole, batch, own_key)
            return (carry, jnp.zeros((), jnp.float32)), context

        def block(params, stream, context, key):
            carry, auxiliary = stream
            whole = self.whole(params, of_layer)
            carry, own = segment.block(whole, carry, context, key)
            return carry, auxiliary + own

        keeps = self.pipelined.keeps
        kept = jax.checkpoint(block, policy=keeps) if keeps else block

        def chunk(layers, stream, context, key, number):
            first, key = number * chunk_size, self.share.own_key(key)
            for i, layer in enumerate(layers):
                layer_key = part_key(key, first + i + 1)
                run = functools.partial(kept, layer, context=context, key=layer_key)
                stream = self.unless_padding(first + i, run, stream)
            return stream

        def head(params, stream, batch, weight):
            whole, (carry, auxiliary) = self.in_turn(params, stream, rows.head)
            total_loss, divisor, sums = stack.head(whole, carry, batch)
            loss = microbatches.loss_of_sums(total_loss, divisor, sums, auxiliary)
            part, total = self.share.part_of(loss._replace(weight=weight))
            objective = loss.value * (weight / unit) * scale
            return objective, self.share.mean(loss, part, total)

        return Line(
            embed,
            chunk,
            head,
            fetches=self.is_split,
            communicates=self.communicates,
        )

    @property
    def num_layers(self) -> int:
        """With those that only fill up the last stages."""
        (first, *_) = jax.tree.leaves(self.rows.stages)
        return first.num_layers

    @property
    def chunk_size(self) -> int:
        num_chunks = self.schedule.num_stages * self.schedule.num_chunks
        return self.num_layers // num_chunks

    def unless_padding(
        self, number: jax.Array, run: Callable[..., Any], stream: Any
    ) -> Any:
        (segment,) = self.cut.stack.segments
        if segment.num_blocks == self.num_layers:
            return run(stream)
        is_real = number < segment.num_blocks
        # Of weights that are all 0, a block may have a gradient of 0 / 0.
        entering = either(is_real, stream, jax.lax.stop_gradient(stream))
        return either(is_real, run(entering), stream)

    def whole(self, params: Params, rows: Any) -> Params:
        """Parameters as a part of the model takes them."""
        if not self.is_split:
            return params

        def one(x, row):
            return shards.fetch(x, row, self.share.axes)

        return jax.tree.map(one, params, rows)

    def in_turn(self, params: Params, inputs: Any, rows: Any) -> tuple[Params, Any]:
        """The same, fetched no earlier than what is read with them is there."""
        if self.is_split:
            params, inputs = jax.lax.optimization_barrier((params, inputs))
        return self.whole(params, rows), inputs

    def by_stage(self, stacked: Params) -> Params:
        """[layers, ...] -> [stages, chunks, layers, ...]."""
        stages, chunks = self.schedule.num_stages, self.schedule.num_chunks

        def one(x, row):
            x = x.reshape(chunks, stages, -1, *x.shape[1:]).swapaxes(0, 1)
            return _held(x, P(PIPELINE, None, None, *_besides_batch(row)[1:]))

        return jax.tree.map(one, stacked, self.rows.stages)

    def in_line(self, staged: Params) -> Params:
        """The inverse."""

        def one(x, row):
            x = x.swapaxes(0, 1).reshape(-1, *x.shape[3:])
            return _held(x, _besides_batch(row))

        return jax.tree.map(one, staged, self.rows.stages)

    def in_place(self, params: Params, rows: Any) -> Params:
        """Held where they are split by other axes than those of the batch."""
        return jax.tree.map(lambda x, row: _held(x, _besides_batch(row)), params, rows)


def _held(x: jax.Array, spec: P) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, spec)


def _besides_batch(row: ArrayPlan) -> P:
    return shards.manual_spec(row, (PIPELINE, SEQUENCE, TENSOR))


def _with_padded_layers(plan: Plan) -> Plan:
    """Stages of equal size: what fills up the last ones counts as layers."""

    def one(row: ArrayPlan) -> ArrayPlan:
        if not row.num_layers:
            return row
        number = row.stored_shape[0]
        shape = (number, *row.shape[1:])
        return dataclasses.replace(row, shape=shape, num_layers=number)

    names = ("master", "compute", "grad_sum", "grads")
    rows = {name: jax.tree.map(one, getattr(plan, name)) for name in names}
    return dataclasses.replace(plan, **rows)
