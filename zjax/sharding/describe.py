"""A plan as text: every array, its place and its bytes, in a table for a terminal."""

import collections
import decimal
import io
import math
import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from zjax.config.schema import Config
from zjax.sharding import memory
from zjax.sharding.mesh import TENSOR
from zjax.sharding.placement import ArrayPlan, dtype_bytes
from zjax.sharding.plan import DEVICE, NVME, Plan
from zjax.sharding.rules import axes_of
from zjax.sharding.traffic import traffic_of_step

WIDTH = 100
LINK_BYTES_PER_SECOND = 42.5e9
"""Each way at once, measured between an H200 and its host."""


def describe_plan(plan: Plan) -> str:
    """Lists every array of a plan with its shape, spec, memory and bytes per device.

    Equal arrays of different layers share a line.

    Args:
        plan: Placement of every array.

    Returns:
        Text of at most 100 columns.
    """
    rows = []
    for role, leaves in _roles(plan):
        rows += _role_rows(role, leaves)
    columns = ("array", "", "shape", "dtype", "spec", "memory", "bytes/device")
    table = render_table(columns, rows, right=(1, 6))
    return f"{_title(plan)}\n{table}\n{describe_plan_totals(plan)}"


def describe_plan_totals(plan: Plan) -> str:
    """Adds up the arrays of each role of a plan.

    Args:
        plan: Placement of every array.

    Returns:
        A table of text: whole model, one device, and the part that is. Below it, which
        arrays of a batch are cast.
    """
    rows = []
    for role, leaves in _roles(plan):
        whole = sum(
            math.prod(row.shape) * dtype_bytes(row.stored_dtype) for row in leaves
        )
        per_device = sum(row.device_bytes for row in leaves)
        share = f"1/{whole / per_device:.2f}" if per_device < whole else "whole"
        memories = ", ".join(sorted({row.memory for row in leaves}))
        cells = (role, str(len(leaves)), memories)
        rows.append((*cells, format_bytes(whole), format_bytes(per_device), share))
    columns = ("", "arrays", "memory", "whole model", "per device", "share")
    table = render_table(columns, rows, right=(1, 3, 4, 5))
    title = f"{_title(plan)}, {memory.num_params(plan):,} parameters"
    return "\n".join([title, table, *_batch_casts(plan)])


def _batch_casts(plan: Plan) -> list[str]:
    """Those by which numbers lose digits."""
    casts = [f"{x} to {d}" for x, d in plan.batch_casts.items() if d != "float32"]
    text = f"cast in a batch: {', '.join(casts)}" if casts else ""
    return textwrap.wrap(text, WIDTH)


def _title(plan: Plan) -> str:
    mesh = ", ".join(f"{k}={n}" for k, n in plan.mesh.shape.items() if n > 1)
    return f"plan: ZeRO {plan.stage} on mesh ({mesh or 'one device'})"


def _roles(plan: Plan) -> list[tuple[str, list[ArrayPlan]]]:
    master = "master weights" + (", lower half" if plan.splits_master else "")
    trees = {
        master: plan.master,
        "optimizer state": plan.opt_state,
        "averaged weights": plan.ema,
        "gradient sum": plan.grad_sum,
        "parameters in use": plan.compute,
        "model state": plan.model_state,
    }
    roles = [(role, jax.tree.leaves(tree)) for role, tree in trees.items()]
    return [(role, leaves) for role, leaves in roles if leaves]


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


def describe_whole(plan: Plan) -> str:
    """Lists the parameters that the tensor axis does not split, and what they cost.

    Args:
        plan: Placement of every array.

    Returns:
        A table of the parameters in use, the largest first, and the setting that would
        split them; empty without a tensor axis, and where all are split.
    """
    rows = jax.tree.leaves(plan.compute)
    paths: dict[str, list[ArrayPlan]] = collections.defaultdict(list)
    for row in rows:
        if TENSOR not in sum(axes_of(row.spec, len(row.shape)), ()):
            paths[row.path].append(row)
    if plan.mesh.shape[TENSOR] == 1 or not paths:
        return ""
    sizes = {path: sum(r.device_bytes for r in own) for path, own in paths.items()}
    lines, vectors = [], []
    for path in sorted(paths, key=lambda path: -sizes[path]):
        row = paths[path][0]
        shape = row.shape[1:] if row.num_layers else row.shape
        if len(shape) < 2:
            vectors.append(path)
            continue
        dims = ("",) * shape.index(max(shape)) + (TENSOR,)
        cells = (path, _shape(row), format_bytes(sizes[path]))
        lines.append((*cells, f"[{{'pattern': '{path}', 'dims': {dims}}}]"))
    if vectors:
        size = format_bytes(sum(map(sizes.__getitem__, vectors)))
        lines.append((f"{len(vectors)} vectors", "", size, "not worth it"))
    total = format_bytes(sum(row.device_bytes for row in rows))
    title = f"whole over {TENSOR}={plan.mesh.shape[TENSOR]}: "
    title += f"{format_bytes(sum(sizes.values()))} per device of {total} in use"
    columns = ("array", "shape", "bytes/device", "split by mesh.rules=")
    return f"{title}\n{render_table(columns, lines, right=(2,))}"


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


def format_bytes(num_bytes: int | float) -> str:
    """Bytes with a decimal unit.

    Args:
        num_bytes: 0 or more.

    Returns:
        Three or four digits and a unit.

    Example:
        >>> format_bytes(512), format_bytes(1.5e9)
        ('512 B', '1.50 GB')
    """
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes:.0f} B"


def render_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], right: Iterable[int] = ()
) -> str:
    """Lays text out in columns.

    Args:
        columns: Headings.
        rows: Cells, one sequence per row.
        right: Columns aligned to the right.

    Returns:
        Text of at most 100 columns without trailing spaces.
    """
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index in tuple(right) else "left")
    for row in rows:
        table.add_row(*row)
    out = io.StringIO()
    Console(file=out, width=WIDTH, color_system=None, force_jupyter=False).print(
        table, markup=False
    )
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def _role_rows(role: str, leaves: list[ArrayPlan]) -> list[tuple[str, ...]]:
    groups: dict[Any, list[ArrayPlan]] = collections.defaultdict(list)
    for row in leaves:
        name = re.sub(r"(?<![^/])\d+(?![^/])", "*", row.path)
        groups[name, row.shape, row.stored_dtype, str(row.spec)].append(row)
    lines = [
        (
            f"  {name}",
            f"x{len(rows)}" if len(rows) > 1 else "",
            _shape(rows[0]),
            str(dtype),
            _spec(rows[0]),
            rows[0].memory,
            format_bytes(sum(row.device_bytes for row in rows)),
        )
        for (name, _, dtype, _), rows in groups.items()
    ]
    total = format_bytes(sum(row.device_bytes for row in leaves))
    return [(role, f"x{len(leaves)}", "", "", "", "", total), *lines]


def _shape(row: ArrayPlan) -> str:
    text = "x".join(map(str, row.shape)) or "scalar"
    stored = "x".join(map(str, row.stored_shape))
    return text if row.shape == row.stored_shape else f"{text} in {stored}"


def _spec(row: ArrayPlan) -> str:
    entries = ["+".join(e) if isinstance(e, tuple) else e or "-" for e in row.spec]
    return ",".join(entries) if any(e != "-" for e in entries) else "whole"
