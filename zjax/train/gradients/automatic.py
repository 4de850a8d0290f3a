"""Gradients of the weighted mean loss over a global batch, reduced by the compiler.

This is right for every loss, including one that couples the rows of a batch.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from zjax.ops.keys import fold_in
from zjax.sharding.frozen import joined, trained
from zjax.sharding.layers import put_together
from zjax.sharding.placement import place_tree
from zjax.sharding.plan import Plan
from zjax.sharding.program_plan import layerwise_plan
from zjax.train.compute_params import cast_like, compute_dtype
from zjax.train.gradients import microbatches, weighting
from zjax.typing import Batch, Loss, Model, ModelState, Params


@dataclasses.dataclass(frozen=True)
class AutomaticGradients:
    """Pure functions of the compute parameters.

    Args:
        model: Its loss.
        plan: Places parameters, gradients and their sum.
        num_microbatches: Gradient accumulation, 1 or more.
    """

    model: Model
    plan: Plan
    num_microbatches: int

    def gradients(
        self,
        params: Params,
        state: ModelState,
        batch: Batch,
        key: jax.Array,
        scale: Any,
    ) -> tuple[Params, Loss]:
        """Gradients of `scale` times the mean loss.

        Args:
            params: Parameters in the compute dtype and their logical shapes.
            state: The model state before the first microbatch.
            batch: The global batch.
            key: Folded with the number of each microbatch.
            scale: float32[], the loss scale.

        Returns:
            Gradients in logical shapes and the dtype of the gradient sum, None for
            frozen parameters; and the loss, which is not scaled.
        """
        rows = layerwise_plan(self.model, self.plan).grad_sum

        def pin(grads: Params) -> Params:
            return place_tree(grads, rows)

        def one(
            state: ModelState, microbatch: Batch, key: jax.Array
        ) -> tuple[Params, Loss]:
            grads, result = self.differentiate(params, state, microbatch, key, scale)
            return pin(grads), result

        zeros = jax.tree.map(lambda row: jnp.zeros(row.shape, row.dtype), rows)
        grads, loss = weighting.accumulate(
            one, zeros, state, self.split(batch), key, pin=pin
        )
        # Placed and stacked before the cast, so that the smaller dtype is moved.
        return cast_like(put_together(grads), self.plan.grad_sum), loss

    def differentiate(
        self,
        params: Params,
        state: ModelState,
        microbatch: Batch,
        key: jax.Array,
        scale: Any,
    ) -> tuple[Params, Loss]:
        """The same for one microbatch, with gradients that are not placed yet."""
        rows = layerwise_plan(self.model, self.plan).master

        def scaled(learned: Params) -> tuple[jax.Array, Loss]:
            used = joined(learned, params, rows)
            result = self.model.loss(used, state, microbatch, key)
            counted = weighting.counted(result.weight)
            return result.value * scale * counted, result

        return jax.grad(scaled, has_aux=True)(trained(params, rows))

    def loss(
        self, params: Params, state: ModelState, batch: Batch, key: jax.Array | None
    ) -> Loss:
        """The mean loss, without gradients.

        Args:
            params: Parameters in the compute dtype and their logical shapes.
            state: The model state before the first microbatch.
            batch: The global batch.
            key: Folded with the number of each microbatch; None evaluates.

        Returns:
            The loss, with the model state after the last microbatch.
        """

        def one(state: ModelState, inputs: Any) -> tuple[ModelState, Loss]:
            index, microbatch = inputs
            result = self.model.loss(params, state, microbatch, fold_in(key, index))
            weighting.check_names(result)
            return result.model_state, result._replace(model_state=())

        inputs = jnp.arange(self.num_microbatches), self.split(batch)
        state, losses = jax.lax.scan(one, state, inputs)
        return weighting.mean_loss(losses, state)

    def split(self, batch: Batch) -> Batch:
        """Microbatches, stacked, with inputs in the compute dtype."""
        batch = microbatches.cast_batch(batch, self.model, compute_dtype(self.plan))
        number, shares = self.num_microbatches, self.plan.num_batch_shares
        return microbatches.split_batch(batch, self.model, number, shares)
