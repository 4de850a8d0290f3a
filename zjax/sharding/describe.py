"""Plans as text: every array with its sharding and bytes, for a terminal."""

import collections
import io
import re
import shutil
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from zjax.sharding import memory
from zjax.sharding.mesh import TENSOR, axes_of
from zjax.sharding.placement import ArrayPlan, array_bytes
from zjax.sharding.plan import Plan

WIDTH = 100


def describe_plan(plan: Plan, kept: Mapping[str, Any] | None = None) -> str:
    """Lists every array of a plan with its shape, spec, memory and bytes per device.

    Equal arrays of different layers share a line.

    Args:
        plan: The plan of a run.
        kept: Plans, by name, of the arrays that replicas keep for compressed
            communication, such as error feedback.

    Returns:
        Text as wide as the terminal, and at least 100 columns.
    """
    rows = []
    for role, leaves in _roles(plan, kept):
        rows += _role_rows(role, leaves)
    columns = ("array", "", "shape", "dtype", "spec", "memory", "bytes/device")
    table = render_table(columns, rows, right=(1, 6))
    return f"{_title(plan)}\n{table}\n{describe_plan_totals(plan, kept)}"


def describe_plan_totals(plan: Plan, kept: Mapping[str, Any] | None = None) -> str:
    """Adds up the bytes of the arrays of each role of a plan.

    Args:
        plan: The plan of a run.
        kept: Plans, by name, of the arrays that replicas keep for compressed
            communication, such as error feedback.

    Returns:
        A table of bytes of the model and of one device, and the arrays of a batch that
        are cast.
    """
    rows = []
    for role, leaves in _roles(plan, kept):
        total = sum(array_bytes(row.shape, row.stored_dtype) for row in leaves)
        per_device = sum(row.device_bytes for row in leaves)
        share = f"1/{total / per_device:.2f}" if per_device < total else "whole"
        memories = ", ".join(sorted({row.memory for row in leaves}))
        cells = (role, str(len(leaves)), memories)
        rows.append((*cells, format_bytes(total), format_bytes(per_device), share))
    columns = ("", "arrays", "memory", "whole model", "per device", "share")
    table = render_table(columns, rows, right=(1, 3, 4, 5))
    title = f"{_title(plan)}, {memory.num_params(plan):,} parameters"
    return "\n".join([title, table, *_batch_casts(plan)])


def _batch_casts(plan: Plan) -> list[str]:
    """Lines that name the batch arrays cast to a dtype below float32."""
    casts = [f"{x} to {d}" for x, d in plan.batch_casts.items() if d != "float32"]
    text = f"cast in a batch: {', '.join(casts)}" if casts else ""
    return textwrap.wrap(text, WIDTH)


def _title(plan: Plan) -> str:
    """Names the ZeRO stage and the mesh axes of more than one device."""
    mesh = ", ".join(f"{k}={n}" for k, n in plan.mesh.shape.items() if n > 1)
    return f"plan: ZeRO {plan.stage} on mesh ({mesh or 'one device'})"


def _roles(
    plan: Plan, kept: Mapping[str, Any] | None
) -> list[tuple[str, list[ArrayPlan]]]:
    """Arrays of a plan by the title of their role, without empty roles."""
    master = "master weights" + (", low bits" if plan.splits_master else "")
    rows = jax.tree.leaves(plan.master)
    trees = {
        master: [row for row in rows if not row.is_frozen],
        "frozen parameters": [row for row in rows if row.is_frozen],
        "optimizer state": plan.opt_state,
        "averaged weights": plan.ema,
        "gradient sum": plan.grad_sum,
        "params of a node"
        if plan.has_secondary_partition
        else "parameters in use": plan.compute,
        "model state": plan.model_state,
    }
    trees |= kept or {}
    roles = [(role, jax.tree.leaves(tree)) for role, tree in trees.items()]
    return [(role, leaves) for role, leaves in roles if leaves]


def describe_unsharded(plan: Plan) -> str:
    """Lists the parameters that the tensor axis does not shard, the largest first.

    Each line ends with the setting that would shard the parameter. The text is empty
    without a tensor axis or where all parameters are sharded.
    """
    rows = jax.tree.leaves(plan.compute)
    paths: dict[str, list[ArrayPlan]] = collections.defaultdict(list)
    for row in rows:
        if TENSOR not in sum(axes_of(row.spec, len(row.shape)), ()):
            paths[row.path].append(row)
    if plan.mesh.shape[TENSOR] == 1 or not paths:
        return ""
    sizes = {path: memory.tree_bytes(rows) for path, rows in paths.items()}
    lines, vectors = [], []
    for path in sorted(paths, key=lambda path: -sizes[path]):
        row = paths[path][0]
        # The dim of stacked layers is no dim of the rule that is suggested.
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


def format_bytes(num_bytes: int | float) -> str:
    """Formats bytes with a decimal unit, in three or four digits."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes:.0f} B"


def render_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], right: Iterable[int] = ()
) -> str:
    """Renders a table of text, as wide as the terminal and at least 100 characters.

    Cells too long for a column are folded, never truncated.
    """
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    right = tuple(right)
    for index, column in enumerate(columns):
        side = "right" if index in right else "left"
        table.add_column(column, justify=side, overflow="fold")
    for row in rows:
        table.add_row(*row)
    out = io.StringIO()
    width = max(WIDTH, shutil.get_terminal_size((WIDTH, 0)).columns)
    # Rich would read brackets in cells as markup, and would write HTML in a notebook.
    Console(file=out, width=width, color_system=None, force_jupyter=False).print(
        table, markup=False
    )
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def _role_rows(role: str, leaves: list[ArrayPlan]) -> list[tuple[str, ...]]:
    """Lines of one role: the total, then one line per group of equal arrays."""
    groups: dict[Any, list[ArrayPlan]] = collections.defaultdict(list)
    for row in leaves:
        # Only whole path components: the digit of `conv1` is part of a name.
        name = re.sub(r"(?<![^/])\d+(?![^/])", "*", row.path)
        groups[name, row.shape, _dtype(row), str(row.spec)].append(row)
    lines = [
        (
            f"  {name}",
            f"x{len(rows)}" if len(rows) > 1 else "",
            _shape(rows[0]),
            dtype,
            _spec(rows[0]),
            rows[0].memory,
            format_bytes(sum(row.device_bytes for row in rows)),
        )
        for (name, _, dtype, _), rows in groups.items()
    ]
    total = format_bytes(sum(row.device_bytes for row in leaves))
    return [(role, f"x{len(leaves)}", "", "", "", "", total), *lines]


def _shape(row: ArrayPlan) -> str:
    """Formats the logical shape, and the padded one where storage differs."""
    text = "x".join(map(str, row.shape)) or "scalar"
    stored = "x".join(map(str, row.stored_shape))
    return text if row.shape == row.stored_shape else f"{text} in {stored}"


def _dtype(row: ArrayPlan) -> str:
    """Formats the stored dtype, with the codec by which nodes exchange the array."""
    return f"{row.stored_dtype} ({row.codec})" if row.codec else str(row.stored_dtype)


def _spec(row: ArrayPlan) -> str:
    """Formats the mesh axes of each dim of a stored array."""
    entries = ["+".join(e) if isinstance(e, tuple) else e or "-" for e in row.spec]
    return ",".join(entries) if any(e != "-" for e in entries) else "whole"
