"""State spread over the memories of a machine: as near as there is room for it."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from zjax.sharding.placement import Row, layer_of, owners, path_of
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
    owner = _owners(plan)
    sizes = [0] * len(order)
    trees = (plan.master, plan.opt_state)
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

    def placed(row: Row, i: int | None) -> Row:
        if i is None or row.memory == DEVICE:
            return row
        where = chosen[i]
        return row.rest_on(disks) if where == NVME else row.rest_in(where)

    master, opt_state = (
        jax.tree.unflatten(
            jax.tree.structure(tree), map(placed, jax.tree.leaves(tree), of)
        )
        for tree, of in zip(trees, owner, strict=True)
    )
    return dataclasses.replace(plan, master=master, opt_state=opt_state)


def _owners(plan: Plan) -> tuple[list[int | None], list[int | None]]:
    """The position of the parameter that each leaf of the state belongs to."""
    params = jax.tree_util.tree_leaves_with_path(plan.master)
    names = [(path_of(keys), layer_of(keys)) for keys, _ in params]
    positions = {name: i for i, name in enumerate(names)}
    paths = {path: path for path, _ in names}

    def position(keys: Any) -> int | None:
        found = ((path, layer_of(keys)) for path in owners(keys, paths))
        return next((positions[x] for x in found if x in positions), None)

    state = jax.tree_util.tree_leaves_with_path(plan.opt_state)
    return list(range(len(names))), [position(keys) for keys, _ in state]
