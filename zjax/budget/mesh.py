"""A mesh for a built-in model: the plainest one on which a step fits the devices.

The rules, each of which adds what the ones before cannot do without:

1. `data` alone, where that fits;
2. `sequence`, where the activations of one sequence do not fit beside the state, and
   take more than it;
3. `tensor`, the narrowest that fits, within a host and dividing the heads;
4. `pipeline`, the fewest stages that fit, of equally many layers, with as many
   microbatches or more; `data` has the rest, and the ZeRO stage is that of the config.

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

from zjax.budget.reasons import FEW, Proposal, describe_proposal, no_room, reasons
from zjax.budget.trial import Machine, Trial, batch_on, weigh
from zjax.config import axes, schema
from zjax.config.check import check_config
from zjax.config.model_rules import uneven_heads
from zjax.errors import ConfigError, PlanError, Problem
from zjax.models.build import make_model
from zjax.optim.build import make_optimizer
from zjax.processes.host import sharers_of_host
from zjax.sharding import mesh as meshes
from zjax.typing import Device, Model


def is_open(mesh: schema.Mesh) -> bool:
    """Whether a mesh leaves axes to zjax.

    Args:
        mesh: Sizes per axis.

    Returns:
        True for one made of `mesh="auto"`.

    Example:
        >>> is_open(schema.Mesh()), is_open(schema.Mesh(tensor=0))
        (False, True)
    """
    return any(getattr(mesh, axis) == 0 for axis in axes.OPEN_AXES)


def choose_mesh(
    config: schema.Config, devices: Sequence[Device], tx: Any = None
) -> schema.Config:
    """Fills in what `mesh="auto"` leaves open, for devices that are here, and logs why.

    Args:
        config: Settings of the right types, checked or not.
        devices: Of the run, over all processes, which must all ask.
        tx: Optax gradient transformation of the caller; None for that of the config.

    Returns:
        The same settings with the size of every axis; `config` where none is open.

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
    """Asks devices that are here.

    Args:
        devices: Of the run, over all processes, which must all ask.

    Returns:
        The same in all processes: the fewest devices of a host, the least memory.
    """
    num_local = sum(each.process_index == jax.process_index() for each in devices)
    mesh = meshes.make_mesh(schema.Mesh(), devices)
    here = np.array(
        [sharers_of_host(num_local).num_devices, meshes.device_capacity_bytes(mesh)]
    )
    if jax.process_count() > 1:
        here = multihost_utils.process_allgather(here).min(0)
    return Machine(len(devices), int(here[0]), float(here[1]))


def propose_mesh(config: schema.Config, machine: Machine, tx: Any = None) -> Proposal:
    """Finds the plainest mesh on which a step fits, without any device.

    Args:
        config: Its axes of size 0 are open, the others stay as they are.
        machine: To fit.
        tx: Optax gradient transformation of the caller; None for that of the config.

    Returns:
        The mesh and the reasons.

    Raises:
        ConfigError: Settings that cannot work on any mesh; those of the plainest.
        PlanError: No mesh has room for a step; states the numbers and what would help.

    Example:
        >>> config = schema.Config(mesh=schema.Mesh(tensor=0))
        >>> proposal = propose_mesh(config, Machine(8, 8, 80e9))
        >>> proposal.mesh.data, proposal.mesh.tensor
        (8, 1)
    """

    @functools.cache
    def parts() -> tuple[Model, Any]:
        """Made once settings have passed their check."""
        model = make_model(config)
        return model, make_optimizer(config, model) if tx is None else tx

    trials: list[Trial] = []
    for mesh in _meshes(config, machine):
        if not _may_split_sequences(config, mesh, trials, machine):
            continue
        obstacle = _obstacle(config, mesh, machine, tx)
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


def _meshes(config: schema.Config, machine: Machine) -> Iterator[schema.Mesh]:
    """All that fill the devices, the plainest first."""
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
        check_config(candidate, machine.num_devices, user_optimizer=tx is not None)
    except ConfigError as error:
        return error.problems
    return ()


def _refusal(config: schema.Config, machine: Machine, tx: Any) -> ConfigError:
    return ConfigError(*_problems(config, axes.close_axes(config.mesh), machine, tx))


def _may_split_sequences(
    config: schema.Config, mesh: schema.Mesh, trials: list[Trial], machine: Machine
) -> bool:
    """Whether one sequence, and not the state, is what does not fit otherwise."""
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
    room = machine.usable_bytes - alike[-1].state
    return alike[-1].of_one > max(room, alike[-1].state)


def _obstacle(
    config: schema.Config, mesh: schema.Mesh, machine: Machine, tx: Any
) -> str:
    """Why a mesh cannot work, or why we would not take it."""
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
    if model.num_layers % mesh.pipeline:
        return f"{stages} does not divide model.num_layers={model.num_layers}"
    if mesh.pipeline > number:
        return f"{stages} {FEW}={number}"
    return ""
