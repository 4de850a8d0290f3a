"""Gradients of a model with blocks that run on the stages of a pipeline.

Every device differentiates local rows, as in `zjax.train.gradients`, with equal
communication over the batch axes. Gradients are reduced once per step; from ZeRO stage
2 on, in each tick with a backward pass. At stage 3 each tick gathers the parameters of
the tick's blocks. Before the first tick, devices with microbatches of weight 0 alone
get one microbatch from another device.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from zjax.errors import PlanError, Problem
from zjax.parallel.pipeline import MicrobatchFeed, Pipeline, StackTree, make_feed
from zjax.parallel.pipeline_schedule import Schedule
from zjax.parallel.slots import whole_slots
from zjax.sharding.mesh import SEQUENCE
from zjax.sharding.placement import ArrayPlan, unpad_tree
from zjax.sharding.plan import Plan
from zjax.sharding.roles import trained
from zjax.train import microbatches
from zjax.train.compute_params import cast_like, compute_dtype
from zjax.train.gradients import LocalGradients
from zjax.train.partition import StagePartition, check_no_model_state
from zjax.train.stages import StagedModel, in_place
from zjax.typing import (
    Batch,
    Dropping,
    Loss,
    Model,
    ModelState,
    Params,
    StepBatch,
)


@dataclasses.dataclass(frozen=True)
class PipelinedModel:
    """A model, the schedule of the pipeline and the residuals to save.

    Args:
        recomputes: Whether a stage saves only the stage's input for the backward pass.
        keeps: Policy of `jax.checkpoint` for the residuals of a block; None saves all.
        drops_tokens: Whether some blocks of a step run on some of the tokens.
    """

    model: Model
    schedule: Schedule
    recomputes: bool
    keeps: Callable[..., Any] | None
    drops_tokens: bool


def pipelined_gradients(
    pipelined: PipelinedModel, plan: Plan, *, reduce_dtype: Any
) -> "PipelinedGradients":
    """Splits a model into stages; raises PlanError for models that do not divide."""
    model, schedule = pipelined.model, pipelined.schedule
    padded = _with_padded_layers(plan)
    # A single share of the batch has no devices to split sums of gradients over.
    is_shared = plan.num_batch_shares > 1
    each = is_shared and plan.splits.grad_sum
    number = schedule.num_microbatches
    local = LocalGradients(model, padded, number, reduce_dtype, each)
    gathers = is_shared and plan.splits.compute
    partition = StagePartition(model, padded)
    staged = StagedModel(partition, local, schedule, pipelined.keeps, gathers)
    check_sizes(staged)
    if pipelined.drops_tokens:
        check_slots(staged)
    check_no_model_state(padded, "mesh.pipeline", schedule.num_stages, 1)
    return PipelinedGradients(plan, staged, pipelined.recomputes)


@dataclasses.dataclass(frozen=True, eq=False)
class PipelinedGradients:
    """Pure functions of the stored master parameters."""

    plan: Plan
    staged: StagedModel
    recomputes: bool

    def gradients(
        self,
        master: Params,
        state: ModelState,
        step: StepBatch,
        key: jax.Array,
        scale: Any,
    ) -> tuple[Params, Loss]:
        """Returns gradients of `scale` times the mean loss, and the unscaled loss.

        Gradients are in logical shapes and the dtype of the gradient sum. `state` is
        returned unchanged.
        """
        outs = self.local.specs(self.plan.grads), P()
        mapped = self.mapped(self.device_gradients, outs)
        stored, loss = mapped(master, state, step, key, scale)
        return unpad_tree(stored, self.plan.grads), loss

    def loss(
        self, master: Params, state: ModelState, step: StepBatch, key: jax.Array | None
    ) -> Loss:
        """Returns the mean loss, without gradients; a `key` of None evaluates."""
        return self.mapped(self.device_loss, P())(master, state, step, key)

    @property
    def local(self) -> LocalGradients:
        """Gradients of the local rows."""
        return self.staged.local

    @property
    def reduces_in_ticks(self) -> bool:
        """Whether gradients are reduced in the ticks that compute gradients."""
        return self.local.reduces_each and not self.staged.gathers_in_ticks

    @property
    def adds_in_products(self) -> bool:
        """Whether matrix products accumulate into the sum of gradients of a chunk."""
        # Devices of a sequence would add up gradients of twice the width.
        is_local = self.plan.mesh.shape[SEQUENCE] == 1
        is_fixed = self.staged.schedule.num_chunks == 1 or not self.staged.communicates
        return is_local and is_fixed and not self.reduces_in_ticks

    def mapped(self, run: Callable[..., Any], outs: Any) -> Callable[..., Any]:
        """Maps the program of a device by `shard_map` over the batch axes."""
        model, number = self.local.model, self.local.num_microbatches

        def call(master: Params, state: ModelState, step: StepBatch, *rest: Any) -> Any:
            shares = self.plan.num_batch_shares
            microbatches.check_batch(step.batch, model, number, shares)
            by_row = microbatches.row_specs(step, model, self.plan.batch_axes)
            by_shard = self.local.specs(self.local.plan.master)
            return jax.shard_map(
                run,
                mesh=self.plan.mapped_mesh,
                in_specs=(by_shard, P(), by_row, *[P() for _ in rest]),
                out_specs=outs,
                axis_names=set(self.plan.batch_axes),
                check_vma=False,
            )(master, state, step, *rest)

        return call

    def device_gradients(
        self, master: Params, state: ModelState, step: StepBatch, key: Any, scale: Any
    ) -> tuple[Params, Loss]:
        """Computes gradients on one device."""
        params, feed = self.inputs(master, step.batch, self.local.axes)
        unit = microbatches.unit_of(self.local.sum(feed.weights))
        pipeline = self.pipeline(scale, unit, step.dropping)
        grads, losses = pipeline.differentiate(params, self.zeros(), feed, key)
        loss = microbatches.mean_loss(losses, state)
        # Microbatches were weighed in `unit`; the mean divides by the total weight.
        inverse = jnp.where(loss.weight > 0, unit / loss.weight, 0)
        grads = jax.tree.map(lambda g: microbatches.scaled(g, inverse), grads)
        grads = self.staged.partition.join(self.staged.unstaged(grads))
        # `join` makes 0 of the missing gradients of frozen parameters; drop these
        # again.
        grads = trained(grads, self.local.plan.master)
        # Already reduced in the ticks, or by the transpose of each tick's gathers.
        return grads if self.local.reduces_each else self.local.reduce(grads), loss

    def device_loss(
        self, master: Params, state: ModelState, step: StepBatch, key: Any
    ) -> Loss:
        """Computes the loss on one device."""
        params, feed = self.inputs(master, step.batch)
        one = jnp.float32(1)
        losses = self.pipeline(one, one, step.dropping).evaluate(params, feed, key)
        return microbatches.mean_loss(losses, state)

    def inputs(
        self, master: Params, batch: Batch, axes: Sequence[str] = ()
    ) -> tuple[StackTree, MicrobatchFeed]:
        """Returns parameters on stages, and microbatches; `shard_map` maps `axes`."""
        local, partition = self.local, self.staged.partition
        params = cast_like(master, local.plan.compute)
        params = (
            params if self.staged.gathers_in_ticks else local.gather(params, params)
        )
        params = self.staged.staged(partition.split(params))
        batch = microbatches.cast_batch(batch, local.model, compute_dtype(local.plan))
        number = local.num_microbatches
        parts = microbatches.split_batch(batch, local.model, number, 1)
        partition.check_context(jax.tree.map(lambda x: x[0], parts))
        return params, make_feed(parts, partition.weights(parts), axes)

    def pipeline(
        self, scale: jax.Array, unit: jax.Array, dropping: Dropping
    ) -> Pipeline:
        """Builds the passes of a step."""
        rows = self.staged.by_slot(self.staged.partition.split(self.local.plan.grads))
        return Pipeline(
            self.staged.chain(scale, unit, dropping),
            self.staged.by_slot(self.staged.rows),
            self.staged.schedule,
            self.recomputes,
            StackTree(*map(self.reducer, (rows.embed, rows.stages, rows.head))),
            self.adds_in_products,
        )

    def reducer(self, rows: Any) -> Callable[[Params], Params]:
        """Returns one function of `Pipeline.reduce`."""

        def reduce(grads: Params) -> Params:
            if self.reduces_in_ticks:
                grads = jax.tree.map(self.local.reduce_one, grads, rows)
            return in_place(grads, rows)

        return reduce

    def zeros(self) -> StackTree:
        """Returns initial sums of gradients by stage."""
        return self.staged.staged(self.staged.partition.split(self.local.zeros()))


def check_sizes(staged: StagedModel) -> None:
    """Raises PlanError for a user's model by the rules of `zjax.settings.layers`."""
    schedule = staged.schedule
    number = sum(slots.num_blocks for slots in staged.slots)
    size, chunks = schedule.num_stages, schedule.num_chunks
    if number < size:
        problem = f"makes more stages than the {number} blocks of the model"
        remedy = f"use at most {number}"
        raise PlanError(Problem("mesh.pipeline", size, problem, remedy))
    if chunks > 1 and number % (size * chunks):
        problem = f"does not cut {number} blocks into equal parts on {size} stages"
        remedy = "use a number that does, or pipeline='1f1b'"
        raise PlanError(Problem("pipeline.num_chunks", chunks, problem, remedy))
    if chunks * sum(slots.size for slots in staged.slots) >= number:
        segments = len(staged.slots)
        problem = f"gives each stage room for all {number} blocks, as each has some for"
        problem += f" blocks of each of {segments} segments"
        remedy = "use 1, or fewer segments"
        raise PlanError(Problem("mesh.pipeline", size, problem, remedy))
    if schedule.name == "zb_h1" and staged.keeps:
        problem = "cannot take gradients of weights from blocks that are recomputed"
        remedy = "use '1f1b', or a model whose `keeps` is None"
        raise PlanError(Problem("pipeline", "zb_h1", problem, remedy))


def check_slots(staged: StagedModel) -> None:
    """Raises PlanError if every slot of the stages must run on all tokens."""
    size, whole = staged.schedule.num_stages, whole_slots(staged.slots)
    if len(whole) == sum(slots.size for slots in staged.slots):
        problem = "leaves random_ltd no block to drop tokens of: stages run one "
        problem += "program, and all blocks run whole beside the first or the last one"
        remedy = "use fewer stages or chunks, or random_ltd=None"
        raise PlanError(Problem("mesh.pipeline", size, problem, remedy))


def _with_padded_layers(plan: Plan) -> Plan:
    """Returns the plan of stacked arrays with padding, so that stages are equal."""

    def one(row: ArrayPlan) -> ArrayPlan:
        if not row.num_layers:
            return row
        shape = (row.stored_shape[0], *row.shape[1:])
        return dataclasses.replace(row, shape=shape)

    names = ("master", "compute", "grad_sum", "grads")
    rows = {name: jax.tree.map(one, getattr(plan, name)) for name in names}
    return dataclasses.replace(plan, **rows)
