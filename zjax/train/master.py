"""Master weights: whole where the optimizer sees them, perhaps in halves at rest."""

import dataclasses
from typing import Any

import jax

from zjax.optim.split_master import join_bits, low_bits
from zjax.sharding.placement import ArrayPlan, Form, pad, place_tree, unpad
from zjax.sharding.plan import Plan
from zjax.typing import Params


def whole_master(stored: Params, params: Any, plan: Plan) -> Params:
    """The master weights as the optimizer sees them.

    Args:
        stored: On the devices; of some perhaps the lower half.
        params: Parameters in use, whose arrays are the upper halves; may be empty where
            no array is in halves.
        plan: Places both.

    Returns:
        Arrays in their stored shapes, traced by `jit`.
    """
    if not plan.splits_master:
        return stored
    return jax.tree.map(join, stored, plan.master, params, plan.compute)


def join(
    x: jax.Array, row: ArrayPlan, upper: jax.Array, in_use: ArrayPlan
) -> jax.Array:
    """One array of `whole_master`.

    Args:
        x: Stored, on the devices.
        row: Its place.
        upper: The same parameter in use.
        in_use: Its place.

    Returns:
        The array in its stored shape.
    """
    if row.form is Form.PLAIN:
        return x
    return join_bits(pad(place_tree(unpad(upper, in_use), row), row), x)


def computed_once(x: jax.Array, row: ArrayPlan) -> jax.Array:
    """Master weights of which both halves are taken.

    A compiler may compute a number again for each of its uses, and round it otherwise.

    Args:
        x: New, traced by `jit`.
        row: Its place.

    Returns:
        The same numbers.
    """
    return x if row.form is Form.PLAIN else jax.lax.optimization_barrier(x)


def half_at_rest(x: Any, row: ArrayPlan) -> Any:
    """What is stored of master weights: all, or the half that is not in use.

    Args:
        x: Of JAX or NumPy, in the dtype that the mathematics sees.
        row: Its place.

    Returns:
        An array in the dtype in which `row` stores it.
    """
    return x if row.form is Form.PLAIN else low_bits(x)


def upper_halves(params: Any, plan: Plan) -> Any:
    """The parameters in use, or their places, that are halves of the master weights.

    Args:
        params: A tree of one leaf for each parameter; may be empty where no array is in
            halves.
        plan: Places the master weights.

    Returns:
        A tree with None in place of all others; empty where there are only others.
    """
    if not plan.splits_master:
        return ()
    return jax.tree.map(
        lambda row, x: None if row.form is Form.PLAIN else x, plan.master, params
    )


def whole_rows(rows: Any) -> Any:
    """The places of master weights as the optimizer sees them.

    Args:
        rows: A tree of `ArrayPlan`; of some perhaps those of split master weights.

    Returns:
        A tree of `ArrayPlan` of whole arrays.
    """
    return jax.tree.map(lambda row: dataclasses.replace(row, form=Form.PLAIN), rows)
