"""State spread over the memories of a machine: as near as there is room for it."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax

from zjax.sharding.paths import position_finder
from zjax.sharding.placement import ArrayPlan
from zjax.sharding.plan import DEVICE, HOST, NVME, Plan


def spread_state(
    plan: Plan,
    order: Sequence[int],
    room: Mapping[str, int | float],
    disks: tuple[str, ...],
) -> Plan:
    """Gives the state of each parameter the nearest memory that has room for all of it.

    Args:
        plan: Master weights and optimizer state that may move rest on the host.
        order: Positions of the parameters; the first are kept nearest.
        room: Bytes per device, for `device` and `pinned_host`.
        disks: Directories for what has no room; without any it stays on the host.

    Returns:
        The same plan with other memories.
    """
    position = position_finder(plan.master)
    sizes = [0] * len(order)
    trees = (plan.master, plan.opt_state)
    owner = [
        [position(keys) for keys, _ in jax.tree_util.tree_leaves_with_path(tree)]
        for tree in trees
    ]
    for tree, of in zip(trees, owner, strict=True):
        for row, i in zip(jax.tree.leaves(tree), of, strict=True):
            if i is not None and row.memory != DEVICE:
                sizes[i] += row.device_bytes
    left, chosen = dict(room), [NVME if disks else HOST] * len(order)
    for i in order:
        near = (where for where in (DEVICE, HOST) if sizes[i] <= left[where])
        where = next(near, None)
        if where:
            chosen[i] = where
            left[where] -= sizes[i]

    def placed(row: ArrayPlan, i: int | None) -> ArrayPlan:
        if i is None or row.memory == DEVICE:
            return row
        where = chosen[i]
        return row.rest_at(where, disks)

    master, opt_state = (
        jax.tree.unflatten(
            jax.tree.structure(tree), map(placed, jax.tree.leaves(tree), of)
        )
        for tree, of in zip(trees, owner, strict=True)
    )
    return dataclasses.replace(plan, master=master, opt_state=opt_state)
