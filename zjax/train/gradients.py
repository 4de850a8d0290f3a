"""Gradients of the weighted mean loss over a global batch, seen as one.

The compiler adds over the devices: right for every loss, also for one that couples the
rows of a batch. `zjax.train.shares` adds by hand.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from zjax.sharding.layers import plan_in_use, put_together, take_apart
from zjax.sharding.placement import place_tree, unpad_tree
from zjax.sharding.plan import Plan
from zjax.train import microbatches
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
    cast = microbatches.cast_like(master, plan.compute)
    return place_tree(place_tree(cast, plan.master), plan.compute)


def whole_gradients(
    model: Model, plan: Plan, num_microbatches: int
) -> Callable[..., tuple[Params, Loss]]:
    """Builds `gradients(master, model_state, batch, key, scale) -> (grads, loss)`.

    Args:
        model: Its loss.
        plan: Places parameters, gradients and their sum.
        num_microbatches: Parts of the batch that follow one another.

    Returns:
        A pure function of the stored master parameters. `grads` are of `scale` times
        the mean loss, in logical shapes and the gradient sum's dtype; the loss itself
        is not scaled.
    """
    in_use = plan_in_use(model, plan)

    def gradients(
        master: Params, state: ModelState, batch: Batch, key: jax.Array, scale: Any
    ) -> tuple[Params, Loss]:
        master = take_apart(unpad_tree(master, plan.master), in_use.master)
        params = compute_params(master, in_use)
        batch = microbatches.cast_batch(batch, compute_dtype(plan))

        def one(
            state: ModelState, microbatch: Batch, key: jax.Array
        ) -> tuple[Params, Loss]:
            def scaled(params: Params) -> tuple[jax.Array, Loss]:
                result = model.loss(params, state, microbatch, key)
                return result.value * scale, result

            grads, result = jax.grad(scaled, has_aux=True)(params)
            # Placed before the cast, so that no wider dtype crosses the devices.
            return microbatches.cast_like(pin(grads), rows), result

        def pin(grads: Params) -> Params:
            return place_tree(grads, rows)

        rows = in_use.grad_sum
        zeros = jax.tree.map(lambda row: jnp.zeros(row.shape, row.dtype), rows)
        parts = microbatches.split_batch(batch, num_microbatches, plan.num_batch_shares)
        grads, loss = microbatches.accumulate(one, zeros, state, parts, key, pin=pin)
        return put_together(grads), loss

    return gradients


def make_forward(
    model: Model, plan: Plan, num_microbatches: int
) -> Callable[..., Loss]:
    """Builds `forward(master, model_state, batch, key) -> Loss`, without gradients.

    Args:
        model: Its loss.
        plan: Places the parameters.
        num_microbatches: Parts of the batch that follow one another.

    Returns:
        A pure function; a key of None evaluates.
    """
    in_use = plan_in_use(model, plan)

    def forward(
        master: Params, state: ModelState, batch: Batch, key: jax.Array | None
    ) -> Loss:
        params = compute_params(take_apart(master, in_use.master), in_use)
        batch = microbatches.cast_batch(batch, compute_dtype(plan))
        parts = microbatches.split_batch(batch, num_microbatches, plan.num_batch_shares)

        def one(state: ModelState, inputs: Any) -> tuple[ModelState, Loss]:
            index, microbatch = inputs
            step_key = None if key is None else jax.random.fold_in(key, index)
            result = model.loss(params, state, microbatch, step_key)
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
