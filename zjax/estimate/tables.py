"""Bytes of a plan as tables, and the fastest memory with free bytes for the state."""

import dataclasses
import decimal
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from zjax.replicas.state import run_rows
from zjax.schedule.exchange import make_exchanges
from zjax.settings.batch import resolve_batch
from zjax.settings.schema import Config
from zjax.sharding import memory
from zjax.sharding.describe import format_bytes, render_table
from zjax.sharding.mesh import axes_of, num_shares
from zjax.sharding.naming import position_finder
from zjax.sharding.placement import ArrayPlan
from zjax.sharding.plan import DEVICE, HOST, NVME, Plan
from zjax.sharding.roles import trained
from zjax.sharding.zero import splits_of

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
    is_late = config.zero.placement.delay_updates_from >= 0
    waits_for_norm = updates_wait(config) and not is_late
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
    where = config.zero.placement.gradient_memory
    return Traffic("gradients", where, size, times * size, times * size)


def num_microbatches(plan: Plan, config: Config) -> int:
    """Number of gradient accumulation steps of a planned run."""
    return resolve_batch(config, plan.num_batch_shares).num_microbatches


def kept_rows(plan: Plan, config: Config) -> dict[str, Any]:
    """Plans of the arrays that compressed or local-step communication adds to a state.

    By name; an entry is empty if the run does not keep such arrays.
    """
    state = run_rows(plan, config)
    if not make_exchanges(config).steps_apart:
        return {"errors of the codec": state.extra}
    return {
        "anchor": state.master,
        "outer momentum": state.extra.momentum,
        "errors of the codec": state.extra.errors,
        "means on their way": state.extra.arriving,
    }


LINK_BYTES_PER_SECOND = 42.5e9
"""Full-duplex speed measured between an H200 and its host."""


def describe_memories(
    plan: Plan, config: Config, inputs: Sequence[ArrayPlan] = ()
) -> str:
    """Table of the bytes stored in each memory and moved by a step.

    Empty without offload.
    """
    if not plan.is_offloaded:
        return ""
    traffic = traffic_of_step(plan, config, inputs)
    rows = [
        (x.memory, x.what, *map(format_bytes, (x.stored, x.up, x.down)))
        for x in traffic
    ]
    on_device = format_bytes(memory.stored_bytes(plan).device)
    speed = f"at the {LINK_BYTES_PER_SECOND / 1e9:.1f} GB/s each way of an H200"
    ways = (sum(x.up for x in traffic), sum(x.down for x in traffic))
    seconds = (f"{way / LINK_BYTES_PER_SECOND:.2f} s" for way in ways)
    table = render_table(
        ("memory", "", "rests there", "up in a step", "down in a step"),
        [("device", "", on_device, "", ""), *rows, (speed, "", "", *seconds)],
        right=(2, 3, 4),
    )
    # Disks read and write at the same time, hence the larger of both.
    moved = sum(max(x.up, x.down) for x in traffic if x.memory == "nvme")
    if moved:
        table += f"\nat 1 GB/s each way the disks take {moved / 1e9:.0f} s; "
        paths = ",".join(config.zero.placement.nvme_paths)
        table += f"how fast they are: zjax bench --nvme={paths}"
    return table


def describe_stages(plans: Sequence[Plan], kept: Sequence[Any]) -> str:
    """Table of bytes per device under each ZeRO stage, beside the closed form.

    `plans` are of ZeRO 0 to 3 on one mesh. `kept` holds the replica arrays of each.
    """
    psi = memory.num_params(plans[0])
    per_param = [part / psi for part in memory.plan_bytes(plans[0], kept[0]).parts]
    rows = []
    for plan, more in zip(plans, kept, strict=True):
        planned = memory.plan_bytes(plan, more)
        even = _closed_form(plans[0], kept[0], plan.stage)
        numbers = (*planned.parts, planned.total, even)
        rows.append((str(plan.stage), *map(format_bytes, numbers)))
    form = "+".join(f"{part:.3g}" for part in per_param)
    columns = (
        "ZeRO stage",
        "parameters",
        "gradients",
        "master, optimizer",
        "total",
        f"({form}) Psi",
    )
    return render_table(columns, rows, right=range(1, 6))


def _closed_form(unsharded: Plan, kept: Any, stage: int) -> int | float:
    """Bytes per device if a stage splits arrays evenly, experts over fewer devices.

    Arrays for the communication of replicas are split like the state.
    """
    splits = splits_of(stage)
    master = trained(unsharded.master, unsharded.master)
    state = master, unsharded.opt_state, unsharded.ema
    parts = (
        (unsharded.compute, splits.compute),
        (unsharded.grad_sum, splits.grad_sum),
        (state, splits.state),
    )

    def bytes_of(row: ArrayPlan, is_split: bool) -> int | float:
        if not is_split:
            return row.device_bytes
        # Experts are already split over some ZeRO axes, so ZeRO divides by the
        # remaining axes.
        axes = {axis for axes in axes_of(row.spec, len(row.shape)) for axis in axes}
        zero_axes = [axis for axis in unsharded.zero_axes if axis in axes]
        used = num_shares(unsharded.mesh, zero_axes)
        return row.device_bytes * used / memory.num_zero_shares(unsharded)

    sizes = [
        sum(bytes_of(row, is_split) for row in jax.tree.leaves(tree))
        for tree, is_split in parts
    ]
    share = sizes[-1] / memory.tree_bytes(state)
    return sum(sizes) + share * memory.tree_bytes(kept)


def describe_zero_table(
    num_params: int | float,
    device_counts: Iterable[int],
    optimizer_bytes: int | float = 12.0,
) -> str:
    """Memory table of the ZeRO paper for a model of any size, in GB of 1e9 bytes.

    `optimizer_bytes` is the K of the paper: 12 for Adam with float32 master weights.

    Example:
        >>> print(describe_zero_table(7.5e9, [64]).splitlines()[2].split())
        ['64', '120', '31.4', '16.6', '1.88']

    Reference:
        ZeRO, arXiv:1910.02054, table 1.
    """
    rows = []
    for n in device_counts:
        totals = [
            memory.zero_bytes(num_params, n, s, optimizer_bytes=optimizer_bytes).total
            for s in memory.STAGES
        ]
        rows.append((str(n), *(format_gigabytes(total) for total in totals)))
    columns = ("devices", "stage 0", "stage 1 (os)", "2 (os+g)", "3 (os+g+p)")
    return render_table(columns, rows, right=range(5))


def format_gigabytes(num_bytes: int | float) -> str:
    """GB in the digits of the ZeRO paper: one decimal from 2 GB on, two below.

    Example:
        >>> format_gigabytes(16.640625e9), format_gigabytes(1.875e9)
        ('16.6', '1.88')
    """
    digits = decimal.Decimal("0.1" if num_bytes >= 2e9 else "0.01")
    # Decimal rounds halves up, where Python's float format rounds halves to even.
    gigabytes = decimal.Decimal(num_bytes) / decimal.Decimal(10**9)
    text = str(gigabytes.quantize(digits, decimal.ROUND_HALF_UP))
    return text.rstrip("0").rstrip(".")
