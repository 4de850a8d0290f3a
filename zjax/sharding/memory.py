"""Bytes per device of a plan: by ZeRO stage, by memory, and by the closed form."""

import collections
import dataclasses
import math
from typing import Any, NamedTuple

import jax

from zjax.settings.schema import Zero
from zjax.sharding.mesh import num_shares
from zjax.sharding.placement import ArrayPlan
from zjax.sharding.plan import DEVICE, HOST, NVME, Plan, offload_pending
from zjax.sharding.roles import trained
from zjax.sharding.zero import splits_of

STAGES = (0, 1, 2, 3)


@dataclasses.dataclass(frozen=True)
class StageBytes:
    """Bytes of model state on one device.

    Args:
        optimizer: Bytes of master weights, optimizer state, averaged weights and arrays
            for compressed communication.
    """

    parameters: int | float
    gradients: int | float
    optimizer: int | float

    @property
    def parts(self) -> tuple[int | float, int | float, int | float]:
        """Bytes of parameters, gradients and optimizer state."""
        return self.parameters, self.gradients, self.optimizer

    @property
    def total(self) -> int | float:
        """Bytes of parameters, gradients and optimizer state together."""
        return sum(self.parts)


def zero_bytes(
    num_params: int | float,
    num_devices: int,
    stage: int,
    *,
    parameter_bytes: int | float = 2,
    gradient_bytes: int | float = 2,
    optimizer_bytes: int | float = 12,  # float32 master weight, two moments of Adam
) -> StageBytes:
    """Computes bytes of model state per device by the closed form of the ZeRO paper.

    Example:
        >>> round(zero_bytes(7.5e9, 64, 2).total / 1e9, 1)
        16.6

    Reference:
        ZeRO, arXiv:1910.02054, figure 1.
    """
    splits, n = splits_of(stage), num_devices
    return StageBytes(
        parameters=parameter_bytes * num_params / (n if splits.compute else 1),
        gradients=gradient_bytes * num_params / (n if splits.grad_sum else 1),
        optimizer=optimizer_bytes * num_params / (n if splits.state else 1),
    )


class MemoryBytes(NamedTuple):
    """Bytes per device of some arrays, by the memory that stores them."""

    device: int
    host: int
    disks: int

    @property
    def offloaded(self) -> int:
        """Bytes on the host and on disks together."""
        return self.host + self.disks

    @property
    def offloaded_by_memory(self) -> dict[str, int]:
        """Bytes on the host and on disks, by the name of the memory."""
        return {HOST: self.host, NVME: self.disks}


NOTHING = MemoryBytes(0, 0, 0)


def tree_bytes(rows: Any) -> int:
    """Adds up bytes per device of a tree of `ArrayPlan`, padding included."""
    return sum(row.device_bytes for row in jax.tree.leaves(rows))


def bytes_by_memory(rows: Any) -> MemoryBytes:
    """Adds up bytes per device of a tree of `ArrayPlan` in each memory."""
    sizes = collections.Counter()
    for row in jax.tree.leaves(rows):
        sizes[row.memory] += row.device_bytes
    return MemoryBytes(sizes[DEVICE], sizes[HOST], sizes[NVME])


def stored_bytes(plan: Plan) -> MemoryBytes:
    """Bytes per device that a plan stores between steps."""
    # Only offload stores compute parameters; frozen ones are already in `master`.
    params = trained(plan.compute, plan.master) if plan.is_offloaded else ()
    return bytes_by_memory((plan.master, plan.opt_state, plan.ema, params))


def plan_bytes(plan: Plan, kept: Any = ()) -> StageBytes:
    """Bytes per device of parameters, gradient sum and optimizer state of a plan.

    Frozen parameters are counted once, as parameters. The arrays of `kept`, which
    replicas use for compressed communication, count as optimizer state.
    """
    return StageBytes(
        parameters=tree_bytes(plan.compute),
        gradients=tree_bytes(plan.grad_sum),
        optimizer=tree_bytes(
            # Frozen parameters are counted in `compute`.
            (trained(plan.master, plan.master), plan.opt_state, plan.ema, kept)
        ),
    )


def num_params(plan: Plan) -> int:
    """Number of parameters of the planned model, without padding."""
    return sum(math.prod(row.shape) for row in jax.tree.leaves(plan.master))


def pending_gradients(plan: Plan, num_microbatches: int) -> Any:
    """Plans of the gradients that are pending on the devices until the update.

    Gradients of one microbatch have the compute dtype; sums of several have the dtype
    of the gradient sum. All are sharded as in the optimizer.
    """
    typed = plan.grads
    if num_microbatches == 1:
        typed = trained(plan.compute, plan.master)
    return jax.tree.map(
        lambda row, other: dataclasses.replace(row, dtype=other.dtype),
        plan.grads,
        typed,
    )


def stored_gradients(
    plan: Plan, settings: Zero, num_microbatches: int
) -> list[ArrayPlan]:
    """Plans of pending gradients in `gradient_memory`, in parameter order."""
    memory, disks = settings.placement.gradient_memory, settings.placement.nvme_paths
    rows = jax.tree.leaves(pending_gradients(plan, num_microbatches))
    return [offload_pending(row, memory, disks) for row in rows]


def rows_on_disk(plan: Plan, settings: Zero, num_microbatches: int) -> list[ArrayPlan]:
    """Plans of all arrays that a run stores on disks: state, then pending gradients."""
    state = (plan.master, plan.opt_state, plan.ema, plan.compute)
    rows = [
        *jax.tree.leaves(state),
        *stored_gradients(plan, settings, num_microbatches),
    ]
    return [row for row in rows if row.is_on_disk]


def num_zero_shares(plan: Plan) -> int:
    """Number of devices over which ZeRO shards: the product of the ZeRO axes."""
    return num_shares(plan.mesh, plan.zero_axes)
