"""Bytes per device of each model of a run: a policy, a critic and a reference."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from zjax.estimate.state import abstract_plan, working_bytes
from zjax.models.build import make_model
from zjax.optim.build import make_optimizer
from zjax.settings import rl, schema
from zjax.settings.axes import axis_sizes
from zjax.settings.critic import critic_settings
from zjax.sharding.describe import format_bytes, render_table
from zjax.sharding.memory import (
    MemoryBytes,
    bytes_by_memory,
    stored_bytes,
    tree_bytes,
)
from zjax.typing import Model


class ModelBytes(NamedTuple):
    """Bytes per device of one model of a run."""

    name: str
    held: MemoryBytes
    """Bytes between steps, by memory."""
    working: int | float
    """Bytes on a device in a step of the model, or in a pass of a frozen one, without
    activations."""


def weigh_models(config: schema.Config, model: Model, tx: Any) -> list[ModelBytes]:
    """Counts the bytes of the model of a run, then of models beside a policy.

    Args:
        config: Checked settings, with a mesh of sizes of 1 or more.
        model: Model of the run.
        tx: Optax gradient transformation of the model.
    """
    plan = abstract_plan(config, model, tx)
    working = working_bytes(plan, config, model, tx)
    found, given = [ModelBytes("policy", stored_bytes(plan), working)], config.rl
    if given and isinstance(given.critic, rl.Own):
        found.append(_critic(critic_settings(config)))
    # With adapters the reference is the policy without them, and nothing is copied.
    if given and given.reference and not config.lora:
        memory = given.reference.memory
        rows = jax.tree.map(lambda row: row.stored_in(memory), plan.compute)
        on_device = jax.tree.map(lambda row: row.on_device, plan.compute)
        held = bytes_by_memory(rows)
        found.append(ModelBytes("reference", held, tree_bytes(on_device)))
    return found


def _critic(config: schema.Config) -> ModelBytes:
    """Counts the bytes of the critic that settings describe."""
    model = make_model(config)
    tx = make_optimizer(config, model)
    plan = abstract_plan(config, model, tx)
    working = working_bytes(plan, config, model, tx)
    return ModelBytes("critic", stored_bytes(plan), working)


def held_beside(config: schema.Config, num_devices: int) -> MemoryBytes:
    """Counts the bytes that models beside a policy hold between steps.

    Takes the arguments of `weigh_run`.
    """
    return add_held(weigh_run(config, num_devices)[1:])


def weigh_run(config: schema.Config, num_devices: int) -> list[ModelBytes]:
    """Counts the bytes of a policy and of models beside; empty without `rl`.

    Args:
        config: Checked settings, whose optimizer is the critic's, too.
        num_devices: Devices of the run.
    """
    if config.rl is None:
        return []
    config = with_closed_mesh(config, num_devices)
    model = make_model(config)
    return weigh_models(config, model, make_optimizer(config, model))


def add_held(found: Sequence[ModelBytes]) -> MemoryBytes:
    """Adds up the bytes that models hold between steps."""
    return MemoryBytes(
        device=sum(each.held.device for each in found),
        host=sum(each.held.host for each in found),
        disks=sum(each.held.disks for each in found),
    )


def with_closed_mesh(config: schema.Config, num_devices: int) -> schema.Config:
    """Replaces the size -1 of a mesh axis by the devices that remain."""
    sizes = axis_sizes(config, num_devices)
    return dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, **sizes))


def peak_bytes(found: Sequence[ModelBytes]) -> int | float:
    """Returns the most bytes on a device while one model works and all are held.

    Example:
        >>> small, large = MemoryBytes(1, 0, 0), MemoryBytes(5, 0, 0)
        >>> peak_bytes([ModelBytes("a", small, 4), ModelBytes("b", large, 6)])
        9
    """
    held = sum(each.held.device for each in found)
    return max(held - each.held.device + each.working for each in found)


def describe_models(found: Sequence[ModelBytes]) -> str:
    """Tabulates the bytes of each model of a run."""
    rows = []
    for name, held, working in found:
        cells = [format_bytes(x) if x else "" for x in (*held, working)]
        rows.append((name, *cells))
    rows.append(("most at once", "", "", "", format_bytes(peak_bytes(found))))
    columns = ("", "on a device", "on the host", "on disks", "in a step")
    title = "models of the run, bytes per device: weights and optimizer state between "
    title += "steps,\nand with gradients in a step of each"
    return f"{title}\n{render_table(columns, rows, right=range(1, 5))}"
