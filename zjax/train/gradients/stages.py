"""A model's arrays and functions as the stages of a pipeline take them."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from zjax.comm import shards
from zjax.forward import loss_of_sums
from zjax.ops.keys import block_key
from zjax.parallel.line import Line, Parts
from zjax.parallel.schedule import Schedule
from zjax.parallel.staged import either
from zjax.sharding.mesh import PIPELINE, SEQUENCE, TENSOR
from zjax.sharding.placement import ArrayPlan
from zjax.train.gradients import weighting
from zjax.train.gradients.local import LocalGradients
from zjax.train.gradients.partition import StagePartition
from zjax.typing import Auxiliary, Batch, Loss, Params, Segment


@dataclasses.dataclass(frozen=True, eq=False)
class StagedModel:
    """The program of the devices that hold the same rows, one in each stage.

    Args:
        partition: Splits trees into embedding, layers and head.
        local: What each device does with its own rows.
        schedule: The passes of a step.
        keeps: What a block keeps for its backward pass, as a policy of
            `jax.checkpoint`; None keeps what its gradients read.
        gathers_in_ticks: Whether parameters are gathered where they are used.
    """

    partition: StagePartition
    local: LocalGradients
    schedule: Schedule
    keeps: Callable[..., Any] | None
    gathers_in_ticks: bool

    @functools.cached_property
    def rows(self) -> Parts:
        """Where the parameters are stored."""
        return self.partition.split(self.local.plan.master)

    @functools.cached_property
    def layer_rows(self) -> Any:
        """Where those of one layer are."""
        return jax.tree.map(lambda row: row.layer, self.rows.stages)

    @functools.cached_property
    def block(self) -> Callable[..., Any]:
        """`block(params, stream, context, key) -> stream`."""
        keeps = self.keeps
        return jax.checkpoint(self.run_block, policy=keeps) if keeps else self.run_block

    @property
    def segment(self) -> Segment:
        """The blocks."""
        (segment,) = self.partition.stack.segments
        return segment

    @property
    def num_layers(self) -> int:
        """With those that only fill up the last stages."""
        (first, *_) = jax.tree.leaves(self.rows.stages)
        return first.num_layers

    @property
    def chunk_size(self) -> int:
        """Layers that a stage runs in a tick."""
        return self.num_layers // (self.schedule.num_stages * self.schedule.num_chunks)

    @property
    def communicates(self) -> bool:
        """Whether devices exchange anything within a chunk."""
        sizes = self.local.plan.mesh.shape
        return self.gathers_in_ticks or sizes[SEQUENCE] > 1 or sizes[TENSOR] > 1

    def line(self, scale: jax.Array, unit: jax.Array) -> Line:
        """What a pipeline runs.

        Args:
            scale: float32[], the loss scale.
            unit: float32[], what weights of microbatches are counted in.

        Returns:
            Functions of one microbatch.
        """
        return Line(
            self.embed,
            self.chunk,
            functools.partial(self.head, scale, unit),
            fetches=self.gathers_in_ticks,
            communicates=self.communicates,
        )

    def embed(self, params: Params, batch: Batch, key: Any) -> tuple[Any, Any]:
        """The stream and the context of a microbatch."""
        whole, batch = self.in_turn(params, batch, self.rows.embed)
        device_key = block_key(self.local.device_key(key), 0)
        carry, context = self.partition.stack.embed(whole, batch, device_key)
        return (carry, self.nothing_added(carry, context, device_key)), context

    def nothing_added(self, carry: Any, context: Any, key: Any) -> Auxiliary:
        """The sums of what blocks give besides, before the first."""
        rows = self.partition.split(self.local.plan.compute).stages
        layer = jax.tree.map(
            lambda row: jax.ShapeDtypeStruct(row.shape[1:], row.dtype), rows
        )
        _, own = jax.eval_shape(self.segment.block, layer, carry, context, key)
        return jax.tree.map(lambda _: jnp.zeros((), jnp.float32), own)

    def chunk(
        self, layers: list[Params], stream: Any, context: Any, key: Any, number: Any
    ) -> Any:
        """The stream behind the layers of a chunk."""
        first, key = number * self.chunk_size, self.local.device_key(key)
        for i, layer in enumerate(layers):
            layer_key = block_key(key, first + i + 1)
            run = functools.partial(self.block, layer, context=context, key=layer_key)
            stream = self.unless_padding(first + i, run, stream)
        return stream

    def run_block(self, params: Params, stream: Any, context: Any, key: Any) -> Any:
        """The stream behind one layer, and the sums of what layers give besides."""
        carry, auxiliary = stream
        whole = self.whole(params, self.layer_rows)
        carry, own = self.segment.block(whole, carry, context, key)
        return carry, jax.tree.map(jnp.add, auxiliary, own)

    def unless_padding(
        self, number: jax.Array, run: Callable[..., Any], stream: Any
    ) -> Any:
        """Hands the stream on where a layer only fills up its stage."""
        if self.segment.num_blocks == self.num_layers:
            return run(stream)
        is_real = number < self.segment.num_blocks
        # Of weights that are all 0, a block may have a gradient of 0 / 0.
        entering = either(is_real, stream, jax.lax.stop_gradient(stream))
        return either(is_real, run(entering), stream)

    def head(
        self,
        scale: jax.Array,
        unit: jax.Array,
        params: Params,
        stream: Any,
        batch: Batch,
        weight: jax.Array,
    ) -> tuple[jax.Array, Loss]:
        """What to differentiate, and what to report, of a microbatch."""
        whole, (carry, auxiliary) = self.in_turn(params, stream, self.rows.head)
        total_loss, divisor, sums = self.partition.stack.head(whole, carry, batch)
        number = self.segment.num_blocks
        metrics = {name: x / number for name, x in auxiliary.metrics.items()}
        mean = auxiliary._replace(metrics=metrics)
        loss = weighting.check_names(loss_of_sums(total_loss, divisor, sums, mean))
        part, total = self.local.part_of(loss._replace(weight=weight))
        objective = loss.value * (weight / unit) * scale
        return objective, self.local.mean(loss, part, total)

    def whole(self, params: Params, rows: Any) -> Params:
        """Parameters as a part of the model takes them."""
        if not self.gathers_in_ticks:
            return params

        def one(x: jax.Array, row: ArrayPlan) -> jax.Array:
            return shards.fetch(x, row, self.local.axes)

        return jax.tree.map(one, params, rows)

    def in_turn(self, params: Params, inputs: Any, rows: Any) -> tuple[Params, Any]:
        """The same, fetched no earlier than what is read with them is there."""
        if self.gathers_in_ticks:
            params, inputs = jax.lax.optimization_barrier((params, inputs))
        return self.whole(params, rows), inputs

    def staged(self, parts: Parts) -> Parts:
        """Embedding and head in place, layers [stages, chunks, layers, ...]."""
        stages, chunks = self.schedule.num_stages, self.schedule.num_chunks

        def by_stage(x: jax.Array, row: ArrayPlan) -> jax.Array:
            x = x.reshape(chunks, stages, -1, *x.shape[1:]).swapaxes(0, 1)
            return _held(x, P(PIPELINE, None, None, *_besides_batch(row)[1:]))

        return Parts(
            in_place(parts.embed, self.rows.embed),
            jax.tree.map(by_stage, parts.stages, self.rows.stages),
            in_place(parts.head, self.rows.head),
        )

    def in_line(self, parts: Parts) -> Parts:
        """Layers one after another again."""

        def one(x: jax.Array, row: ArrayPlan) -> jax.Array:
            x = x.swapaxes(0, 1).reshape(-1, *x.shape[3:])
            return _held(x, _besides_batch(row))

        stages = jax.tree.map(one, parts.stages, self.rows.stages)
        return dataclasses.replace(parts, stages=stages)


def in_place(params: Params, rows: Any) -> Params:
    """Holds arrays where they are split by other axes than those of the batch.

    Args:
        params: Arrays.
        rows: A tree of `ArrayPlan` of the same structure.

    Returns:
        The same arrays.
    """
    return jax.tree.map(lambda x, row: _held(x, _besides_batch(row)), params, rows)


def _held(x: jax.Array, spec: P) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, spec)


def _besides_batch(row: ArrayPlan) -> P:
    return shards.manual_spec(row, (PIPELINE, SEQUENCE, TENSOR))
