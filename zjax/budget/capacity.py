"""Refusals of plans for which a device or its host has too little memory."""

from typing import Any

from zjax.errors import PlanError, Problem
from zjax.sharding import memory
from zjax.sharding.plan import AUTO, Plan


def check_host_memory(
    plan: Plan,
    num_devices: int,
    capacity_bytes: int,
    free_bytes: int,
    pending: int = 0,
    *,
    asked: str,
) -> None:
    """Refuses a plan whose offloaded arrays do not fit into the memory of the host.

    Args:
        plan: The plan of a run.
        num_devices: Devices of the host.
        capacity_bytes: Memory of the host.
        free_bytes: What of it stored arrays may take; negative where the buffers of
            transfers alone take more than there is.
        pending: Bytes per device of gradients and block inputs stored on the host.
        asked: The setting `zero.optimizer_memory`.

    Raises:
        PlanError: The host has less memory than is needed.
    """
    needed = num_devices * (memory.stored_bytes(plan).host + pending)
    if needed <= free_bytes:
        return
    if free_bytes < 0:
        problem = (
            f"lacks {-free_bytes / 1e9:.1f} GB for what is on its way to and from "
            f"{num_devices} devices on a host of {capacity_bytes / 1e9:.1f} GB"
        )
        remedy = "use fewer devices on a host, or a host with more memory"
        raise PlanError(Problem("zero.optimizer_memory", asked, problem, remedy))
    raise PlanError(
        Problem(
            "zero.optimizer_memory",
            asked,
            f"needs {needed / 1e9:.1f} GB on a host of {capacity_bytes / 1e9:.1f} GB, "
            f"of which {free_bytes / 1e9:.1f} GB may be pinned",
            "name disks in zero.nvme_paths, use more hosts, or a smaller model"
            if asked == AUTO
            else "use nvme, more hosts, or a smaller model",
        )
    )


def check_device_memory(
    plan: Plan, capacity_bytes: int | float, kept: Any = ()
) -> None:
    """Refuses a plan whose model state alone does not fit on a device.

    Args:
        plan: The plan of a run.
        capacity_bytes: Memory of one device.
        kept: Plans of what the state holds for exchanges of replicas.

    Raises:
        PlanError: A device has less memory than is needed.
    """
    needed = memory.plan_bytes(plan, kept).total
    if plan.is_offloaded:
        needed = memory.stored_bytes(plan).device
    if needed <= capacity_bytes:
        return
    better = "" if plan.splits.compute else "raise zero.stage, "
    if not plan.is_offloaded and not memory.tree_bytes(kept):
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
