"""Bytes per device that a step takes on a mesh, by abstract tracing, without devices.

Measured peaks of data-parallel GPUs lie up to a tenth below. The buffers of pipeline
stages follow programs compiled for CPUs and were not measured on GPUs.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax

from zjax.estimate.activations import activation_bytes
from zjax.estimate.tables import DEVICE_SHARE, kept_rows
from zjax.settings import axes, schema
from zjax.settings.batch import BatchSizes, resolve_batch
from zjax.sharding import memory
from zjax.sharding import mesh as meshes
from zjax.sharding.plan import Plan, make_plan
from zjax.sharding.roles import trained
from zjax.sharding.zero import splits_of
from zjax.typing import Model


@dataclasses.dataclass(frozen=True)
class Machine:
    """The devices that a mesh is proposed for.

    Args:
        num_devices: Devices of the run over all hosts.
        devices_per_host: Devices joined by fast links.
        device_bytes: Memory of one device in bytes; infinite if unknown.
    """

    num_devices: int
    devices_per_host: int
    device_bytes: int | float

    @property
    def usable_bytes(self) -> int | float:
        """Bytes of a device that a predicted step may take."""
        return DEVICE_SHARE * self.device_bytes


@dataclasses.dataclass(frozen=True)
class Trial:
    """A mesh that was tried, with the bytes of a step.

    Args:
        mesh: Mesh that was tried; all sizes are 1 or more.
        state: Bytes per device of parameters, gradients and optimizer state.
        activations: Bytes per device of activations.
        of_one: Bytes per device of activations with microbatches of one sequence.
        obstacle: Reason why the mesh cannot work, with bytes of 0; or empty.
    """

    mesh: schema.Mesh
    state: int | float = 0
    activations: int | float = 0
    of_one: int | float = 0
    obstacle: str = ""

    @property
    def total(self) -> int | float:
        """Bytes per device of state and activations."""
        return self.state + self.activations

    def fits(self, machine: Machine) -> bool:
        """Whether the mesh has no obstacle and a step fits on each device."""
        return not self.obstacle and self.total <= machine.usable_bytes


def weigh(
    config: schema.Config,
    mesh: schema.Mesh,
    model: Model,
    tx: Any,
    count_rows: Callable[[int, schema.Mesh], float] | None = None,
) -> Trial:
    """Counts the bytes per device that a step takes on a mesh.

    `count_rows` counts the activations of a model of the user, as `row_bytes` does.
    """
    config = dataclasses.replace(config, mesh=mesh)
    sizes = {axis: getattr(mesh, axis) for axis in axes.AXES}
    batch = batch_on(config, mesh)

    def activations(batch: BatchSizes) -> float:
        if count_rows is None:
            return activation_bytes(config, sizes, batch, model)
        return count_rows(batch.microbatch_size, mesh)

    one = dataclasses.replace(batch, microbatch_size=1)
    state = state_bytes(config, model, tx)
    return Trial(mesh, state, activations(batch), activations(one))


def state_bytes(config: schema.Config, model: Model, tx: Any) -> int | float:
    """Counts the bytes per device of state, gradients and gathered parameters.

    All sizes of the mesh of `config` are 1 or more.
    """
    plan, number = _plan(config, model, tx), batch_on(config, config.mesh)
    return (
        _state_bytes(plan, config, number.num_microbatches)
        + _gradient_buffer_bytes(plan, number.num_microbatches)
        + _gathered_bytes(config, model, tx)
    )


def _plan(config: schema.Config, model: Model, tx: Any) -> Plan:
    """Plan of a run on an abstract mesh, without devices."""
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
    plan = _plan(gathered, model, tx)
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
