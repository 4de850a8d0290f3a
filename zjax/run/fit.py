"""Checks plans against device, host and disk memory, and fits state into free bytes."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from zjax.errors import PlanError, Problem
from zjax.estimate import tables
from zjax.estimate.models import held_beside
from zjax.jaxprs.versions import dtype_promotion
from zjax.offload.compiled import Peak
from zjax.offload.gradients import input_plan, saving_policy
from zjax.offload.units import forward_order, units_of
from zjax.processes.host import (
    POOL_RATIO,
    LocalProcesses,
    host_memory_bytes,
    local_processes,
    pinnable_bytes,
)
from zjax.run.batch import abstract_batch
from zjax.run.step import make_step
from zjax.settings.batch import resolve_batch
from zjax.settings.schema import Config
from zjax.sharding import memory
from zjax.sharding.describe import format_bytes
from zjax.sharding.memory import num_zero_shares
from zjax.sharding.mesh import PIPELINE, device_capacity_bytes
from zjax.sharding.placement import ArrayPlan, abstract_key
from zjax.sharding.plan import AUTO, Plan, make_plan, staged_plan
from zjax.storage.files import disk_bytes
from zjax.storage.scratch import check_disks
from zjax.storage.transfers import IN_FLIGHT_BYTES, staging_bytes
from zjax.train import microbatches
from zjax.train.compute_params import compute_dtype
from zjax.typing import Batch, Device, Model


def check_host_memory(
    plan: Plan,
    num_devices: int,
    capacity_bytes: int,
    free_bytes: int,
    pending: int = 0,
    *,
    asked: str,
) -> None:
    """Refuses a plan whose offloaded arrays do not fit into host memory.

    `free_bytes` is negative where transfer buffers alone exceed the host; `pending` is
    bytes per device of gradients and block inputs.
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
        raise PlanError(Problem("zero.offload", asked, problem, remedy))
    raise PlanError(
        Problem(
            "zero.offload",
            asked,
            f"needs {needed / 1e9:.1f} GB on a host of {capacity_bytes / 1e9:.1f} GB, "
            f"of which {free_bytes / 1e9:.1f} GB may be pinned",
            "name disks in zero.offload.nvme_paths, use more hosts, or a smaller model"
            if asked == AUTO
            else "use nvme, more hosts, or a smaller model",
        )
    )


def check_device_memory(
    plan: Plan, capacity_bytes: int | float, kept: Any = (), beside: int = 0
) -> None:
    """Refuses a plan whose model state alone does not fit on a device.

    `kept` are plans of the arrays that replicas keep for compressed communication, and
    `beside` are bytes that models beside a policy hold.
    """
    needed = memory.plan_bytes(plan, kept).total
    if plan.is_offloaded:
        needed = memory.stored_bytes(plan).device
    needed += beside
    if needed <= capacity_bytes:
        return
    better = "" if plan.splits.compute else "raise zero.stage, "
    if not plan.is_offloaded and not memory.tree_bytes(kept):
        better += "set zero.offload=pinned_host, "
    others = f" ({beside / 1e9:.1f} GB of critic and reference)" if beside else ""
    raise PlanError(
        Problem(
            "zero.stage",
            plan.stage,
            f"needs {needed / 1e9:.1f} GB of model state{others} on devices of "
            f"{capacity_bytes / 1e9:.1f} GB",
            f"{better}use more devices, or a smaller model",
        )
    )


@dtype_promotion()
def fit_plan(
    config: Config,
    mesh: Mesh,
    model: Model,
    tx: Any,
    batch: Batch | None = None,
    beside: memory.MemoryBytes = memory.NOTHING,
) -> Plan:
    """Plans a run; `zero.offload="auto"` fills the memories of this machine.

    Args:
        config: Checked settings.
        mesh: Mesh of the devices.
        model: Model as pure functions.
        tx: Optax gradient transformation of `make_optimizer` or `adopt_optimizer`.
        batch: Arrays or ShapeDtypeStructs of the global batch; None for the batch of
            the built-in models.
        beside: Bytes per device that models beside a policy hold, which
            `zero.offload="auto"` leaves free.

    Returns:
        The plan.

    Raises:
        PlanError: Arrays or an optimizer that cannot be placed, or a step that does not
            fit these devices or whose memory cannot be predicted.
    """
    plan = make_plan(config, mesh, model, tx)
    return fit_memories(plan, config, model, tx, batch, beside)


def fit_memories(
    plan: Plan,
    config: Config,
    model: Model,
    tx: Any,
    batch: Batch | None = None,
    beside: memory.MemoryBytes = memory.NOTHING,
) -> Plan:
    """Chooses the memories of the state where `zero.offload` is "auto".

    A step with all state offloaded is compiled to predict peak memory. State then fills
    the free memory of the devices, then of the host, then disks, in the order in which
    the forward pass reads parameters. Models beside a policy keep the bytes `beside`.
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
        raise PlanError(Problem("zero.offload", AUTO, problem, remedy))
    capacity = _free_bytes(plan.mesh) - beside.device
    if peak.total > capacity:
        recomputes = saving_policy(model, config.model) is None
        raise PlanError(_no_room(peak, capacity, recomputes=recomputes))
    # State on the devices must leave room for a step and for generation.
    needed = max(peak.total, _bytes_to_generate(plan, capacity))
    inputs = offloaded_inputs(model, plan, config, batch)
    free = _free_for_state(
        plan, config, tables.DEVICE_SHARE * capacity - needed, inputs, beside.host
    )
    order = forward_order(model, plan.master)
    found = tables.spill_state(plan, order, free, config.zero.placement.nvme_paths)
    _log_memories(found)
    return found


def _log_memories(plan: Plan) -> None:
    """Warns how many bytes of the state went to device, host and disks."""
    state = plan.master, plan.opt_state
    sizes = map(format_bytes, memory.bytes_by_memory(state))
    logging.warning("state per device: %s there, %s on the host, %s on disks", *sizes)
    if all(row.is_on_device for row in jax.tree.leaves(state)):
        logging.warning("all of it fits: zero.offload=None is faster")


def host_budget(plan: Plan, disk_bytes: int, processes: LocalProcesses) -> int:
    """Bytes of this host that stored arrays of all local processes may take.

    `disk_bytes` per device pass through the host. Negative where transfer buffers need
    more than the host has.
    """
    staging, number = staging_bytes(disk_bytes), processes.num_devices
    buffers = number * staging.from_disks
    pinnable = pinnable_bytes(host_memory_bytes(), processes.num_processes, buffers)
    moved = memory.stored_bytes(plan).offloaded
    in_flight = min(IN_FLIGHT_BYTES, moved) + staging.to_disks
    # The pinned pool has gaps: stored arrays take POOL_RATIO times as many bytes.
    return int((pinnable - number * in_flight) / POOL_RATIO)


def check_fits(
    plan: Plan,
    config: Config,
    mesh: Mesh,
    inputs: Sequence[ArrayPlan],
    beside: memory.MemoryBytes = memory.NOTHING,
) -> None:
    """Refuses a plan that does not fit devices, hosts or disks; all processes call it.

    `inputs` are plans of offloaded block inputs, from `offloaded_inputs`; models beside
    a policy keep the bytes `beside`.
    """
    kept = tables.kept_rows(plan, config)
    check_device_memory(plan, device_capacity_bytes(mesh), kept, beside.device)
    number = tables.num_microbatches(plan, config)
    on_disk = memory.rows_on_disk(plan, config.zero, number)
    on_disk += [row for row in inputs if row.is_on_disk]
    gradients = memory.stored_gradients(plan, config.zero, number)
    processes = local_processes(len(mesh.local_devices))
    check_host_memory(
        plan,
        processes.num_devices,
        host_memory_bytes(),
        host_budget(plan, memory.tree_bytes(on_disk), processes),
        memory.bytes_by_memory((gradients, inputs)).host + beside.host,
        asked=config.zero.optimizer_memory,
    )
    if on_disk:
        sizes = [*map(disk_bytes, on_disk)]
        check_disks(config.zero.placement.nvme_paths, sizes, processes.num_processes)


def bytes_beside(
    config: Config, devices: Sequence[Device] | None
) -> memory.MemoryBytes:
    """Counts the bytes per device that models beside a policy will hold.

    `devices` are the devices of the run; all if None.
    """
    number = jax.device_count() if devices is None else len(devices)
    return held_beside(config, number)


def _free_bytes(mesh: Mesh) -> float:
    """Bytes of a device that arrays of this process leave free."""
    stats = [device.memory_stats() or {} for device in mesh.local_devices]
    return device_capacity_bytes(mesh) - max(s.get("bytes_in_use", 0) for s in stats)


def _bytes_to_generate(plan: Plan, capacity: float) -> int:
    """Bytes that generation needs to hold all parameters on a device at once.

    0 where blocks are offloaded, and where parameters exceed half of a device.
    """
    params = memory.tree_bytes(staged_plan(plan).compute)
    if memory.bytes_by_memory(plan.compute).offloaded or params > capacity / 2:
        return 0
    return memory.stored_bytes(plan).device + params


def _no_room(peak: Peak, capacity: float, *, recomputes: bool) -> Problem:
    """Problem of a step that exceeds the devices even with all state offloaded."""
    more = "" if recomputes else "model.remat=full, "
    return Problem(
        "zero.offload",
        AUTO,
        f"leaves a step that takes {peak.total / 1e9:.1f} GB, most of it "
        f"{max(peak.parts, key=peak.parts.__getitem__)}, on devices with "
        f"{capacity / 1e9:.1f} GB free",
        f"use {more}a smaller microbatch_size, more devices, or the host for "
        "zero.offload.parameter_memory, zero.offload.gradient_memory and "
        "model.activation_memory",
    )


def _free_for_state(
    plan: Plan,
    config: Config,
    on_device: float,
    inputs: Sequence[ArrayPlan],
    beside: int,
) -> tables.FreeBytes:
    """Free bytes per device for state, agreed on by all processes.

    `beside` are bytes per device of other models on the host.
    """
    mesh = plan.mesh
    assert isinstance(mesh, Mesh)
    processes = local_processes(len(mesh.local_devices))
    # Any offloaded array may end on disk: staging buffers are counted for all of them.
    on_disks = (
        memory.stored_bytes(plan).offloaded if config.zero.placement.nvme_paths else 0
    )
    on_disks += memory.bytes_by_memory(inputs).disks
    host = host_budget(plan, on_disks, processes) / max(1, processes.num_devices)
    number = tables.num_microbatches(plan, config)
    gradients = memory.stored_gradients(plan, config.zero, number)
    taken = memory.bytes_by_memory((plan.compute, inputs, gradients)).host
    free = np.array([on_device, host - taken - beside])
    if jax.process_count() > 1:
        # Every process must plan alike: the smallest number of all hosts decides.
        free = multihost_utils.process_allgather(free).min(0)
    return tables.FreeBytes(*free.tolist())


_STATUS = "RESOURCE_EXHAUSTED"
_LAST = "use more devices, or a smaller model"


@contextlib.contextmanager
def explain_out_of_memory(
    config: Config, plan: Plan, *, user_model: bool
) -> Iterator[None]:
    """Turns JAX's out-of-memory error into a PlanError that names smaller settings."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        said, _, _ = str(error).partition("\n")
        if _STATUS not in said:
            raise
        _, _, cause = said.partition(f"{_STATUS}: ")
        size = resolve_batch(config, plan.num_batch_shares).microbatch_size
        problem = f"takes more memory than devices have ({cause.rstrip('.')})"
        settings = " or ".join(_settings(config, plan, size, user_model))
        remedy = f"set {settings}, or {_LAST}" if settings else _LAST
        raise PlanError(Problem("microbatch_size", size, problem, remedy)) from error


def _settings(config: Config, plan: Plan, size: int, user_model: bool) -> Iterator[str]:
    """Yields settings that lower the memory of a step, each with a value to set."""
    if size > 1:
        yield f"microbatch_size={size // 2} (the batch stays, in more microbatches)"
    if not user_model and config.model.remat != "full":
        yield "model.remat=full"
    if not plan.splits.compute and num_zero_shares(plan) > 1:
        yield "zero.stage=3"
    if plan.mesh.shape[PIPELINE] > 1:
        return  # stages stay where they are
    if not config.zero.offloads_state:
        yield "zero.offload=pinned_host"
    elif not (config.zero.offloads_blocks or user_model):
        yield "zero.offload.parameter_memory=pinned_host"


def offloaded_inputs(
    model: Model, plan: Plan, config: Config, batch: Batch
) -> Sequence[ArrayPlan]:
    """Plans the inputs of blocks that are stored off the devices, for one microbatch.

    One input per block, or two if the block has tiles; none if inputs stay on the
    devices, or if the model does not run block by block.
    """
    stack = model.stack
    stays = not (config.model.offloads_inputs and plan.is_offloaded)
    if stays or stack is None or not model.runs_by_block:
        return ()
    number = tables.num_microbatches(plan, config)
    params = jax.tree.map(
        lambda row: jax.ShapeDtypeStruct(row.shape, row.dtype), plan.compute
    )

    def enter(params: Any, batch: Batch, key: jax.Array) -> Any:
        batch = microbatches.cast_batch(batch, model, compute_dtype(plan))
        parts = microbatches.split_batch(batch, model, number, plan.num_batch_shares)
        return stack.embed(params, jax.tree.map(lambda x: x[0], parts), key)[0]

    embed, _, _ = stack.split(params)
    # A trunk saves the block's input, and the first tile stands for the input of all
    # tiles.
    num_inputs = sum(unit.tile <= 1 for unit, _ in units_of(stack, params))
    entering = jax.tree.leaves(jax.eval_shape(enter, embed, batch, abstract_key()))
    memory, disks = config.model.activation_memory, config.zero.placement.nvme_paths
    return num_inputs * [input_plan(x, plan, memory, disks) for x in entering]
