"""Proposes the mesh of `mesh="auto"`: the simplest on which a step fits, and why."""

import dataclasses
import functools
import itertools
import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging
from jax.experimental import multihost_utils

from zjax.config.check import check_config
from zjax.config.model_rules import uneven_heads
from zjax.errors import ConfigError, PlanError, Problem
from zjax.estimate.state import batch_on
from zjax.estimate.traced import count
from zjax.estimate.trial import Machine, Trial, weigh
from zjax.models.build import make_model
from zjax.optim import groups
from zjax.optim.build import make_optimizer
from zjax.processes.host import local_processes
from zjax.settings import axes, schema
from zjax.settings.mixture import describe_blocks, num_blocks
from zjax.sharding import mesh as meshes
from zjax.sharding.activations import map_rows
from zjax.sharding.describe import WIDTH, format_bytes, render_table
from zjax.sharding.zero import splits_of
from zjax.typing import Batch, Device, Model

TOO_FEW_MICROBATCHES = "exceeds num_microbatches"
"""Obstacle of a mesh with more stages than microbatches."""
_WHY = {
    meshes.TENSOR: "matrices split within a host",
    meshes.SEQUENCE: "the activations of one sequence do not fit",
    meshes.PIPELINE: "splits of tensors and sequences alone do not fit",
}


@dataclasses.dataclass(frozen=True)
class Proposal:
    """A proposed mesh with its reasons.

    Args:
        mesh: Proposed mesh; all sizes are 1 or more.
        reasons: Sentences that explain the proposal to the user.
        trials: Meshes in the order in which they were tried; the last is proposed.
        machine: Devices that the mesh is proposed for.
    """

    mesh: schema.Mesh
    reasons: tuple[str, ...]
    trials: tuple[Trial, ...]
    machine: Machine


def describe_proposal(proposal: Proposal) -> str:
    """Text of the trials as a table, the reasons and the flags, in 100 columns."""
    shown = [
        axis
        for axis in axes.AXES
        if any(getattr(trial.mesh, axis) > 1 for trial in proposal.trials)
    ] or [meshes.DATA]
    rows = []
    for trial in proposal.trials:
        sizes = [str(getattr(trial.mesh, axis)) for axis in shown]
        parts = (trial.state, trial.activations, trial.total)
        numbers = [""] * 3 if trial.obstacle else map(format_bytes, parts)
        fits = "taken" if trial.fits(proposal.machine) else "does not fit"
        rows.append((*sizes, *numbers, trial.obstacle or fits))
    columns = (*shown, "state", "activations", "total", "")
    table = render_table(columns, rows, right=range(len(shown) + 3))
    lines = [*proposal.reasons, explicit_setting(proposal.mesh)]
    return "\n".join([table, "", *(textwrap.fill(line, WIDTH) for line in lines)])


def explicit_setting(mesh: schema.Mesh) -> str:
    """Flags that set the axes of a mesh with several devices.

    Example:
        >>> explicit_setting(schema.Mesh(data=4, tensor=2))
        '--config.mesh.data=4 --config.mesh.tensor=2'
    """
    sizes = {axis: getattr(mesh, axis) for axis in axes.AXES}
    given = {k: n for k, n in sizes.items() if n > 1} or {meshes.DATA: 1}
    return " ".join(f"--config.mesh.{axis}={size}" for axis, size in given.items())


def reasons(
    config: schema.Config, trials: Sequence[Trial], machine: Machine
) -> Iterator[str]:
    """Yields sentences that say why the last mesh of `trials` is proposed."""
    mesh = trials[-1].mesh
    if math.isinf(machine.device_bytes):
        yield "The memory of these devices is not known: every mesh is assumed to fit."
    else:
        size, usable = map(format_bytes, (machine.device_bytes, machine.usable_bytes))
        yield f"A step may take {usable} of the {size} of a device."
    for axis, why in _WHY.items():
        size = getattr(mesh, axis)
        # Axes that the user set need no reason.
        if size > 1 and not getattr(config.mesh, axis):
            yield f"{axis}={size}: {why}; {_with_less(axis, trials)}."
    if config.model.moe and mesh.expert == 1:
        yield (
            "expert=1: auto does not split experts, whose best size depends on the "
            "links between devices; set mesh.expert, and compare."
        )
    if mesh.data > 1:
        stage = config.zero.stage
        yield f"data={mesh.data}: the remaining devices; ZeRO {stage} shards over them."
    if mesh.pipeline > 1 and splits_of(config.zero.stage).grad_sum:
        yield (
            f"zero.stage={config.zero.stage} communicates in each tick of a pipeline; "
            "zero.stage=1 once per step, where it fits."
        )


def no_room(
    config: schema.Config,
    trials: Sequence[Trial],
    machine: Machine,
    *,
    user_model: bool = False,
) -> Problem:
    """Problem of a step that fits on no mesh, with settings that need less memory."""
    best = min((x for x in trials if not x.obstacle), key=lambda x: x.total)
    parts = (
        f"state {best.state / 1e9:.1f} GB, activations {best.activations / 1e9:.1f} GB"
    )
    state_fits = best.state <= machine.usable_bytes
    recomputes = user_model or config.model.remat == "full"
    offers = {
        "a higher zero.stage": not splits_of(config.zero.stage).compute,
        "zero.offload='pinned_host'": not config.zero.offloads_state,
        "model.remat='full'": state_fits and not recomputes,
        "a smaller microbatch_size": state_fits and best.of_one < best.activations,
        "more microbatches": any(
            TOO_FEW_MICROBATCHES in trial.obstacle for trial in trials
        ),
        "more devices": True,
    }
    helps = ", ".join(offer for offer, does_help in offers.items() if does_help)
    return Problem(
        "mesh",
        axes.AUTO,
        f"finds no room on {machine.num_devices} x {machine.device_bytes / 1e9:.1f} "
        f"GB: a step takes {best.total / 1e9:.1f} GB "
        f"({parts}) with {explicit_setting(best.mesh)}",
        f"use {helps} or a smaller model",
    )


def _with_less(axis: str, trials: Sequence[Trial]) -> str:
    """Reason why smaller sizes of an axis do not fit: an obstacle, or the bytes."""
    *before, taken = trials
    less = [x for x in before if getattr(x.mesh, axis) < getattr(taken.mesh, axis)]
    weighed = [x for x in less if not x.obstacle]
    if not weighed:
        return less[-1].obstacle
    closest = min(weighed, key=lambda x: x.total)
    return f"smaller sizes take at least {format_bytes(closest.total)}"


def is_open(mesh: schema.Mesh) -> bool:
    """Whether a mesh has axes for zjax to choose, as with `mesh="auto"`.

    Example:
        >>> is_open(schema.Mesh()), is_open(schema.Mesh(tensor=0))
        (False, True)
    """
    return any(getattr(mesh, axis) == 0 for axis in axes.OPEN_AXES)


def choose_mesh(
    config: schema.Config,
    devices: Sequence[Device],
    tx: Any = None,
    own: tuple[Model, Batch] | None = None,
) -> schema.Config:
    """Sets the axes that `mesh="auto"` leaves open, and logs why.

    A collective call. Returns `config` itself if no axis is open. `tx` is the optimizer
    of the user, `own` model and global batch; None for what the config describes.
    """
    if not is_open(config.mesh):
        return config
    proposal = propose_mesh(config, this_machine(devices), tx, own)
    if jax.process_index() == 0:
        logging.warning("mesh='auto':\n%s", describe_proposal(proposal))
    return dataclasses.replace(config, mesh=proposal.mesh)


def this_machine(devices: Sequence[Device]) -> Machine:
    """Describes the devices of a run by the smallest host and the smallest device.

    A collective call of all processes.
    """
    num_local = sum(each.process_index == jax.process_index() for each in devices)
    mesh = meshes.make_mesh(schema.Mesh(), devices)
    per_host = local_processes(num_local).num_devices
    # The minimum over processes, so that all choose one mesh.
    least = np.array([per_host, meshes.device_capacity_bytes(mesh)])
    if jax.process_count() > 1:
        least = multihost_utils.process_allgather(least).min(0)
    return Machine(len(devices), int(least[0]), float(least[1]))


def propose_mesh(
    config: schema.Config,
    machine: Machine,
    tx: Any = None,
    own: tuple[Model, Batch] | None = None,
) -> Proposal:
    """Finds the simplest mesh on which a step fits, without devices.

    The arguments are as for `choose_mesh`.

    Example:
        >>> config = schema.Config(mesh=schema.Mesh(tensor=0))
        >>> proposal = propose_mesh(config, Machine(8, 8, 80e9))
        >>> proposal.mesh.data, proposal.mesh.tensor
        (8, 1)
    """

    @functools.cache
    def parts() -> tuple[Model, Any]:
        """Makes model and optimizer, once the settings have passed the check."""
        model = own[0] if own else make_model(config)
        return model, make_optimizer(config, model) if tx is None else tx

    count_rows = None
    if own:
        closed = close_unused(config.mesh, *own)
        config = dataclasses.replace(config, mesh=closed)
        dtype = config.precision.compute_dtype
        count_rows = row_bytes(*own, dtype)
    is_own, trials = own is not None, list[Trial]()
    for mesh in possible_meshes(config, machine):
        if not _may_split_sequences(config, mesh, trials, machine):
            continue
        obstacle = find_obstacle(config, mesh, machine, tx, user_model=is_own)
        trials.append(
            Trial(mesh, obstacle=obstacle)
            if obstacle
            else weigh(config, mesh, *parts(), count_rows)
        )
        if trials[-1].fits(machine):
            why = tuple(reasons(config, trials, machine))
            return Proposal(mesh, why, tuple(trials), machine)
    if all(trial.obstacle for trial in trials):
        closed = axes.close_axes(config.mesh)
        raise ConfigError(*_problems(config, closed, machine, tx, user_model=is_own))
    raise PlanError(no_room(config, trials, machine, user_model=is_own))


def close_unused(mesh: schema.Mesh, model: Model, batch: Batch) -> schema.Mesh:
    """Closes open axes that split nothing of a model of the user."""
    used = groups.used_axes(model, mesh) & {meshes.TENSOR}
    if any(len(x.shape) > 1 for x in jax.tree.leaves(batch)):
        used |= {meshes.SEQUENCE}
    sizes = {axis: getattr(mesh, axis) for axis in axes.OPEN_AXES}
    closed = {axis: size or 1 for axis, size in sizes.items() if axis not in used}
    return dataclasses.replace(mesh, **closed)


def row_bytes(
    model: Model, batch: Batch, dtype: str
) -> Callable[[int, schema.Mesh], float]:
    """Returns the bytes of activations on a device, by number of rows and mesh."""

    def shape(x: Any, *rows: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*rows, *x.shape[len(rows) :]), x.dtype)

    # A trace of the loss takes long, and many meshes have equal numbers of rows.
    @functools.cache
    def on_one_device(number: int) -> float:
        rows = map_rows(lambda x: shape(x, number), shape, batch, model.entries)
        return count(model, rows, dtype=dtype).activation_bytes

    return lambda number, mesh: on_one_device(number) / (mesh.sequence * mesh.tensor)


def possible_meshes(config: schema.Config, machine: Machine) -> Iterator[schema.Mesh]:
    """Yields the meshes that fill the devices, the simplest first."""
    number = machine.num_devices
    divisors = [n for n in range(1, number + 1) if number % n == 0]
    # In the order of product() below: the last axis grows first, pipelines last.
    options = {
        meshes.PIPELINE: divisors,
        # Tensor parallelism communicates in each layer: it stays on the links of a
        # host.
        meshes.TENSOR: [n for n in divisors if machine.devices_per_host % n == 0],
        meshes.SEQUENCE: divisors,
    }
    for axis in options:
        given = getattr(config.mesh, axis)
        options[axis] = [given] if given else options[axis]
    for sizes in itertools.product(*options.values()):
        sized = dict(zip(options, sizes, strict=True))
        mesh = dataclasses.replace(config.mesh, **sized)
        candidate = dataclasses.replace(config, mesh=mesh)
        if axes.mesh_fills(candidate, number):
            yield dataclasses.replace(mesh, **axes.axis_sizes(candidate, number))


def _problems(
    config: schema.Config,
    mesh: schema.Mesh,
    machine: Machine,
    tx: Any,
    *,
    user_model: bool,
) -> tuple[Problem, ...]:
    """Problems that the config check finds for a mesh."""
    try:
        candidate = dataclasses.replace(config, mesh=mesh)
        check_config(
            candidate,
            machine.num_devices,
            user_model=user_model,
            user_optimizer=tx is not None,
            user_batches=True,  # no mesh depends on the data, which the run checks
        )
    except ConfigError as error:
        return error.problems
    return ()


def _may_split_sequences(
    config: schema.Config, mesh: schema.Mesh, trials: list[Trial], machine: Machine
) -> bool:
    """Whether the activations of one sequence, not the state, exceed the memory."""
    if config.mesh.sequence or mesh.sequence == 1:
        return True
    alike = [
        trial
        for trial in trials
        if (trial.mesh.pipeline, trial.mesh.tensor) == (mesh.pipeline, mesh.tensor)
        and not trial.obstacle
    ]
    if not alike:
        return False
    free = machine.usable_bytes - alike[-1].state
    # More state than activations calls for other splits first: tensors, then stages.
    return alike[-1].of_one > max(free, alike[-1].state)


def find_obstacle(
    config: schema.Config,
    mesh: schema.Mesh,
    machine: Machine,
    tx: Any,
    *,
    user_model: bool = False,
) -> str:
    """Reason why a mesh cannot work, or is not proposed; empty if it can."""
    problems = _problems(config, mesh, machine, tx, user_model=user_model)
    if problems:
        return str(problems[0]).partition(";")[0]
    if user_model:
        return ""
    model, number = config.model, batch_on(config, mesh).num_microbatches
    heads = "" if config.mesh.tensor else uneven_heads(model, mesh.tensor)
    if heads:
        return f"tensor={mesh.tensor} does not divide {heads}"
    # The config check judges stages of the user; these limits are for proposals.
    if config.mesh.pipeline:
        return ""
    stages = f"pipeline={mesh.pipeline}"
    if num_blocks(model) % mesh.pipeline:
        return f"{stages} does not divide {describe_blocks(model)}"
    if mesh.pipeline > number:
        return f"{stages} {TOO_FEW_MICROBATCHES}={number}"
    return ""
