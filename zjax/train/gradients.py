"""Gradients over a global batch, reduced by the compiler or by explicit collectives."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from zjax.ops import remat, shards
from zjax.ops.keys import fold_in
from zjax.sharding.layers import put_together, take_apart
from zjax.sharding.mesh import REPLICA
from zjax.sharding.placement import ArrayPlan, place_tree, unpad_tree
from zjax.sharding.plan import Plan, layerwise_plan
from zjax.sharding.roles import joined, trained
from zjax.stack.forward import loss_of_step
from zjax.train import microbatches
from zjax.train.compute_params import cast_like, compute_dtype
from zjax.typing import Batch, Loss, Model, ModelState, Params, StepBatch


@dataclasses.dataclass(frozen=True)
class AutomaticGradients:
    """Gradients that the compiler reduces; pure functions of the compute parameters.

    This is right for every loss, including a loss that couples the rows of a batch.
    """

    model: Model
    plan: Plan
    num_microbatches: int

    def gradients(
        self,
        params: Params,
        state: ModelState,
        step: StepBatch,
        key: jax.Array,
        scale: Any,
    ) -> tuple[Params, Loss]:
        """Returns gradients of `scale` times the mean loss, and the unscaled loss.

        `params` are in the compute dtype. Gradients are in logical shapes and the dtype
        of the gradient sum, None for frozen parameters. Each microbatch folds its
        number into `key`.
        """
        rows = layerwise_plan(self.model, self.plan).grad_sum
        loss_of = loss_of_step(self.model, step.dropping)

        def pin(grads: Params) -> Params:
            return place_tree(grads, rows)

        def one(
            state: ModelState, microbatch: Batch, key: jax.Array
        ) -> tuple[Params, Loss]:
            inputs = state, microbatch, key
            grads, result = self.differentiate(loss_of, params, inputs, scale)
            return pin(grads), result

        zeros = jax.tree.map(lambda row: jnp.zeros(row.shape, row.dtype), rows)
        grads, loss = microbatches.accumulate(
            one, zeros, state, self.split(step.batch), key, pin=pin
        )
        # Placed and stacked before the cast, so that the smaller dtype is moved.
        return cast_like(put_together(grads), self.plan.grad_sum), loss

    def differentiate(
        self,
        loss_of: Callable[..., Loss],
        params: Params,
        inputs: tuple[ModelState, Batch, jax.Array],
        scale: Any,
    ) -> tuple[Params, Loss]:
        """Differentiates one microbatch; the gradients are not placed yet."""
        rows = layerwise_plan(self.model, self.plan).master

        def scaled(learned: Params) -> tuple[jax.Array, Loss]:
            used = joined(learned, params, rows)
            result = loss_of(used, *inputs)
            # Weight 0 stops the gradient; a weight that is not finite makes it NaN: a
            # skipped step.
            counted = microbatches.counted(result.weight)
            return result.value * scale * counted, result

        return jax.grad(scaled, has_aux=True)(trained(params, rows))

    def loss(
        self, params: Params, state: ModelState, step: StepBatch, key: jax.Array | None
    ) -> Loss:
        """Returns the mean loss, without gradients; a `key` of None evaluates."""
        loss_of = loss_of_step(self.model, step.dropping)

        def one(state: ModelState, inputs: Any) -> tuple[ModelState, Loss]:
            index, microbatch = inputs
            result = loss_of(params, state, microbatch, fold_in(key, index))
            microbatches.check_names(result)
            return result.model_state, result._replace(model_state=())

        inputs = jnp.arange(self.num_microbatches), self.split(step.batch)
        state, losses = jax.lax.scan(one, state, inputs)
        return microbatches.mean_loss(losses, state)

    def split(self, batch: Batch) -> Batch:
        """Stacks microbatches of a batch, with inputs in the compute dtype."""
        batch = microbatches.cast_batch(batch, self.model, compute_dtype(self.plan))
        number, shares = self.num_microbatches, self.plan.num_batch_shares
        return microbatches.split_batch(batch, self.model, number, shares)


def local_gradients(
    model: Model,
    plan: Plan,
    num_microbatches: int,
    *,
    reduce_dtype: Any,
) -> Callable[..., tuple[Params, Loss]]:
    """Builds `gradients(master, model_state, step, key, scale) -> (grads, loss)`.

    `master` are stored parameters; `grads` are gradients of `scale` times the mean
    loss, in logical shapes and the dtype of the gradient sum. A loss that is not
    separable sees the local rows only: BatchNorm normalises over local rows, model
    states are averaged over devices, random keys differ by device.
    """
    layerwise = layerwise_plan(model, plan)
    # With one microbatch, reducing each is reducing once.
    each = plan.splits.grad_sum or num_microbatches == 1
    local = LocalGradients(model, layerwise, num_microbatches, reduce_dtype, each)

    def of_device(master: Params, *inputs: Any) -> tuple[Params, Loss]:
        grads, loss = local.gradients(take_apart(master, layerwise.master), *inputs)
        return put_together(grads), loss

    def gradients(
        master: Params, state: ModelState, step: StepBatch, key: jax.Array, scale: Any
    ) -> tuple[Params, Loss]:
        shares = plan.num_batch_shares
        microbatches.check_batch(step.batch, model, num_microbatches, shares)
        by_row = microbatches.row_specs(step, model, local.axes)
        mapped = jax.shard_map(
            of_device,
            mesh=plan.mapped_mesh,
            in_specs=(local.specs(plan.master), P(), by_row, P(), P()),
            out_specs=(local.specs(plan.grads), P()),
            axis_names=local.mapped_axes,
            check_vma=False,
        )
        grads, loss = mapped(master, state, step, key, scale)
        return unpad_tree(grads, plan.grads), loss

    return gradients


@dataclasses.dataclass(frozen=True)
class LocalGradients:
    """The program of one device inside `shard_map`.

    For separable losses, and for any loss if `precision.reduce_dtype` asks for float32.
    The communication is exactly as in the ZeRO paper (arXiv:1910.02054, section 7): per
    optimizer step, in units of the parameters,

        stage   gathers              reductions
          0     none                 1 all-reduce
          1     1                    1 reduce-scatter
          2     1                    1 reduce-scatter per microbatch
          3     2 per microbatch     1 reduce-scatter per microbatch

    Gathers use the compute dtype, reductions the compute dtype or `reduce_dtype`.

    Args:
        reduce_dtype: Dtype in which gradients are added over devices.
        reduces_each: Whether gradients are reduced after each microbatch, not once.
    """

    model: Model
    plan: Plan
    num_microbatches: int
    reduce_dtype: Any
    reduces_each: bool

    @property
    def axes(self) -> tuple[str, ...]:
        """Mesh axes that split the batch."""
        plan = self.plan
        return tuple(axis for axis in plan.batch_axes if plan.mesh.shape[axis] > 1)

    @property
    def mapped_axes(self) -> set[str]:
        """Mesh axes that `shard_map` maps."""
        # Map axes of size 1, too, if that leaves no axis to the compiler.
        sizes = dict(self.plan.mesh.shape)
        if self.plan.is_of_replica:
            sizes.pop(REPLICA)
        mapped = {axis for axis in sizes if axis in self.axes or sizes[axis] == 1}
        return mapped if mapped == set(sizes) else set(self.axes)

    @property
    def regathers(self) -> bool:
        """Whether each differentiation gathers the parameters again."""
        # Only separable losses: other gradients may be 0 / 0, and are cleared first.
        return self.plan.splits.compute and self.model.separable

    def specs(self, rows: Any) -> Any:
        """Returns PartitionSpecs of arrays for `shard_map`."""
        return jax.tree.map(lambda row: shards.manual_spec(row, self.axes), rows)

    def gradients(
        self,
        master: Params,
        state: ModelState,
        step: StepBatch,
        key: jax.Array,
        scale: Any,
    ) -> tuple[Params, Loss]:
        """Returns gradients of the weighted mean over all devices and microbatches."""
        dtype, loss_of = (
            compute_dtype(self.plan),
            loss_of_step(self.model, step.dropping),
        )
        batch = microbatches.cast_batch(step.batch, self.model, dtype)
        params = cast_like(master, self.plan.compute)
        stored = self.in_node(params)
        params = params if self.regathers else self.gather(params, stored)

        def one(
            state: ModelState, microbatch: Batch, key: jax.Array
        ) -> tuple[Params, Loss]:
            inputs = state, microbatch, self.device_key(key)
            return self.differentiate(loss_of, params, stored, inputs, scale)

        number = self.num_microbatches
        parts = microbatches.split_batch(batch, self.model, number, 1)
        grads, loss = microbatches.accumulate(one, self.zeros(), state, parts, key)
        return grads if self.reduces_each else self.reduce(grads), loss

    def differentiate(
        self,
        loss_of: Callable[..., Loss],
        params: Params,
        stored: Params,
        inputs: tuple[ModelState, Batch, jax.Array | None],
        scale: Any,
    ) -> tuple[Params, Loss]:
        """Returns gradients of one microbatch, and the mean loss over devices."""

        def share_of_mean(learned: Params) -> tuple[jax.Array, Any]:
            used = joined(learned, params, self.plan.master)
            used = self.gather(used, stored) if self.regathers else used
            result = loss_of(used, *inputs)
            part, total = self.part_of(result)
            return result.value * part * scale, (result, part, total)

        if self.regathers:
            # Without a checkpoint, gathered parameters would be residuals until the
            # backward pass.
            keeps = self.model.keeps or remat.keeps("none")
            share_of_mean = jax.checkpoint(share_of_mean, policy=keeps)
        differentiate = jax.grad(share_of_mean, has_aux=True)
        grads, (result, part, total) = differentiate(trained(params, self.plan.master))
        # The gradient of a device without tokens may be NaN, and would spread in the
        # sum.
        if not self.model.separable:
            clear = functools.partial(self.without_rows_of_no_weight, part)
            grads = jax.tree.map(clear, grads, self.plan.grads)
        # With regathering, the transpose of the all-gather has reduced the gradients.
        if self.reduces_each and not self.regathers:
            grads = self.reduce(grads)
        loss = self.mean(result, part, total)
        return cast_like(grads, self.plan.grad_sum), loss

    def device_key(self, key: jax.Array | None) -> jax.Array | None:
        """Returns the key of a device in a microbatch.

        Separable losses draw by row, equally on every mesh, and need no key per device.
        """
        if self.model.separable or not self.axes:
            return key
        return fold_in(key, jax.lax.axis_index(self.axes))

    def without_rows_of_no_weight(
        self, part: jax.Array, grad: jax.Array, row: ArrayPlan
    ) -> jax.Array:
        """Replaces a gradient, maybe NaN, by 0 on devices without weight."""
        # Experts have gradients from all devices among which they are split.
        part = self.sum(part, shards.splitting_axes(row, self.axes))
        return jnp.where(part == 0, 0, grad)

    def part_of(self, result: Loss) -> tuple[jax.Array, jax.Array]:
        """Returns the share of this device in the total weight, and the total."""
        # A weight may follow from parameters; the mean does not differentiate it.
        weight = jax.lax.stop_gradient(result.weight)
        total = self.sum(weight)
        return weight / jnp.where(total == 0, 1, total), total

    def sum(self, x: jax.Array, axes: Sequence[str] | None = None) -> jax.Array:
        """Sums over devices along some axes; along all batch axes by default."""
        axes = tuple(self.axes if axes is None else axes)
        return jax.lax.psum(x, axes) if axes else x

    def mean(self, result: Loss, part: jax.Array, total: jax.Array) -> Loss:
        """Averages the loss over all devices, weighted by share; adds up totals."""

        def over_devices(x: jax.Array) -> jax.Array:
            # Shares of many devices would lose digits in bfloat16.
            wide = jnp.asarray(x, jnp.float32)
            return self.sum(microbatches.scaled(wide, part))

        def average(x: jax.Array) -> jax.Array:
            return shards.mean_over(x, self.axes)

        value = over_devices(result.value)
        metrics = jax.tree.map(over_devices, result.metrics)
        state = jax.tree.map(average, result.model_state)
        return Loss(value, total, state, metrics, jax.tree.map(self.sum, result.totals))

    @property
    def stored_plans(self) -> Any:
        """Plans of the arrays from which parameters are gathered for use."""
        plan = self.plan
        return plan.compute if plan.splits.compute else plan.master

    def in_node(self, params: Params) -> Params:
        """Returns parameters as stored during a step: under ZeRO++ once per node."""

        def one(x: jax.Array, row: ArrayPlan, stored: ArrayPlan) -> jax.Array:
            return shards.gather_in_node(x, row, stored, self.axes)

        return jax.tree.map(one, params, self.plan.master, self.stored_plans)

    def gather(self, params: Params, stored: Params) -> Params:
        """All-gathers stored parameters; gradients flow to `params`."""

        def one(
            x: jax.Array, stored: jax.Array, row: ArrayPlan, grads: ArrayPlan
        ) -> jax.Array:
            return shards.gather_params(x, stored, row, grads, self.axes)

        rows, plan = self.stored_plans, self.plan
        return jax.tree.map(
            one, params, stored, rows, joined(plan.grads, rows, plan.master)
        )

    def reduce(self, grads: Params) -> Params:
        """Reduce-scatters gradients over devices into shards."""
        return jax.tree.map(self.reduce_one, grads, self.plan.grads)

    def reduce_one(self, grad: jax.Array, row: ArrayPlan) -> jax.Array:
        """Reduces one gradient, in the reduce dtype, into a shard."""
        total = shards.reduce(grad.astype(self.reduce_dtype), row, self.axes)
        return total.astype(row.dtype)

    def zeros(self) -> Params:
        """Returns initial sums of gradients."""

        def one(row: ArrayPlan) -> jax.Array:
            # Sums of reduced gradients are shards; unreduced sums have full size until
            # the end.
            shape_of = shards.shard_shape if self.reduces_each else shards.used_shape
            return jnp.zeros(shape_of(row, self.axes), row.dtype)

        return jax.tree.map(one, self.plan.grads)
