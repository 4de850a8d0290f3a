"""Bytes of a plan as tables: by memory, by ZeRO stage, and by the ZeRO paper."""

import decimal
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from zjax.estimate.spill import traffic_of_step
from zjax.optim.rounds import make_rounds
from zjax.settings.schema import Config
from zjax.sharding import memory
from zjax.sharding.describe import format_bytes, render_table
from zjax.sharding.frozen import trained
from zjax.sharding.mesh import num_shares
from zjax.sharding.placement import ArrayPlan
from zjax.sharding.plan import Plan
from zjax.sharding.rules import axes_of
from zjax.sharding.zero import splits_of
from zjax.train.state import state_rows


def kept_rows(plan: Plan, config: Config) -> dict[str, Any]:
    """Plans of the arrays that compressed or local-step communication adds to a state.

    By name; an entry is empty if the run does not keep such arrays.
    """
    state = state_rows(plan, config)
    if make_rounds(config) is None:
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
        paths = ",".join(config.zero.nvme_paths)
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
