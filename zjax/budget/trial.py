"""What a step would take on a mesh, without any device.

Peaks of GPUs that share the batch alone lie up to a tenth below. What stages hold
besides follows programs compiled for CPUs; no GPU has been asked yet.
"""

import dataclasses
import math
from typing import Any

import jax

from zjax.budget.activations import activation_bytes
from zjax.budget.fit import DEVICE_SHARE
from zjax.config import axes, schema
from zjax.config.batch import BatchSizes, resolve_batch
from zjax.sharding import memory
from zjax.sharding import mesh as meshes
from zjax.sharding.plan import DEVICE, Plan, make_plan, splits_of
from zjax.typing import Model


@dataclasses.dataclass(frozen=True)
class Machine:
    """What a mesh is proposed for.

    Args:
        num_devices: Of the run, over all hosts.
        devices_per_host: That fast links join.
        device_bytes: Memory of one; infinite where it is not known.
    """

    num_devices: int
    devices_per_host: int
    device_bytes: int | float

    @property
    def usable_bytes(self) -> int | float:
        """What a step may take of a device."""
        return DEVICE_SHARE * self.device_bytes


@dataclasses.dataclass(frozen=True)
class Trial:
    """A mesh that was thought of.

    Args:
        mesh: All sizes are numbers of 1 or more.
        state: Bytes per device of parameters, gradients and optimizer state.
        activations: Bytes per device besides.
        of_one: The same, of one sequence at a time.
        obstacle: Why it cannot be; then no bytes were counted.
    """

    mesh: schema.Mesh
    state: int | float = 0
    activations: int | float = 0
    of_one: int | float = 0
    obstacle: str = ""

    @property
    def total(self) -> int | float:
        """Bytes per device."""
        return self.state + self.activations

    def fits(self, machine: Machine) -> bool:
        """Whether it can be, and its step fits."""
        return not self.obstacle and self.total <= machine.usable_bytes


def weigh(config: schema.Config, mesh: schema.Mesh, model: Model, tx: Any) -> Trial:
    """Counts what a step takes on a mesh.

    Args:
        config: Settings that can work on it.
        mesh: All sizes are numbers.
        model: That of the config.
        tx: Optax gradient transformation.

    Returns:
        The mesh with its bytes.
    """
    config = dataclasses.replace(config, mesh=mesh)
    sizes = {axis: getattr(mesh, axis) for axis in axes.AXES}
    batch = batch_on(config, mesh)
    one = dataclasses.replace(batch, microbatch_size=1)
    plan = _plan(config, model, tx)
    return Trial(
        mesh,
        memory.step_state_bytes(plan, config, batch.num_microbatches)
        + _passing_bytes(plan, batch.num_microbatches)
        + _fetched_bytes(config, model, tx),
        activation_bytes(config, sizes, batch),
        activation_bytes(config, sizes, one),
    )


def _plan(config: schema.Config, model: Model, tx: Any) -> Plan:
    number = math.prod(getattr(config.mesh, axis) for axis in axes.AXES)
    return make_plan(config, meshes.abstract_mesh(config.mesh, number), model, tx)


def batch_on(config: schema.Config, mesh: schema.Mesh) -> BatchSizes:
    """Cuts the batch of a run for a mesh.

    Args:
        config: Read for the batch.
        mesh: All sizes are numbers.

    Returns:
        Its sizes.
    """
    shares = math.prod(getattr(mesh, axis) for axis in axes.BATCH_AXES)
    return resolve_batch(config, shares)


def _passing_bytes(plan: Plan, num_microbatches: int) -> int:
    """Bytes of gradients beside their sum, and of what is laid out anew by stage."""
    params, sums = map(memory.tree_bytes, (plan.compute, plan.grad_sum))
    if plan.mesh.shape[meshes.PIPELINE] > 1:
        return 2 * params + sums
    reduces_at_end = not plan.splits.grad_sum and num_microbatches > 1
    return params if reduces_at_end and not plan.is_offloaded else 0


def _fetched_bytes(config: schema.Config, model: Model, tx: Any) -> int | float:
    """Bytes of a layer and a table in use, and of their gradients, if not stored so."""
    zero = config.zero
    if zero.parameter_memory == DEVICE and not splits_of(zero.stage).compute:
        return 0
    stored_so = dataclasses.replace(config, zero=schema.Zero(stage=2))
    rows = jax.tree.leaves(_plan(stored_so, model, tx).compute)
    layer = sum(row.device_bytes / row.num_layers for row in rows if row.num_layers)
    return 2 * (layer + max(row.device_bytes for row in rows if not row.num_layers))
