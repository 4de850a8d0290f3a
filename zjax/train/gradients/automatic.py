"""Gradients of the weighted mean loss over a global batch, seen as one.

The compiler adds over the devices: right for every loss, also for one that couples the
rows of a batch. `zjax.train.gradients.local` adds by hand.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from zjax.ops.keys import fold_in
from zjax.sharding.in_use import plan_in_use
from zjax.sharding.layers import put_together, take_apart
from zjax.sharding.placement import ArrayPlan, place_tree
from zjax.sharding.plan import Plan
from zjax.train.gradients import microbatches
from zjax.typing import Batch, Loss, Model, ModelState, Params


def compute_params(master: Params, plan: Plan) -> Params:
    """The parameters that the model sees: cast on their shards, then gathered.

    The cast is pinned to the shards so that the gather moves the smaller dtype.

    Args:
        master: Parameters in their logical shapes.
        plan: Places them before and after.

    Returns:
        Parameters in the compute dtype; under ZeRO 3 still split.
    """
    return jax.tree.map(param_in_use, master, plan.master, plan.compute)


def param_in_use(x: jax.Array, stored: ArrayPlan, row: ArrayPlan) -> jax.Array:
    """One parameter as the model sees it; see `compute_params`.

    Args:
        x: In its logical shape.
        stored: Its place before.
        row: Its place after.

    Returns:
        The parameter in the compute dtype.
    """
    return place_tree(place_tree(x.astype(row.dtype), stored), row)


def params_in_use(model: Model, plan: Plan, master: Params) -> Params:
    """The parameters of a step, made from the master weights.

    Args:
        model: Says whether it takes its layers apart.
        plan: Places them.
        master: Parameters in their logical shapes.

    Returns:
        Parameters in the compute dtype, with layers apart where the model takes them.
    """
    in_use = plan_in_use(model, plan)
    return compute_params(take_apart(master, in_use.master), in_use)


def whole_gradients(
    model: Model, plan: Plan, num_microbatches: int
) -> Callable[..., tuple[Params, Loss]]:
    """Builds `gradients(params, model_state, batch, key, scale) -> (grads, loss)`.

    Args:
        model: Its loss.
        plan: Places parameters, gradients and their sum.
        num_microbatches: Parts of the batch that follow one another.

    Returns:
        A pure function of the parameters in use. `grads` are of `scale` times the mean
        loss, in logical shapes and the gradient sum's dtype; the loss itself is not
        scaled.
    """
    in_use, shares = plan_in_use(model, plan), plan.num_batch_shares

    def gradients(
        params: Params, state: ModelState, batch: Batch, key: jax.Array, scale: Any
    ) -> tuple[Params, Loss]:
        batch = microbatches.cast_batch(batch, model, compute_dtype(plan))

        def one(
            state: ModelState, microbatch: Batch, key: jax.Array
        ) -> tuple[Params, Loss]:
            def scaled(params: Params) -> tuple[jax.Array, Loss]:
                result = model.loss(params, state, microbatch, key)
                counted = microbatches.counted(result.weight)
                return result.value * scale * counted, result

            grads, result = jax.grad(scaled, has_aux=True)(params)
            # Placed before the cast, so that no wider dtype crosses the devices.
            return microbatches.cast_like(pin(grads), rows), result

        def pin(grads: Params) -> Params:
            return place_tree(grads, rows)

        rows = in_use.grad_sum
        zeros = jax.tree.map(lambda row: jnp.zeros(row.shape, row.dtype), rows)
        parts = microbatches.split_batch(batch, model, num_microbatches, shares)
        grads, loss = microbatches.accumulate(one, zeros, state, parts, key, pin=pin)
        return put_together(grads), loss

    return gradients


def make_forward(
    model: Model, plan: Plan, num_microbatches: int
) -> Callable[..., Loss]:
    """Builds `forward(params, model_state, batch, key) -> Loss`, without gradients.

    Args:
        model: Its loss.
        plan: Places the parameters.
        num_microbatches: Parts of the batch that follow one another.

    Returns:
        A pure function of the parameters in use; a key of None evaluates.
    """

    def forward(
        params: Params, state: ModelState, batch: Batch, key: jax.Array | None
    ) -> Loss:
        batch = microbatches.cast_batch(batch, model, compute_dtype(plan))
        shares = plan.num_batch_shares
        parts = microbatches.split_batch(batch, model, num_microbatches, shares)

        def one(state: ModelState, inputs: Any) -> tuple[ModelState, Loss]:
            index, microbatch = inputs
            result = model.loss(params, state, microbatch, fold_in(key, index))
            microbatches.check_names(result)
            return result.model_state, result._replace(model_state=())

        state, losses = jax.lax.scan(one, state, (jnp.arange(num_microbatches), parts))
        return microbatches.mean_loss(losses, state)

    return forward


def compute_dtype(plan: Plan) -> Any:
    """The dtype in which the model runs.

    Args:
        plan: Its compute parameters.

    Returns:
        A NumPy dtype.
    """
    floating = (r.dtype for r in jax.tree.leaves(plan.compute))
    return next(d for d in floating if jnp.issubdtype(d, jnp.floating))
