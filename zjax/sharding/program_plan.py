"""The plan as programs see it: one array per layer, and all arrays on the devices."""

import dataclasses
from typing import Any

import jax

from zjax.sharding.layers import layer_by_layer
from zjax.sharding.plan import Plan
from zjax.sharding.roles import trained
from zjax.typing import Model


def layerwise_plan(model: Model, plan: Plan) -> Plan:
    """Plans each layer of a stacked array apart, if the model takes layers apart.

    A stack becomes `Layers` if ZeRO shards it, or if no gradient is reduced over
    devices.
    """
    if not model.takes_layers_apart:
        return plan
    # Gradients of unsharded stacks are reduced at the end, in one collective per stack.
    is_whole = plan.splits.state and plan.num_batch_shares > 1
    is_apart = jax.tree.map(
        lambda row: row.num_layers > 0 and (any(row.spec) or not is_whole),
        plan.master,
    )

    def by_layer(rows: Any, is_apart: Any = is_apart) -> Any:
        return jax.tree.map(
            lambda row, apart: layer_by_layer(row) if apart else row, rows, is_apart
        )

    is_trained_apart = trained(is_apart, plan.master)

    return dataclasses.replace(
        plan,
        master=by_layer(plan.master),
        compute=by_layer(plan.compute),
        grad_sum=by_layer(plan.grad_sum, is_trained_apart),
        grads=by_layer(plan.grads, is_trained_apart),
    )


def trained_plan(plan: Plan) -> Plan:
    """Plan of an update: frozen parameters are None in all trees."""
    master, compute = (trained(x, plan.master) for x in (plan.master, plan.compute))
    return dataclasses.replace(plan, master=master, compute=compute)


def staged_plan(plan: Plan) -> Plan:
    """Plan of the device copies of offloaded state."""

    def on_device(rows: Any) -> Any:
        return jax.tree.map(lambda row: row.on_device, rows)

    return dataclasses.replace(
        plan,
        master=on_device(plan.master),
        compute=on_device(plan.compute),
        opt_state=on_device(plan.opt_state),
    )
