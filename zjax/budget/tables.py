"""Bytes of a plan as tables: by memory, by ZeRO stage, and by the ZeRO paper."""

import decimal
from collections.abc import Iterable, Sequence

from zjax.budget.traffic import traffic_of_step
from zjax.config.schema import Config
from zjax.sharding import memory
from zjax.sharding.describe import format_bytes, render_table
from zjax.sharding.placement import ArrayPlan
from zjax.sharding.plan import DEVICE, NVME, Plan

LINK_BYTES_PER_SECOND = 42.5e9
"""Each way at once, measured between an H200 and its host."""


def describe_memories(
    plan: Plan, config: Config, inputs: Sequence[ArrayPlan] = ()
) -> str:
    """What is stored in each memory, and what a step moves between them.

    Args:
        plan: Placement of every array.
        config: As of `traffic_of_step`.
        inputs: As of `traffic_of_step`.

    Returns:
        A table of text in bytes per device, with the time that the way takes at the
        speed of a link of PCIe 5; empty where nothing is moved.
    """
    if not plan.is_offloaded:
        return ""
    traffic = traffic_of_step(plan, config, inputs)
    rows = [
        (x.memory, x.what, *map(format_bytes, (x.resting, x.up, x.down)))
        for x in traffic
    ]
    on_device = format_bytes(memory.resting_bytes(plan, DEVICE))
    speed = f"at the {LINK_BYTES_PER_SECOND / 1e9:.1f} GB/s each way of an H200"
    ways = (sum(x.up for x in traffic), sum(x.down for x in traffic))
    seconds = (f"{way / LINK_BYTES_PER_SECOND:.2f} s" for way in ways)
    table = render_table(
        ("memory", "", "rests there", "up in a step", "down in a step"),
        [(DEVICE, "", on_device, "", ""), *rows, (speed, "", "", *seconds)],
        right=(2, 3, 4),
    )
    moved = [max(x.up, x.down) for x in traffic if x.memory == NVME]
    if moved:
        table += f"\nat 1 GB/s each way the disks take {sum(moved) / 1e9:.0f} s; "
        table += (
            f"how fast they are: zjax bench --nvme={','.join(config.zero.nvme_paths)}"
        )
    return table


def describe_stages(plans: Sequence[Plan]) -> str:
    """Sets bytes per device of a model under each ZeRO stage beside the closed form.

    Args:
        plans: One plan per stage from 0 on, of one model on one mesh.

    Returns:
        A table of text; its last column is (p + g + K) bytes per parameter, divided as
        the stage says.
    """
    psi = memory.num_params(plans[0])
    per_param = [part / psi for part in memory.plan_bytes(plans[0]).parts]
    rows = []
    for plan in plans:
        own = memory.plan_bytes(plan)
        formula = memory.zero_bytes(
            psi,
            memory.num_zero_shares(plan),
            plan.stage,
            parameter_bytes=per_param[0],
            gradient_bytes=per_param[1],
            optimizer_bytes=per_param[2],
        )
        numbers = (*own.parts, own.total, formula.total)
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


def describe_zero_table(
    num_params: int | float,
    device_counts: Iterable[int],
    optimizer_bytes: int | float = 12.0,
) -> str:
    """The memory table of the ZeRO paper for a model of any size.

    Args:
        num_params: Parameters of the model.
        device_counts: Numbers of devices, one row each.
        optimizer_bytes: K; 12 for Adam with float32 master weights.

    Returns:
        A table in GB (1e9 bytes) per device.

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
    """Bytes as GB the way the ZeRO paper prints them.

    Args:
        num_bytes: 0 or more.

    Returns:
        One decimal from 2 GB on, two below; no trailing zeros.

    Example:
        >>> format_gigabytes(16.640625e9), format_gigabytes(1.875e9)
        ('16.6', '1.88')
    """
    digits = decimal.Decimal("0.1" if num_bytes >= 2e9 else "0.01")
    gigabytes = decimal.Decimal(num_bytes) / decimal.Decimal(10**9)
    text = str(gigabytes.quantize(digits, decimal.ROUND_HALF_UP))
    return text.rstrip("0").rstrip(".")
