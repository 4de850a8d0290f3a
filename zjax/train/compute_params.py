"""Compute parameters, made from master weights."""

from typing import Any

import jax
import jax.numpy as jnp

from zjax.sharding.layers import take_apart
from zjax.sharding.placement import ArrayPlan, place_tree
from zjax.sharding.plan import Plan
from zjax.sharding.program_plan import layerwise_plan
from zjax.typing import Model, Params


def compute_params(master: Params, plan: Plan) -> Params:
    """Casts master weights on their shards, then gathers them.

    The cast is pinned to the shards so that the gather moves the smaller dtype.

    Args:
        master: Parameters in their logical shapes.
        plan: Places them before and after.

    Returns:
        Parameters in the compute dtype; under ZeRO 3 still split.
    """
    return jax.tree.map(compute_param, master, plan.master, plan.compute)


def compute_param(x: jax.Array, stored: ArrayPlan, row: ArrayPlan) -> jax.Array:
    """`compute_params` of one array in its logical shape."""
    return place_tree(place_tree(x.astype(row.dtype), stored), row)


def compute_params_by_layer(model: Model, plan: Plan, master: Params) -> Params:
    """`compute_params`, with one array per layer for models that take these."""
    layerwise = layerwise_plan(model, plan)
    return compute_params(take_apart(master, layerwise.master), layerwise)


def compute_dtype(plan: Plan) -> Any:
    """The NumPy dtype of compute parameters, except of those that stay float32."""
    dtypes = (r.dtype for r in jax.tree.leaves(plan.compute))
    floating = (d for d in dtypes if jnp.issubdtype(d, jnp.floating))
    return min(floating, key=lambda dtype: dtype.itemsize)


def cast_like(tree: Any, rows: Any) -> Any:
    """Casts each array to the dtype of its plan, in a tree of the same structure."""
    return jax.tree.map(lambda x, row: x.astype(row.dtype), tree, rows)
