"""Bytes per device: by the closed form of the ZeRO paper, and as a plan has them."""

import dataclasses
import math
from typing import Any

import jax

from zjax.config.batch import resolve_batch
from zjax.config.schema import Config
from zjax.errors import PlanError, Problem
from zjax.sharding.mesh import ZERO_AXES, num_shares
from zjax.sharding.placement import ArrayPlan, dtype_bytes
from zjax.sharding.plan import (
    AUTO,
    DEVICE,
    HOST,
    NVME,
    Plan,
    splits_of,
    while_it_waits,
)

STAGES = (0, 1, 2, 3)


@dataclasses.dataclass(frozen=True)
class StageBytes:
    """Model state on one device, in bytes.

    Args:
        parameters: In the compute dtype.
        gradients: In the compute dtype, or their sum.
        optimizer: Master weights and optimizer state.
    """

    parameters: int | float
    gradients: int | float
    optimizer: int | float

    @property
    def parts(self) -> tuple[int | float, int | float, int | float]:
        """All three in order."""
        return self.parameters, self.gradients, self.optimizer

    @property
    def total(self) -> int | float:
        """All three together."""
        return sum(self.parts)


def zero_bytes(
    num_params: int | float,
    num_devices: int,
    stage: int,
    *,
    parameter_bytes: int | float = 2,
    gradient_bytes: int | float = 2,
    optimizer_bytes: int | float = 12,
) -> StageBytes:
    """Model state per device by the closed form, (2 + 2 + K) bytes per parameter.

    Args:
        num_params: Parameters of the model.
        num_devices: Devices that ZeRO splits over, 1 or more.
        stage: 0 to 3.
        parameter_bytes: Of one parameter in use; 2 in half precision.
        gradient_bytes: Of one gradient, or of its sum.
        optimizer_bytes: K; 12 for Adam with float32 master weights.

    Returns:
        The bytes of each part.

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


def tree_bytes(rows: Any) -> int:
    """Bytes that a tree of arrays takes on one device.

    Args:
        rows: A tree of `ArrayPlan`.

    Returns:
        The sum, padding included.
    """
    return sum(row.device_bytes for row in jax.tree.leaves(rows))


def bytes_in(where: str, rows: Any) -> int:
    """Bytes that a tree of arrays takes in one memory for one device.

    Args:
        where: `device`, `pinned_host` or `nvme`.
        rows: A tree of `ArrayPlan`.

    Returns:
        The sum over those that rest there.
    """
    return tree_bytes([row for row in jax.tree.leaves(rows) if row.memory == where])


def plan_bytes(plan: Plan) -> StageBytes:
    """Model state per device as the plan places it.

    Args:
        plan: Its rows are added up.

    Returns:
        The bytes of each part; gradients as they are summed.
    """
    return StageBytes(
        parameters=tree_bytes(plan.compute),
        gradients=tree_bytes(plan.grad_sum),
        optimizer=tree_bytes((plan.master, plan.opt_state, plan.ema)),
    )


def num_params(plan: Plan) -> int:
    """Parameters of the planned model.

    Args:
        plan: Its master rows.

    Returns:
        Their number, without padding.
    """
    return sum(math.prod(row.shape) for row in jax.tree.leaves(plan.master))


def padding_bytes(rows: Any) -> int:
    """Bytes of zeros stored over all devices because shapes do not divide.

    Args:
        rows: A tree of `ArrayPlan`.

    Returns:
        Their sum.
    """

    def padding(row: ArrayPlan) -> int:
        extra = math.prod(row.stored_shape) - math.prod(row.shape)
        return extra * dtype_bytes(row.stored_dtype)

    return sum(map(padding, jax.tree.leaves(rows)))


def resting_bytes(plan: Plan, memory: str) -> int:
    """Bytes per device of what a plan keeps in one memory from step to step.

    Args:
        plan: Placement of every array.
        memory: `device`, `pinned_host` or `nvme`.

    Returns:
        Master weights, optimizer state, averages, and parameters in use where they are
        kept.
    """
    kept = (plan.master, plan.opt_state, plan.ema)
    return bytes_in(memory, (kept, plan.compute if plan.is_offloaded else ()))


def waiting_rows(plan: Plan, num_microbatches: int) -> Any:
    """The places of gradients that wait for the update.

    Args:
        plan: Placement of every array.
        num_microbatches: With more than one, what waits are their sums.

    Returns:
        A tree of `ArrayPlan` on the devices, split as the optimizer takes them.
    """
    wide = plan.grads if num_microbatches > 1 else plan.compute
    return jax.tree.map(
        lambda row, other: dataclasses.replace(row, dtype=other.dtype), plan.grads, wide
    )


def waiting_bytes(plan: Plan, num_microbatches: int) -> int:
    """Bytes per device of the gradients of `waiting_rows`.

    Args:
        plan: Placement of every array.
        num_microbatches: As of `waiting_rows`.

    Returns:
        All of them.
    """
    return tree_bytes(waiting_rows(plan, num_microbatches))


def waiting_on_host_bytes(plan: Plan, config: Config, num_shares: int) -> int:
    """Bytes per device of gradients that wait in the host's memory.

    Args:
        plan: Placement of every array.
        config: Read for `zero.gradient_memory` and the batch.
        num_shares: Of the batch.

    Returns:
        0 where gradients wait on the devices.
    """
    number = resolve_batch(config, num_shares).num_microbatches
    return bytes_in(HOST, waiting_at_rest(plan, config, number))


def waiting_at_rest(
    plan: Plan, config: Config, num_microbatches: int
) -> list[ArrayPlan]:
    """Where gradients rest while they wait.

    Args:
        plan: Placement of every array.
        config: Read for `zero.gradient_memory`.
        num_microbatches: As of `waiting_rows`.

    Returns:
        The rows of all parameters.
    """
    rows = jax.tree.leaves(waiting_rows(plan, num_microbatches))
    where = config.zero.gradient_memory
    return [while_it_waits(row, where, config) for row in rows]


def step_state_bytes(plan: Plan, config: Config, num_microbatches: int) -> int | float:
    """Model state on a device while gradients of a step are there.

    Args:
        plan: Placement of every array.
        config: Read for `zero.gradient_memory`.
        num_microbatches: With one, gradients are not summed before they are split.

    Returns:
        Bytes of parameters in use, gradients, master weights and optimizer state; of
        those on the device where part of them rests elsewhere.
    """
    if plan.is_offloaded:
        waiting = waiting_at_rest(plan, config, num_microbatches)
        return resting_bytes(plan, DEVICE) + bytes_in(DEVICE, waiting)
    state = plan_bytes(plan)
    grads = plan.grad_sum if num_microbatches > 1 else plan.grads
    return state.parameters + state.optimizer + tree_bytes(grads)


def rows_on_disk(plan: Plan, config: Config) -> list[ArrayPlan]:
    """The arrays that rest on disks, gradients that wait there among them.

    Args:
        plan: Placement of every array.
        config: Read for `zero.gradient_memory` and the batch.

    Returns:
        Their rows.
    """
    kept = (plan.master, plan.opt_state, plan.ema, plan.compute)
    number = resolve_batch(config, plan.num_batch_shares).num_microbatches
    rows = [*jax.tree.leaves(kept), *waiting_at_rest(plan, config, number)]
    return [row for row in rows if row.disks]


def moved_bytes(plan: Plan) -> int:
    """Bytes per device of what does not rest on devices.

    Args:
        plan: Placement of every array.

    Returns:
        The sum over the memories of the host and the disks.
    """
    return sum(resting_bytes(plan, where) for where in (HOST, NVME))


def check_host_memory(
    plan: Plan,
    num_devices: int,
    capacity_bytes: int,
    room_bytes: int,
    waiting: int = 0,
    *,
    asked: str = HOST,
) -> None:
    """Refuses a plan whose share of a host does not fit into its memory.

    Args:
        plan: Placement of every array.
        num_devices: Of the host.
        capacity_bytes: Memory of the host.
        room_bytes: Of it, for what rests there; below 0 where it has none for what is
            on its way.
        waiting: Bytes per device of gradients and inputs of blocks that wait there.
        asked: The setting `zero.optimizer_memory`.

    Raises:
        PlanError: States both numbers and what would help.
    """
    needed = num_devices * (resting_bytes(plan, HOST) + waiting)
    if needed <= room_bytes:
        return
    if room_bytes < 0:
        problem = (
            f"lacks {-room_bytes / 1e9:.1f} GB for what is on its way to and from "
            f"{num_devices} devices on a host of {capacity_bytes / 1e9:.1f} GB"
        )
        remedy = "use fewer devices on a host, or a host with more memory"
        raise PlanError(Problem("zero.optimizer_memory", asked, problem, remedy))
    raise PlanError(
        Problem(
            "zero.optimizer_memory",
            asked,
            f"needs {needed / 1e9:.1f} GB on a host of {capacity_bytes / 1e9:.1f} GB, "
            f"of which {room_bytes / 1e9:.1f} GB may be pinned",
            "name disks in zero.nvme_paths, use more hosts, or a smaller model"
            if asked == AUTO
            else "use nvme, more hosts, or a smaller model",
        )
    )


def check_memory(plan: Plan, capacity_bytes: int | float) -> None:
    """Refuses a plan whose model state alone does not fit on a device.

    Args:
        plan: Placement of every array.
        capacity_bytes: Memory of one device.

    Raises:
        PlanError: States both numbers and what would help.
    """
    needed = plan_bytes(plan).total
    if plan.is_offloaded:
        needed = resting_bytes(plan, DEVICE)
    if needed <= capacity_bytes:
        return
    better = "" if plan.splits.compute else "raise zero.stage, "
    if not plan.is_offloaded:
        better += "set zero.optimizer_memory=pinned_host, "
    raise PlanError(
        Problem(
            "zero.stage",
            plan.stage,
            f"needs {needed / 1e9:.1f} GB of model state on devices of "
            f"{capacity_bytes / 1e9:.1f} GB",
            f"{better}use more devices, or a smaller model",
        )
    )


def num_zero_shares(plan: Plan) -> int:
    """Devices over which ZeRO splits.

    Args:
        plan: Its mesh.

    Returns:
        The product of the ZeRO axes.
    """
    return num_shares(plan.mesh, ZERO_AXES)
