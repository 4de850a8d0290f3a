"""The parameters that a model computes with, made from the master weights."""

from typing import Any

import jax
import jax.numpy as jnp

from zjax.sharding.in_use import plan_in_use
from zjax.sharding.layers import take_apart
from zjax.sharding.placement import ArrayPlan, place_tree
from zjax.sharding.plan import Plan
from zjax.typing import Model, Params


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


def compute_dtype(plan: Plan) -> Any:
    """The dtype in which the model runs.

    Args:
        plan: Its compute parameters.

    Returns:
        A NumPy dtype.
    """
    floating = (r.dtype for r in jax.tree.leaves(plan.compute))
    return next(d for d in floating if jnp.issubdtype(d, jnp.floating))


def cast_like(tree: Any, rows: Any) -> Any:
    """Casts each array to the dtype of its row.

    Args:
        tree: Arrays.
        rows: A tree of `ArrayPlan` of the same structure.

    Returns:
        The same values as far as the dtypes hold them.
    """
    return jax.tree.map(lambda x, row: x.astype(row.dtype), tree, rows)
