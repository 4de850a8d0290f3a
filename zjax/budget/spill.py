"""State in the fastest memory that has room: devices, then the host, then disks."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax

from zjax.sharding.paths import position_finder
from zjax.sharding.placement import ArrayPlan
from zjax.sharding.plan import DEVICE, HOST, NVME, Plan

DEVICE_SHARE = 0.94
"""Share of a device's memory that a predicted step may take."""


class FreeBytes(NamedTuple):
    """Bytes per device that state may take.

    Args:
        device: Bytes of the device.
        host: Bytes of its host.
    """

    device: int | float
    host: int | float


def spill_state(
    plan: Plan, order: Sequence[int], free: FreeBytes, disks: tuple[str, ...]
) -> Plan:
    """Stores the state of each parameter in the fastest memory that has room for it.

    Args:
        plan: A plan with master weights and optimizer state offloaded to the host.
        order: Positions of the parameters; earlier ones get faster memory.
        free: Free bytes per device.
        disks: Directories for what spills; without any it stays on the host.

    Returns:
        The plan with other memories.
    """
    position = position_finder(plan.master)
    trees = (plan.master, plan.opt_state)
    owners = [
        [position(keys) for keys, _ in jax.tree_util.tree_leaves_with_path(tree)]
        for tree in trees
    ]
    sizes = [0] * len(order)
    for tree, of in zip(trees, owners, strict=True):
        for row, i in zip(jax.tree.leaves(tree), of, strict=True):
            if i is not None and not row.is_on_device:
                sizes[i] += row.device_bytes
    chosen = _choose(sizes, order, free, NVME if disks else HOST)

    def spilled(row: ArrayPlan, i: int | None) -> ArrayPlan:
        if i is None or row.is_on_device:
            return row
        return row.stored_in(chosen[i], disks)

    master, opt_state = (
        jax.tree.unflatten(
            jax.tree.structure(tree), map(spilled, jax.tree.leaves(tree), of)
        )
        for tree, of in zip(trees, owners, strict=True)
    )
    return dataclasses.replace(plan, master=master, opt_state=opt_state)


def _choose(
    sizes: Sequence[int], order: Sequence[int], free: FreeBytes, last: str
) -> list[str]:
    """The memory of each parameter's state; `last` has room for everything."""
    left = {DEVICE: free.device, HOST: free.host}
    chosen = [last] * len(order)
    for i in order:
        memory = next((name for name in left if sizes[i] <= left[name]), None)
        if memory:
            chosen[i] = memory
            left[memory] -= sizes[i]
    return chosen
