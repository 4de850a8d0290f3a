"""The plan of a run on this machine, where the settings leave memories to it."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from zjax.budget.spill import spread_state
from zjax.config.batch import resolve_batch
from zjax.config.schema import Config
from zjax.errors import PlanError, Problem
from zjax.offload.inputs import kept_here, waiting_inputs
from zjax.offload.peak import Peak
from zjax.offload.units import forward_order
from zjax.processes.host import (
    POOL_OVERHEAD,
    Sharers,
    host_memory_bytes,
    pinnable_bytes,
    sharers_of_host,
)
from zjax.sharding import memory
from zjax.sharding.describe import format_bytes
from zjax.sharding.in_use import plan_on_device
from zjax.sharding.mesh import device_capacity_bytes
from zjax.sharding.placement import ArrayPlan
from zjax.sharding.plan import AUTO, DEVICE, HOST, NVME, Plan, make_plan
from zjax.step import make_step
from zjax.storage.chunks import disk_bytes
from zjax.storage.passing import IN_FLIGHT_BYTES, passing_bytes
from zjax.storage.scratch import check_disks
from zjax.typing import Batch, Model

DEVICE_SHARE = 0.94
"""Of a device's memory, that a step may be said to take."""


def fit_plan(
    config: Config, mesh: Mesh, model: Model, tx: Any, batch: Batch | None = None
) -> Plan:
    """Plans a run; `zero.optimizer_memory="auto"` takes the memories of this machine.

    Args:
        config: Checked settings.
        mesh: The devices.
        model: The model as pure functions.
        tx: Optax gradient transformation of `make_optimizer` or `adopt_optimizer`.
        batch: Arrays or ShapeDtypeStructs of the global batch; None for that of the
            built-in models.

    Returns:
        The plan.

    Raises:
        PlanError: Arrays or an optimizer that cannot be placed, or a step that does not
            fit these devices or whose memory cannot be predicted.
    """
    plan = make_plan(config, mesh, model, tx)
    return fit_memories(plan, config, model, tx, batch)


def fit_memories(
    plan: Plan, config: Config, model: Model, tx: Any, batch: Batch | None = None
) -> Plan:
    """Chooses the memories of the state where `zero.optimizer_memory` is "auto".

    The step with all state offloaded is compiled for its peak. State then fills what is
    left of the devices, after that the host, and the rest goes to disks. Parameters
    that the forward pass reads first stay nearest.

    Args:
        plan: The plan of `make_plan` on devices.
        config: As of `fit_plan`.
        model: As of `fit_plan`.
        tx: As of `fit_plan`.
        batch: As of `fit_plan`.

    Returns:
        The plan with its memories; `plan` itself under any other setting.

    Raises:
        PlanError: As of `fit_plan`.
    """
    if config.zero.optimizer_memory != AUTO:
        return plan
    assert isinstance(plan.mesh, Mesh)
    step = make_step(model, tx, plan, config)
    batch = abstract_batch(config, plan) if batch is None else batch
    peak = step.predict_peak(batch)
    if peak is None:
        problem = "does not know what a step takes of these devices"
        remedy = "use 'pinned_host' or 'nvme'"
        raise PlanError(Problem("zero.optimizer_memory", AUTO, problem, remedy))
    capacity = _free_bytes(plan.mesh)
    if peak.total > capacity:
        recomputes = kept_here(model, config) is None
        raise PlanError(_no_room(peak, capacity, recomputes=recomputes))
    needed = max(peak.total, _bytes_to_generate(plan, capacity))
    inputs = waiting_inputs(model, plan, config, batch)
    room = _room(plan, config, DEVICE_SHARE * capacity - needed, inputs)
    order = forward_order(model, plan.master)
    found = spread_state(plan, order, room, config.zero.nvme_paths)
    _log_memories(found)
    return found


def _log_memories(plan: Plan) -> None:
    rows = jax.tree.leaves((plan.master, plan.opt_state))
    sizes = (
        format_bytes(memory.tree_bytes([row for row in rows if row.memory == where]))
        for where in (DEVICE, HOST, NVME)
    )
    logging.warning("state per device: %s there, %s on the host, %s on disks", *sizes)
    if {row.memory for row in rows} == {DEVICE}:
        logging.warning("all of it fits: zero.optimizer_memory=device is faster")


def abstract_batch(config: Config, plan: Plan) -> Batch:
    """The batch of a run of the built-in models, without data.

    Args:
        config: Its batch size and length.
        plan: Its number of batch shares.

    Returns:
        Tokens, targets and weights, all [B, L].
    """
    size = resolve_batch(config, plan.num_batch_shares).global_batch_size
    shape = (size, config.data.length)
    dtypes = {"tokens": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name, dtype in dtypes.items()}


def room_on_host(plan: Plan, on_disks: int, sharers: Sharers) -> int:
    """What arrays that rest on this host may take of it.

    Args:
        plan: Says what moves between it and devices.
        on_disks: Bytes per device that rest on disks, and pass through the host.
        sharers: Of the host.

    Returns:
        Bytes, of all that share it together; below 0 where what is on its way has no
        room.
    """
    passing, number = passing_bytes(on_disks), sharers.num_devices
    beside = number * passing.from_disks
    room = pinnable_bytes(host_memory_bytes(), sharers.num_processes, beside)
    moving = min(IN_FLIGHT_BYTES, memory.moved_bytes(plan)) + passing.to_disks
    return int((room - number * moving) / POOL_OVERHEAD)


def check_room(
    plan: Plan, config: Config, mesh: Mesh, inputs: Sequence[ArrayPlan]
) -> None:
    """Refuses a plan for which the devices here, their hosts or disks have no room.

    Args:
        plan: Placement of every array.
        config: Read for the batch and `zero`.
        mesh: Devices that are here; all processes must ask.
        inputs: Of blocks, as `waiting_inputs` tells them.

    Raises:
        PlanError: A device or a host has too little memory.
        StorageError: Disks are too small or too slow, or cannot be used.
    """
    memory.check_memory(plan, device_capacity_bytes(mesh))
    on_disk = memory.rows_on_disk(plan, config)
    on_disk += [row for row in inputs if row.disks]
    waiting = memory.waiting_on_host_bytes(plan, config, plan.num_batch_shares)
    sharers = sharers_of_host(len(mesh.local_devices))
    memory.check_host_memory(
        plan,
        sharers.num_devices,
        host_memory_bytes(),
        room_on_host(plan, memory.tree_bytes(on_disk), sharers),
        waiting + memory.bytes_in(HOST, inputs),
        asked=config.zero.optimizer_memory,
    )
    if on_disk:
        sizes = [*map(disk_bytes, on_disk)]
        check_disks(config.zero.nvme_paths, sizes, sharers.num_processes)


def _free_bytes(mesh: Mesh) -> float:
    """Memory of a device that no other run in this process has taken."""
    stats = [device.memory_stats() or {} for device in mesh.local_devices]
    return device_capacity_bytes(mesh) - max(s.get("bytes_in_use", 0) for s in stats)


def _bytes_to_generate(plan: Plan, capacity: float) -> int:
    """What holds all parameters at once.

    0 where blocks come up one by one, and where all take more than half a device.
    """
    whole = memory.tree_bytes(plan_on_device(plan).compute)
    by_block = any(row.memory != DEVICE for row in jax.tree.leaves(plan.compute))
    if by_block or whole > capacity / 2:
        return 0
    return memory.resting_bytes(plan, DEVICE) + whole


def _no_room(peak: Peak, capacity: float, *, recomputes: bool) -> Problem:
    more = "" if recomputes else "model.remat=full, "
    return Problem(
        "zero.optimizer_memory",
        AUTO,
        f"leaves a step that takes {peak.total / 1e9:.1f} GB, most of it "
        f"{max(peak.parts, key=peak.parts.__getitem__)}, on devices with "
        f"{capacity / 1e9:.1f} GB free",
        f"use {more}a smaller microbatch_size, more devices, or the host for "
        "zero.parameter_memory, zero.gradient_memory and model.activation_memory",
    )


def _room(
    plan: Plan, config: Config, on_device: float, inputs: Sequence[ArrayPlan]
) -> Mapping[str, float]:
    """Bytes per device for state, the same in all processes."""
    mesh = plan.mesh
    assert isinstance(mesh, Mesh)
    sharers = sharers_of_host(len(mesh.local_devices))
    on_disks = memory.moved_bytes(plan) if config.zero.nvme_paths else 0
    on_disks += memory.bytes_in(NVME, inputs)
    host = room_on_host(plan, on_disks, sharers) / max(1, sharers.num_devices)
    blocks = [row for row in jax.tree.leaves(plan.compute) if row.memory == HOST]
    taken = memory.tree_bytes(blocks) + memory.bytes_in(HOST, inputs)
    taken += memory.waiting_on_host_bytes(plan, config, plan.num_batch_shares)
    here = np.array([on_device, host - taken])
    if jax.process_count() > 1:
        here = multihost_utils.process_allgather(here).min(0)
    return dict(zip((DEVICE, HOST), here.tolist(), strict=True))
