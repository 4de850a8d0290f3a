"""Compute parameters, made from master weights, and split master weights."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from zjax.ops.weights import join_bits, low_bits
from zjax.sharding.layers import take_apart
from zjax.sharding.placement import ArrayPlan, Form, pad, place_tree, unpad
from zjax.sharding.plan import Plan, layerwise_plan
from zjax.sharding.roles import trained
from zjax.typing import Model, Params


def join_master(stored: Params, params: Any, plan: Plan) -> Params:
    """Returns master weights as the optimizer updates them, in stored shapes.

    `params` are the compute parameters, which hold the high bits; an empty tuple if no
    array is split.
    """
    if not plan.splits_master:
        return stored
    return jax.tree.map(join_param, stored, plan.master, params, plan.compute)


def join_param(
    x: jax.Array, row: ArrayPlan, high: jax.Array, compute: ArrayPlan
) -> jax.Array:
    """Applies `join_master` to one array."""
    if row.form is Form.PLAIN:
        return x
    # The high bits are placed like compute parameters; the bits join on master shards.
    return join_bits(pad(place_tree(unpad(high, compute), row), row), x)


def computed_once(x: jax.Array, row: ArrayPlan) -> jax.Array:
    """Puts a barrier behind an array if both high and low bits are used.

    A compiler may recompute a number for each use, and round each result differently.
    """
    return x if row.form is Form.PLAIN else jax.lax.optimization_barrier(x)


def stored_master(x: Any, row: ArrayPlan) -> Any:
    """Returns an array of master weights as `row` stores it: whole, or the low bits."""
    return x if row.form is Form.PLAIN else low_bits(x)


def high_bits(params: Any, plan: Plan) -> Any:
    """Selects the compute parameters that hold the high bits of split master weights.

    None for all other parameters; an empty tuple if no array is split.
    """
    if not plan.splits_master:
        return ()
    rows, params = (trained(x, plan.master) for x in (plan.master, params))
    return jax.tree.map(
        lambda row, x: None if row.form is Form.PLAIN else x, rows, params
    )


def unsplit_plans(rows: Any) -> Any:
    """Returns plans of master weights as the optimizer updates each, not split."""
    return jax.tree.map(lambda row: dataclasses.replace(row, form=Form.PLAIN), rows)


def compute_params(master: Params, plan: Plan) -> Params:
    """Casts master weights in logical shapes on the shards, then gathers the results.

    The cast is pinned to the shards so that the gather moves the smaller dtype. At ZeRO
    stage 3 the results stay sharded.
    """
    return jax.tree.map(compute_param, master, plan.master, plan.compute)


def compute_param(x: jax.Array, stored: ArrayPlan, row: ArrayPlan) -> jax.Array:
    """Applies `compute_params` to one array in the logical shape."""
    return place_tree(place_tree(x.astype(row.dtype), stored), row)


def compute_params_by_layer(model: Model, plan: Plan, master: Params) -> Params:
    """Applies `compute_params` by layer, for models that take layers apart."""
    layerwise = layerwise_plan(model, plan)
    return compute_params(take_apart(master, layerwise.master), layerwise)


def compute_dtype(plan: Plan) -> Any:
    """Returns the smallest floating dtype of the compute parameters."""
    dtypes = (r.dtype for r in jax.tree.leaves(plan.compute))
    floating = (d for d in dtypes if jnp.issubdtype(d, jnp.floating))
    # Parameters that stay float32 do not set the compute dtype.
    return min(floating, key=lambda dtype: dtype.itemsize)


def cast_like(tree: Any, rows: Any) -> Any:
    """Casts each array to the dtype in the plan, in a tree of equal structure."""
    return jax.tree.map(lambda x, row: x.astype(row.dtype), tree, rows)
