"""Compute parameters, made from master weights, which may be stored split."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from zjax.optim.precision import join_bits, low_bits
from zjax.sharding.frozen import trained
from zjax.sharding.layers import take_apart
from zjax.sharding.placement import ArrayPlan, Form, pad, place_tree, unpad
from zjax.sharding.plan import Plan
from zjax.sharding.program_plan import layerwise_plan
from zjax.typing import Model, Params


def join_master(stored: Params, params: Any, plan: Plan) -> Params:
    """Master weights as the optimizer updates them, in their stored shapes."""
    if not plan.splits_master:
        return stored
    return jax.tree.map(join_param, stored, plan.master, params, plan.compute)


def join_param(
    x: jax.Array, row: ArrayPlan, high: jax.Array, compute: ArrayPlan
) -> jax.Array:
    """`join_master` of one array."""
    if row.form is Form.PLAIN:
        return x
    return join_bits(pad(place_tree(unpad(high, compute), row), row), x)


def computed_once(x: jax.Array, row: ArrayPlan) -> jax.Array:
    """The same array, computed once if both its high and its low bits are used.

    A compiler may compute a number again for each use, and round it differently.
    """
    return x if row.form is Form.PLAIN else jax.lax.optimization_barrier(x)


def stored_master(x: Any, row: ArrayPlan) -> Any:
    """Master weights as `row` stores them: the array, or its low bits."""
    return x if row.form is Form.PLAIN else low_bits(x)


def high_bits(params: Any, plan: Plan) -> Any:
    """Compute parameters that hold the high bits of split master weights."""
    if not plan.splits_master:
        return ()
    rows, params = (trained(x, plan.master) for x in (plan.master, params))
    return jax.tree.map(
        lambda row, x: None if row.form is Form.PLAIN else x, rows, params
    )


def unsplit_plans(rows: Any) -> Any:
    """Plans of master weights as the optimizer updates them, not split into bits."""
    return jax.tree.map(lambda row: dataclasses.replace(row, form=Form.PLAIN), rows)


def compute_params(master: Params, plan: Plan) -> Params:
    """Casts master weights on their shards, then gathers them.

    The cast is pinned to the shards so that the gather moves the smaller dtype.
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
