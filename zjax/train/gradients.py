"""Gradients of the weighted mean loss over a global batch, one microbatch at a time."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from zjax.errors import PlanError, Problem
from zjax.sharding.mesh import BATCH_AXES
from zjax.sharding.placement import path_of, place_tree
from zjax.sharding.plan import Plan
from zjax.typing import Batch, Loss, ModelState, Params


def compute_params(master: Params, plan: Plan) -> Params:
    """The parameters that the model sees: cast on their shards, then gathered.

    The cast is pinned to the shards so that the gather moves the smaller dtype.

    Args:
        master: Parameters in their logical shapes.
        plan: Places them before and after.

    Returns:
        Parameters in the compute dtype; under ZeRO 3 still split.
    """
    cast = jax.tree.map(lambda x, row: x.astype(row.dtype), master, plan.compute)
    return place_tree(place_tree(cast, plan.master), plan.compute)


def split_batch(batch: Batch, num_microbatches: int, num_shares: int) -> Batch:
    """Cuts each device's own share of a batch into microbatches.

    Args:
        batch: Arrays [B, ...]; scalars are repeated.
        num_microbatches: Parts, 1 or more.
        num_shares: Devices along the batch dim.

    Returns:
        Arrays [N, B / N, ...]; no row leaves its device.

    Raises:
        PlanError: B does not divide.

    Example:
        >>> split_batch(jnp.arange(8), 2, 2).tolist()
        [[0, 1, 4, 5], [2, 3, 6, 7]]
    """

    def split(x: jax.Array) -> jax.Array:
        if x.ndim == 0:
            return jnp.broadcast_to(x, (num_microbatches,))
        rows = (num_shares, num_microbatches, x.shape[0] // parts)
        cut = x.reshape(*rows, *x.shape[1:]).swapaxes(0, 1)
        return cut.reshape(num_microbatches, -1, *x.shape[1:])

    parts = num_shares * num_microbatches
    check_batch(batch, num_microbatches, num_shares)
    return jax.tree.map(split, batch)


def check_batch(batch: Batch, num_microbatches: int, num_shares: int) -> None:
    """Refuses a batch that cannot be cut into equal parts.

    Args:
        batch: Arrays or their shapes.
        num_microbatches: Parts that follow one another.
        num_shares: Parts that run side by side.

    Raises:
        PlanError: Names every array whose first dim does not divide.
    """
    parts = num_shares * num_microbatches
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    problems = [
        Problem(
            f"batch/{path_of(keys)}",
            leaf.shape,
            f"does not divide over {num_shares} shares of {num_microbatches} "
            "microbatches",
            f"use a multiple of {parts} as its first dim",
        )
        for keys, leaf in leaves
        if leaf.ndim and leaf.shape[0] % parts
    ]
    if problems:
        raise PlanError(*problems)


def mean_loss(losses: Loss, model_state: ModelState) -> Loss:
    """Weighted mean of stacked microbatch losses.

    Args:
        losses: Loss whose leaves are stacked [N].
        model_state: The state after the last microbatch.

    Returns:
        One loss; 0 where all weights are 0.
    """
    total = jnp.sum(losses.weight)
    shares = losses.weight / jnp.where(total == 0, 1, total)

    def mean(x: jax.Array) -> jax.Array:
        return jnp.sum(shares * jnp.where(shares == 0, 0, x))

    metrics = jax.tree.map(mean, losses.metrics)
    return Loss(mean(losses.value), total, model_state, metrics)


def make_gradients(
    loss: Callable[..., Loss],
    plan: Plan,
    num_microbatches: int,
    *,
    local: bool = False,
) -> Callable[..., tuple[Params, Loss]]:
    """Builds `gradients(master, model_state, batch, key, scale) -> (grads, loss)`.

    Args:
        loss: `Model.loss`.
        plan: Places parameters, gradients and their sum.
        num_microbatches: Parts of the batch that follow one another.
        local: Whether each share of the batch has a gradient of its own, to be reduced
            in the gradient sum's dtype; otherwise the compiler reduces in the compute
            dtype.

    Returns:
        A pure function. `grads` are of `scale` times the mean loss, in the gradient
        sum's dtype; the loss itself is not scaled.
    """
    differentiate = (
        local_gradients(loss, plan) if local else whole_gradients(loss, plan)
    )

    def one(*args: Any) -> tuple[Params, Loss]:
        grads, result = differentiate(*args)
        # Placed before the cast, so that no wider dtype crosses the devices.
        return _cast_like(place_tree(grads, plan.grad_sum), plan.grad_sum), result

    def gradients(
        master: Params, state: ModelState, batch: Batch, key: jax.Array, scale: Any
    ) -> tuple[Params, Loss]:
        params = compute_params(master, plan)
        batch = cast_batch(batch, compute_dtype(plan))
        if num_microbatches == 1:
            check_batch(batch, 1, plan.num_batch_shares)
            return one(params, state, batch, jax.random.fold_in(key, 0), scale)

        def add(carry: Any, inputs: Any) -> Any:
            total, state = carry
            index, microbatch = inputs
            step_key = jax.random.fold_in(key, index)
            grads, result = one(params, state, microbatch, step_key, scale)
            total = jax.tree.map(
                lambda t, g: t + _scaled(g, result.weight), total, grads
            )
            total = place_tree(total, plan.grad_sum)
            return (total, result.model_state), result._replace(model_state=())

        zeros = jax.tree.map(lambda row: jnp.zeros(row.shape, row.dtype), plan.grad_sum)
        parts = split_batch(batch, num_microbatches, plan.num_batch_shares)
        inputs = (jnp.arange(num_microbatches), parts)
        start = (place_tree(zeros, plan.grad_sum), state)
        (total, state), losses = jax.lax.scan(add, start, inputs)
        result = mean_loss(losses, state)
        inverse = 1 / jnp.where(result.weight == 0, 1, result.weight)
        return jax.tree.map(lambda t: _scaled(t, inverse), total), result

    return gradients


def whole_gradients(
    loss: Callable[..., Loss], plan: Plan
) -> Callable[..., tuple[Params, Loss]]:
    """Gradients of a microbatch seen as one: the compiler adds over devices.

    Args:
        loss: `Model.loss`.
        plan: Not needed; the same arguments as `local_gradients`.

    Returns:
        `f(params, model_state, batch, key, scale) -> (grads, loss)`.
    """

    def differentiate(
        params: Params, state: ModelState, batch: Batch, key: jax.Array, scale: Any
    ) -> tuple[Params, Loss]:
        def scaled(params: Params) -> tuple[jax.Array, Loss]:
            result = loss(params, state, batch, key)
            return result.value * scale, result

        return jax.grad(scaled, has_aux=True)(params)

    return differentiate


def local_gradients(
    loss: Callable[..., Loss], plan: Plan
) -> Callable[..., tuple[Params, Loss]]:
    """Gradients of each share of a microbatch on its own, added in the sum's dtype.

    A loss that couples the batch, such as BatchNorm, sees only its share; the model
    states of the shares are averaged. Random keys differ by share.

    Args:
        loss: `Model.loss`.
        plan: Names the axes of the batch and the dtype of the sum.

    Returns:
        `f(params, model_state, batch, key, scale) -> (grads, loss)`.
    """
    axes = tuple(axis for axis in BATCH_AXES if plan.mesh.shape[axis] > 1)
    differentiate = whole_gradients(loss, plan)

    def share(
        params: Params, state: ModelState, batch: Batch, key: jax.Array, scale: Any
    ) -> tuple[Params, Loss]:
        key = jax.random.fold_in(key, jax.lax.axis_index(axes)) if axes else key
        grads, result = differentiate(params, state, batch, key, scale)
        grads = _cast_like(grads, plan.grad_sum)
        grads = jax.tree.map(lambda g: _scaled(g, result.weight), grads)
        return jax.tree.map(lambda x: x[None], (grads, result))

    def differentiate_shares(
        params: Params, state: ModelState, batch: Batch, key: jax.Array, scale: Any
    ) -> tuple[Params, Loss]:
        by_row = jax.tree.map(lambda x: P(axes) if x.ndim else P(), batch)
        shares = jax.shard_map(
            share,
            mesh=plan.mesh,
            in_specs=(P(), P(), by_row, P(), P()),
            out_specs=P(axes),
            axis_names=set(axes),
            check_vma=False,
        )
        grads, results = shares(params, state, batch, key, scale)
        result = mean_loss(results, jax.tree.map(_mean_state, results.model_state))
        inverse = 1 / jnp.where(result.weight == 0, 1, result.weight)
        return jax.tree.map(lambda g: _scaled(g.sum(0), inverse), grads), result

    return differentiate_shares if axes else differentiate


def make_forward(
    loss: Callable[..., Loss], plan: Plan, num_microbatches: int
) -> Callable[..., Loss]:
    """Builds `forward(master, model_state, batch, key) -> Loss`, without gradients.

    Args:
        loss: `Model.loss`.
        plan: Places the parameters.
        num_microbatches: Parts of the batch that follow one another.

    Returns:
        A pure function; a key of None evaluates.
    """

    def forward(
        master: Params, state: ModelState, batch: Batch, key: jax.Array | None
    ) -> Loss:
        params = compute_params(master, plan)
        batch = cast_batch(batch, compute_dtype(plan))
        parts = split_batch(batch, num_microbatches, plan.num_batch_shares)

        def one(state: ModelState, inputs: Any) -> tuple[ModelState, Loss]:
            index, microbatch = inputs
            step_key = None if key is None else jax.random.fold_in(key, index)
            result = loss(params, state, microbatch, step_key)
            return result.model_state, result._replace(model_state=())

        state, losses = jax.lax.scan(one, state, (jnp.arange(num_microbatches), parts))
        return mean_loss(losses, state)

    return forward


def cast_batch(batch: Batch, dtype: Any) -> Batch:
    """Gives inputs the dtype of the model, so that it computes in that.

    Args:
        batch: Arrays; integers, and numbers per row or per batch, stay as they are.
        dtype: Compute dtype.

    Returns:
        Floating-point arrays of two dims or more in `dtype`.

    Example:
        >>> batch = {"x": jnp.ones((2, 3)), "weight": jnp.ones(2)}
        >>> {name: str(x.dtype) for name, x in cast_batch(batch, jnp.bfloat16).items()}
        {'weight': 'float32', 'x': 'bfloat16'}
    """

    def cast(x: jax.Array) -> jax.Array:
        is_input = x.ndim >= 2 and jnp.issubdtype(x.dtype, jnp.floating)
        return x.astype(dtype) if is_input else x

    return jax.tree.map(cast, batch)


def compute_dtype(plan: Plan) -> Any:
    """The dtype in which the model runs.

    Args:
        plan: Its compute parameters.

    Returns:
        A NumPy dtype.
    """
    floating = (r.dtype for r in jax.tree.leaves(plan.compute))
    return next(d for d in floating if jnp.issubdtype(d, jnp.floating))


def _mean_state(x: jax.Array) -> jax.Array:
    floating = jnp.issubdtype(x.dtype, jnp.floating)
    return x.mean(0, dtype=jnp.float32).astype(x.dtype) if floating else x[0]


def _cast_like(tree: Any, rows: Any) -> Any:
    return jax.tree.map(lambda x, row: x.astype(row.dtype), tree, rows)


def _scaled(x: jax.Array, factor: jax.Array) -> jax.Array:
    # A share without weight adds nothing, even where its mean is 0 / 0.
    return jnp.where(factor == 0, 0, x * factor.astype(x.dtype))
