"""Places state in the fastest memory with free bytes; counts traffic of a step."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax

from zjax.settings.batch import resolve_batch
from zjax.settings.schema import Config
from zjax.sharding import memory
from zjax.sharding.frozen import trained
from zjax.sharding.paths import position_finder
from zjax.sharding.placement import ArrayPlan
from zjax.sharding.plan import DEVICE, HOST, NVME, Plan

DEVICE_SHARE = 0.94
"""Share of a device's memory that a predicted step may take."""


class FreeBytes(NamedTuple):
    """Bytes per device that state may take.

    Args:
        device: Free bytes of a device.
        host: Free bytes of the host, per device.
    """

    device: int | float
    host: int | float


def spill_state(
    plan: Plan, order: Sequence[int], free: FreeBytes, disks: tuple[str, ...]
) -> Plan:
    """Stores the state of each parameter in the fastest memory with free bytes.

    `plan` has all state offloaded to the host; parameters that come earlier in `order`
    get faster memory. Without disks the overflow stays on the host.
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
            # Leaves that belong to no parameter, such as step counts, are not moved.
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
    """Memory name of the state of each parameter; `last` takes any number of bytes."""
    left = {DEVICE: free.device, HOST: free.host}
    chosen = [last] * len(order)
    # First fit, so that a small parameter still takes the bytes that a large one left.
    for i in order:
        memory = next((name for name in left if sizes[i] <= left[name]), None)
        if memory:
            chosen[i] = memory
            left[memory] -= sizes[i]
    return chosen


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes per device of the arrays of one kind in one memory.

    Args:
        what: Name of the kind of arrays, for the table.
        memory: Name of the memory, `pinned_host` or `nvme`.
        stored: Bytes per device that the arrays take.
        up: Bytes per device that a step moves to the device.
        down: Bytes per device that a step moves back.
    """

    what: str
    memory: str
    stored: int
    up: int
    down: int


def traffic_of_step(
    plan: Plan, config: Config, inputs: Sequence[ArrayPlan] = ()
) -> list[Traffic]:
    """Lists the offloaded arrays by kind and memory, with the bytes that a step moves.

    Traffic of pending gradients is an upper bound: small gradients stay on the device.
    """
    found = [*_of_state(plan, config), _of_gradients(plan, config)]
    stored = memory.bytes_by_memory(inputs).offloaded_by_memory
    for where, size in stored.items():
        moved = size * num_microbatches(plan, config)
        found.append(Traffic("inputs of blocks", where, size, moved, moved))
    return [x for x in found if x.stored]


def updates_wait(config: Config) -> bool:
    """Whether updates need the norm or the finiteness of all gradients."""
    clips = math.isfinite(config.optimizer.clip_norm)
    return clips or config.precision.on_nonfinite != "update"


def _of_state(plan: Plan, config: Config) -> Iterator[Traffic]:
    """Yields the traffic of master weights, optimizer state and compute parameters."""
    # Parameters move up once for the forward and once for the backward pass.
    passes = 2 * num_microbatches(plan, config)
    waits_for_norm = updates_wait(config) and config.zero.delay_updates_from < 0
    # Joining split master weights reads the compute parameters, their high bits. An
    # update that waits for the norm runs after the backward pass and moves them again.
    joins = waits_for_norm and plan.splits_master
    master = trained(plan.master, plan.master)
    state = memory.bytes_by_memory((master, plan.opt_state)).offloaded_by_memory
    params, changed = (
        memory.bytes_by_memory(rows).offloaded_by_memory
        for rows in (plan.compute, trained(plan.compute, plan.master))
    )
    for where, size in state.items():
        yield Traffic("state", where, size, size, size)
        moved = passes * params[where] + joins * changed[where]
        yield Traffic("parameters in use", where, params[where], moved, changed[where])


def _of_gradients(plan: Plan, config: Config) -> Traffic:
    """Traffic of offloaded gradients."""
    number = num_microbatches(plan, config)
    rows = memory.stored_gradients(plan, config.zero, number)
    size = memory.bytes_by_memory(rows).offloaded
    # The sum between microbatches, and once more while it is pending for the norm.
    times = number - 1 + updates_wait(config)
    where = config.zero.gradient_memory
    return Traffic("gradients", where, size, times * size, times * size)


def num_microbatches(plan: Plan, config: Config) -> int:
    """Number of gradient accumulation steps of a planned run."""
    return resolve_batch(config, plan.num_batch_shares).num_microbatches
