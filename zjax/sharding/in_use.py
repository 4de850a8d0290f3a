"""The plan as programs see it: layers apart, and all of it on the devices."""

import dataclasses
from typing import Any

import jax

from zjax.sharding.layers import layer_by_layer
from zjax.sharding.plan import DEVICE, Plan
from zjax.typing import Model


def plan_in_use(model: Model, plan: Plan) -> Plan:
    """The plan of what a model computes with, where layers may have their own rows.

    Args:
        model: Says whether it takes its layers apart.
        plan: Places every array as it is stored.

    Returns:
        The same placements, layer by layer; `plan` itself for other models.
    """
    if not model.takes_layers_apart:
        return plan
    # What is too small to be split is added at the end, all layers at once.
    split = jax.tree.map(
        lambda row: row.num_layers > 0 and (any(row.spec) or not plan.splits.state),
        plan.master,
    )

    def rows_of(rows: Any) -> Any:
        return jax.tree.map(
            lambda row, is_apart: layer_by_layer(row) if is_apart else row, rows, split
        )

    return dataclasses.replace(
        plan,
        master=rows_of(plan.master),
        compute=rows_of(plan.compute),
        grad_sum=rows_of(plan.grad_sum),
        grads=rows_of(plan.grads),
    )


def plan_on_device(plan: Plan) -> Plan:
    """The plan of what passes through the devices.

    Args:
        plan: Places every array as it rests.

    Returns:
        The same placements, all in the memory of the devices.
    """

    def on_device(rows: Any) -> Any:
        return jax.tree.map(lambda row: row.rest_in(DEVICE), rows)

    return dataclasses.replace(
        plan,
        master=on_device(plan.master),
        compute=on_device(plan.compute),
        opt_state=on_device(plan.opt_state),
    )
