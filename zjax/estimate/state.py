"""Bytes per device of the state of a step on a mesh, without devices."""

import dataclasses
import math
from typing import Any

import jax

from zjax.estimate.tables import kept_rows
from zjax.settings import axes, schema
from zjax.settings.batch import BatchSizes, resolve_batch
from zjax.sharding import memory
from zjax.sharding import mesh as meshes
from zjax.sharding.plan import Plan, make_plan
from zjax.sharding.roles import trained
from zjax.sharding.zero import splits_of
from zjax.typing import Model


def state_bytes(config: schema.Config, model: Model, tx: Any) -> int | float:
    """Counts the bytes per device of state, gradients and gathered parameters.

    All sizes of the mesh of `config` are 1 or more.
    """
    return working_bytes(abstract_plan(config, model, tx), config, model, tx)


def working_bytes(
    plan: Plan, config: schema.Config, model: Model, tx: Any
) -> int | float:
    """Counts the bytes of `state_bytes` by the plan of the run."""
    number = batch_on(config, config.mesh)
    return (
        _state_bytes(plan, config, number.num_microbatches)
        + _gradient_buffer_bytes(plan, number.num_microbatches)
        + _gathered_bytes(config, model, tx)
    )


def abstract_plan(config: schema.Config, model: Model, tx: Any) -> Plan:
    """Plans a run on an abstract mesh, whose sizes in `config` are all 1 or more."""
    number = math.prod(getattr(config.mesh, axis) for axis in axes.AXES)
    return make_plan(config, meshes.abstract_mesh(config.mesh, number), model, tx)


def batch_on(config: schema.Config, mesh: schema.Mesh) -> BatchSizes:
    """Batch sizes of a run on a mesh with sizes of 1 or more."""
    shares = math.prod(getattr(mesh, axis) for axis in axes.BATCH_AXES)
    return resolve_batch(config, shares)


def _state_bytes(
    plan: Plan, config: schema.Config, num_microbatches: int
) -> int | float:
    """Bytes of parameters, gradients and optimizer state on a device during a step."""
    if plan.is_offloaded:
        gradients = memory.stored_gradients(plan, config.zero, num_microbatches)
        on_device = memory.bytes_by_memory(gradients).device
        return memory.stored_bytes(plan).device + on_device
    state = memory.plan_bytes(plan, kept_rows(plan, config))
    # A single microbatch needs no sum: gradients are reduced to the optimizer's shards.
    grads = plan.grad_sum if num_microbatches > 1 else plan.grads
    return state.parameters + state.optimizer + memory.tree_bytes(grads)


def _gradient_buffer_bytes(plan: Plan, num_microbatches: int) -> int:
    """Bytes of gradients beside the sum; a pipeline also copies parameters and sums."""
    params, sums = map(memory.tree_bytes, (plan.compute, plan.grad_sum))
    grads = memory.tree_bytes(trained(plan.compute, plan.master))
    if plan.mesh.shape[meshes.PIPELINE] > 1:
        return params + grads + sums
    reduces_at_end = not plan.splits.grad_sum and num_microbatches > 1
    return grads if reduces_at_end and not plan.is_offloaded else 0


def _gathered_bytes(config: schema.Config, model: Model, tx: Any) -> int | float:
    """Bytes of one gathered block and the largest table, with gradients."""
    zero = config.zero
    if not (zero.offloads_blocks or splits_of(zero.stage).compute):
        return 0
    # The plan of ZeRO 2 has the gathered sizes: compute parameters are unsharded.
    gathered = dataclasses.replace(config, zero=schema.Zero(stage=2))
    plan = abstract_plan(gathered, model, tx)
    grads = trained(plan.compute, plan.master)
    if model.stack is None:  # gathered at once
        return memory.tree_bytes(plan.compute) + memory.tree_bytes(grads)
    split = model.stack.split
    segments = zip(split(plan.compute)[1], split(grads)[1], strict=True)
    blocks = [
        sum(x.device_bytes / x.num_layers for x in jax.tree.leaves(both))
        for both in segments
    ]
    have_grads = {row.path for row in jax.tree.leaves(grads)}
    tables = [
        row.device_bytes * (1 + (row.path in have_grads))
        for row in jax.tree.leaves(plan.compute)
        if not row.num_layers
    ]
    return max(blocks) + max(tables)
