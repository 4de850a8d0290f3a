"""The mesh of `mesh="auto"`: the simplest on which a step of a built-in model fits.

Axes are tried in this order, each only where the ones before do not suffice:

1. `data` alone;
2. `sequence`, where the activations of one sequence take more than the state and do not
   fit beside it;
3. `tensor`, as small as fits, within a host and dividing the heads;
4. `pipeline`, as few equal stages as fit, with no fewer microbatches; `data` takes the
   remaining devices. The ZeRO stage is that of the config.

Reference: Narayanan et al., arXiv:2104.04473, section 3; "DeepSpeed: Extreme-scale
model training for everyone", 2020.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging
from jax.experimental import multihost_utils

from zjax.budget.reasons import (
    TOO_FEW_MICROBATCHES,
    Proposal,
    describe_proposal,
    no_room,
    reasons,
)
from zjax.budget.trial import Machine, Trial, batch_on, weigh
from zjax.config import axes, schema
from zjax.config.check import check_config
from zjax.config.mixture import describe_blocks, num_blocks
from zjax.config.model_rules import uneven_heads
from zjax.errors import ConfigError, PlanError, Problem
from zjax.models.build import make_model
from zjax.optim.build import make_optimizer
from zjax.processes.host import local_processes
from zjax.sharding import mesh as meshes
from zjax.typing import Device, Model


def is_open(mesh: schema.Mesh) -> bool:
    """Whether a mesh has axes for zjax to choose, as `mesh="auto"` has.

    Example:
        >>> is_open(schema.Mesh()), is_open(schema.Mesh(tensor=0))
        (False, True)
    """
    return any(getattr(mesh, axis) == 0 for axis in axes.OPEN_AXES)


def choose_mesh(
    config: schema.Config, devices: Sequence[Device], tx: Any = None
) -> schema.Config:
    """Sets the axes that `mesh="auto"` leaves open, and logs why.

    Args:
        config: Settings, checked or not.
        devices: Devices of the run; a collective call of all processes.
        tx: Optax gradient transformation of the caller; None for that of the config.

    Returns:
        The settings with the size of every axis; `config` itself if none is open.

    Raises:
        ConfigError: Settings that cannot work on any mesh.
        PlanError: No mesh has room for a step.
    """
    if not is_open(config.mesh):
        return config
    proposal = propose_mesh(config, this_machine(devices), tx)
    if jax.process_index() == 0:
        logging.warning("mesh='auto':\n%s", describe_proposal(proposal))
    return dataclasses.replace(config, mesh=proposal.mesh)


def this_machine(devices: Sequence[Device]) -> Machine:
    """The machine that these devices are; a collective call of all processes.

    Args:
        devices: Devices of the run over all processes.

    Returns:
        The fewest devices of any host and the least memory of any device.
    """
    num_local = sum(each.process_index == jax.process_index() for each in devices)
    mesh = meshes.make_mesh(schema.Mesh(), devices)
    per_host = local_processes(num_local).num_devices
    least = np.array([per_host, meshes.device_capacity_bytes(mesh)])
    if jax.process_count() > 1:
        least = multihost_utils.process_allgather(least).min(0)
    return Machine(len(devices), int(least[0]), float(least[1]))


def propose_mesh(config: schema.Config, machine: Machine, tx: Any = None) -> Proposal:
    """Finds the simplest mesh on which a step fits, without devices.

    Args:
        config: Settings; mesh axes of size 0 are open.
        machine: The devices to fit.
        tx: Optax gradient transformation of the caller; None for that of the config.

    Returns:
        The mesh and the reasons.

    Raises:
        ConfigError: Settings that cannot work on any mesh.
        PlanError: A step fits on no mesh.

    Example:
        >>> config = schema.Config(mesh=schema.Mesh(tensor=0))
        >>> proposal = propose_mesh(config, Machine(8, 8, 80e9))
        >>> proposal.mesh.data, proposal.mesh.tensor
        (8, 1)
    """

    @functools.cache
    def parts() -> tuple[Model, Any]:
        """The model and the optimizer, made once settings have passed their check."""
        model = make_model(config)
        return model, make_optimizer(config, model) if tx is None else tx

    trials: list[Trial] = []
    for mesh in possible_meshes(config, machine):
        if not _may_split_sequences(config, mesh, trials, machine):
            continue
        obstacle = find_obstacle(config, mesh, machine, tx)
        trials.append(
            Trial(mesh, obstacle=obstacle)
            if obstacle
            else weigh(config, mesh, *parts())
        )
        if trials[-1].fits(machine):
            why = tuple(reasons(config, trials, machine))
            return Proposal(mesh, why, tuple(trials), machine)
    if all(trial.obstacle for trial in trials):
        raise _refusal(config, machine, tx)
    raise PlanError(no_room(config, trials, machine))


def possible_meshes(config: schema.Config, machine: Machine) -> Iterator[schema.Mesh]:
    """Meshes that fill the devices, the simplest first."""
    number = machine.num_devices
    divisors = [n for n in range(1, number + 1) if number % n == 0]
    options = {
        meshes.PIPELINE: divisors,
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
    config: schema.Config, mesh: schema.Mesh, machine: Machine, tx: Any
) -> tuple[Problem, ...]:
    try:
        candidate = dataclasses.replace(config, mesh=mesh)
        check_config(
            candidate,
            machine.num_devices,
            user_optimizer=tx is not None,
            user_batches=True,  # no mesh depends on the data, which the run checks
        )
    except ConfigError as error:
        return error.problems
    return ()


def _refusal(config: schema.Config, machine: Machine, tx: Any) -> ConfigError:
    return ConfigError(*_problems(config, axes.close_axes(config.mesh), machine, tx))


def _may_split_sequences(
    config: schema.Config, mesh: schema.Mesh, trials: list[Trial], machine: Machine
) -> bool:
    """Whether activations of one sequence, not the state, are what does not fit."""
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
    return alike[-1].of_one > max(free, alike[-1].state)


def find_obstacle(
    config: schema.Config, mesh: schema.Mesh, machine: Machine, tx: Any
) -> str:
    """Why a mesh cannot work, or is not proposed; empty where there is no reason."""
    problems = _problems(config, mesh, machine, tx)
    if problems:
        return str(problems[0]).partition(";")[0]
    model, number = config.model, batch_on(config, mesh).num_microbatches
    heads = "" if config.mesh.tensor else uneven_heads(model, mesh.tensor)
    if heads:
        return f"tensor={mesh.tensor} does not divide {heads}"
    if config.mesh.pipeline:
        return ""
    stages = f"pipeline={mesh.pipeline}"
    if num_blocks(model) % mesh.pipeline:
        return f"{stages} does not divide {describe_blocks(model)}"
    if mesh.pipeline > number:
        return f"{stages} {TOO_FEW_MICROBATCHES}={number}"
    return ""
