"""Reports what generation would take: the text of `zjax plan --generate`."""

import math
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh

from zjax.config.check import check_config
from zjax.errors import ConfigError, Problem
from zjax.estimate import mesh as mesh_choice
from zjax.estimate.device_memory import known_memory, named_memory
from zjax.estimate.link_speed import ASSUMED_DEVICE
from zjax.estimate.models import add_held, weigh_run
from zjax.generation.dtypes import COMPUTE, Dtypes
from zjax.generation.footprint import (
    HOST_BYTES_PER_SECOND,
    Footprint,
    footprint_of,
)
from zjax.generation.prompts import longest_text
from zjax.generation.sizes import PAGE_SIZE, size_problems
from zjax.models.build import make_model
from zjax.optim.build import make_optimizer
from zjax.settings.schema import Config
from zjax.sharding import mesh as meshes
from zjax.sharding.describe import format_bytes, render_table
from zjax.sharding.memory import num_params
from zjax.sharding.plan import Plan, make_plan

_REMEDY = "use more devices with mesh.tensor or mesh.expert, offload, or shorter rows"
_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_JAX_SHARE = 0.75
"""Share of a GPU's memory that JAX takes where the environment does not say."""


class Memory(NamedTuple):
    """Memory of a device that a generator may take."""

    num_bytes: int | float
    """Infinite if it is not known."""
    bytes_per_second: float
    source: str
    """Device, and what is assumed of it."""


def report_generation(
    config: Config,
    *,
    num_devices: int = 0,
    device: str = "",
    device_gb: int | float = 0,
    max_rows: int = 64,
    max_length: int = 0,
    dtypes: Dtypes = COMPUTE,
) -> str:
    """Plans generation with the weights of a run: bytes on a device, and least times.

    Args:
        config: Settings of a run of the built-in decoder.
        num_devices: Devices to plan for; 0 are the devices of this machine.
        device: Name of the devices, such as `H200`; "" are the devices of this machine.
        device_gb: Memory of a device that JAX may take; 0 is what is known of it.
        max_rows: Most texts that a data shard writes at once.
        max_length: Most tokens of a prompt with a text; 0 is what the model allows.
        dtypes: How weights and keys are stored.

    Raises:
        ConfigError: A number is out of range, or the model writes no text.
    """
    if problems := [*size_problems(config.model, max_rows, max_length)]:
        raise ConfigError(*problems)
    max_length = max_length or longest_text(config.model)[1]
    plan, footprint = plan_generation(config, num_devices, dtypes)
    memory = _find_memory(plan.mesh, device, device_gb)
    num_rows = footprint.fit_rows(memory.num_bytes, max_rows, max_length)
    starts = footprint.start_bytes <= memory.num_bytes
    rollout = _describe_rollout(config, plan, footprint, memory, max_rows, max_length)
    parts = [
        _describe_device(plan, memory),
        _describe_bytes(footprint, memory, num_rows, max_length, rollout),
    ]
    if num_rows and starts:
        counts, shards = sorted({1, num_rows}), _count_shards(plan)
        parts.append(_describe_steps(footprint, memory, counts, max_length, shards))
    else:
        problem = f"no row of {max_length:,} tokens fits beside the weights"
        if not starts:
            problem = "the weights do not fit at the start, with a block as it is cut"
        parts.append(f"{problem}:\n{_REMEDY}")
    return "\n\n".join(parts)


def plan_generation(
    config: Config, num_devices: int = 0, dtypes: Dtypes = COMPUTE
) -> tuple[Plan, Footprint]:
    """Plans the weights of a generator; `num_devices=0` takes this machine's devices.

    Raises:
        ConfigError: The mesh is open, or the model writes no text.
    """
    if mesh_choice.is_open(config.mesh):
        problem = "is chosen by what training takes"
        remedy = "set the axes, such as mesh.tensor=2"
        raise ConfigError(Problem("mesh", "auto", problem, remedy))
    check_config(config, num_devices or jax.device_count())
    if num_devices:
        mesh = meshes.abstract_mesh(config.mesh, num_devices)
    else:
        mesh = meshes.make_mesh(config.mesh)
    model = make_model(config)
    plan = make_plan(config, mesh, model, make_optimizer(config, model))
    return plan, footprint_of(config, plan, model, dtypes)


def _find_memory(
    mesh: Mesh | AbstractMesh, device: str, device_gb: int | float
) -> Memory:
    """Finds the memory of a device: as given, of this machine, or assumed."""
    here = jax.devices()[0].device_kind
    known = named_memory(device) if device else known_memory(here)
    usable = device_gb * 1e9 or meshes.device_capacity_bytes(mesh)
    if device and not device_gb:
        usable = _jax_share() * named_memory(device).num_bytes
    source = device or here
    if known is None:
        known = named_memory(ASSUMED_DEVICE)
        source = f"{here}, with the bandwidth of an {ASSUMED_DEVICE}"
    return Memory(usable, known.bytes_per_second, source)


def _jax_share() -> float:
    """Share of a GPU's memory that JAX takes."""
    return float(os.environ.get(_FRACTION) or _JAX_SHARE)


def _count_shards(plan: Plan) -> int:
    """Counts the data shards, which have rows and pages apart."""
    return meshes.num_shares(plan.mesh, (meshes.REPLICA, meshes.DATA))


def describe_shards(num_shards: int) -> str:
    """Returns the line that says of which rows a table is; empty for one shard."""
    text = f"rows are of each of {num_shards} data shards, tokens/s of all shards\n"
    return text if num_shards > 1 else ""


def _describe_device(plan: Plan, memory: Memory) -> str:
    """Names the model and the devices."""
    number, size = memory.num_bytes, "memory unknown"
    if math.isfinite(number):
        size = f"{format_bytes(number)} for JAX"
    speed = f"{format_bytes(memory.bytes_per_second)}/s"
    count = plan.mesh.size
    devices = f"{count} device{'s' if count > 1 else ''}"
    return (
        f"generation with {num_params(plan):,} parameters on {devices}\n"
        f"({memory.source}: {size}, {speed})"
    )


def _describe_bytes(
    footprint: Footprint,
    memory: Memory,
    num_rows: int,
    max_length: int,
    more: Sequence[tuple[str, str]],
) -> str:
    """Table of the bytes on a device, and of what fits; ends with further cells."""
    cells = [("weights", format_bytes(footprint.resident_bytes))]
    if not footprint.streamed_bytes:
        start = format_bytes(footprint.start_bytes)
        cells.append(("weights at the start, with a block twice", start))
    else:
        streamed = format_bytes(footprint.streamed_bytes)
        cells.append(("weights that come for each step", streamed))
    token = footprint.token_bytes
    held = footprint.row_pages(max_length) * PAGE_SIZE
    holds = f", which holds {held:,}" if held < max_length else ""
    cells += [
        ("keys and values of a token", format_bytes(token)),
        (f"row of {max_length:,} tokens{holds}", format_bytes(held * token)),
    ]
    if math.isfinite(memory.num_bytes):
        tokens = footprint.fit_tokens(memory.num_bytes)
        cells.append(("tokens that fit beside the weights", f"{tokens:,}"))
        cells.append((f"pages of {PAGE_SIZE} tokens", f"{tokens // PAGE_SIZE:,}"))
        cells.append(("rows that fit, up to max_rows", f"{num_rows:,}"))
    return render_table(("", "on a device"), [*cells, *more], right=(1,))


def _describe_rollout(
    config: Config,
    plan: Plan,
    footprint: Footprint,
    memory: Memory,
    max_rows: int,
    max_length: int,
) -> list[tuple[str, str]]:
    """Cells on a rollout, beside the state of all models; empty without `rl`."""
    models = weigh_run(config, plan.mesh.size)
    if not models:
        return []
    held = add_held(models).device
    rows = footprint.fit_rows(memory.num_bytes - held, max_rows, max_length)
    return [
        ("state of zjax rl, which a rollout leaves in place", format_bytes(held)),
        ("rows of a rollout that fit, up to max_rows", f"{rows:,}"),
    ]


def _describe_steps(
    footprint: Footprint,
    memory: Memory,
    counts: Sequence[int],
    max_length: int,
    num_shards: int,
) -> str:
    """Table of the bytes that a step reads, and of the least time."""
    cells = []
    for rows in counts:
        seconds = footprint.step_seconds(rows, max_length, memory.bytes_per_second)
        cells.append(
            (
                f"{rows}",
                format_bytes(footprint.weight_bytes(rows)),
                format_bytes(footprint.cache_bytes(rows, max_length)),
                f"{1e3 * seconds:.3g}",
                f"{num_shards * rows / seconds:,.0f}",
            )
        )
    columns = "rows", "weights read", "cache read", "ms a token", "new tokens/s"
    table = render_table(columns, cells, right=range(5))
    title = describe_shards(num_shards)
    title += f"a token for each row of {max_length:,} tokens, as fast as memory allows"
    return "\n".join([title, table, *_notes(footprint, counts)])


def _notes(footprint: Footprint, counts: Sequence[int]) -> Iterator[str]:
    """Yields what a step reads of experts, and over which link weights come."""
    if footprint.num_experts:
        shares = [f"{footprint.touched_experts(rows):.0%}" for rows in counts]
        rows = " and ".join(map(str, counts))
        yield f"of the experts, {rows} rows read {' and '.join(shares)} on average"
    if footprint.streamed_bytes:
        speed = format_bytes(HOST_BYTES_PER_SECOND)
        yield f"weights come at {speed}/s; disks may be slower (zjax bench --nvme)"
