"""Bytes per device that a step takes on a mesh, by abstract tracing, without devices.

Measured peaks of data-parallel GPUs lie up to a tenth below. The buffers of pipeline
stages follow programs compiled for CPUs and were not measured on GPUs.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from zjax.estimate.activations import activation_bytes
from zjax.estimate.models import peak_bytes, weigh_models
from zjax.estimate.state import batch_on
from zjax.estimate.tables import DEVICE_SHARE
from zjax.settings import axes, schema
from zjax.settings.batch import BatchSizes
from zjax.typing import Model


@dataclasses.dataclass(frozen=True)
class Machine:
    """The devices that a mesh is proposed for.

    Args:
        num_devices: Devices of the run over all hosts.
        devices_per_host: Devices joined by fast links.
        device_bytes: Memory of one device in bytes; infinite if unknown.
    """

    num_devices: int
    devices_per_host: int
    device_bytes: int | float

    @property
    def usable_bytes(self) -> int | float:
        """Bytes of a device that a predicted step may take."""
        return DEVICE_SHARE * self.device_bytes


@dataclasses.dataclass(frozen=True)
class Trial:
    """A mesh that was tried, with the bytes of a step.

    Args:
        mesh: Mesh that was tried; all sizes are 1 or more.
        state: Bytes per device of parameters, gradients and optimizer state, with
            models beside a policy.
        activations: Bytes per device of activations.
        of_one: Bytes per device of activations with microbatches of one sequence.
        obstacle: Reason why the mesh cannot work, with bytes of 0; or empty.
    """

    mesh: schema.Mesh
    state: int | float = 0
    activations: int | float = 0
    of_one: int | float = 0
    obstacle: str = ""

    @property
    def total(self) -> int | float:
        """Bytes per device of state and activations."""
        return self.state + self.activations

    def fits(self, machine: Machine) -> bool:
        """Whether the mesh has no obstacle and a step fits on each device."""
        return not self.obstacle and self.total <= machine.usable_bytes


def weigh(
    config: schema.Config,
    mesh: schema.Mesh,
    model: Model,
    tx: Any,
    count_rows: Callable[[int, schema.Mesh], float] | None = None,
) -> Trial:
    """Counts the bytes per device that a step takes on a mesh.

    `count_rows` counts the activations of a model of the user, as `row_bytes` does.
    """
    config = dataclasses.replace(config, mesh=mesh)
    sizes = {axis: getattr(mesh, axis) for axis in axes.AXES}
    batch = batch_on(config, mesh)

    def activations(batch: BatchSizes) -> float:
        if count_rows is None:
            return activation_bytes(config, sizes, batch, model)
        return count_rows(batch.microbatch_size, mesh)

    one = dataclasses.replace(batch, microbatch_size=1)
    state = peak_bytes(weigh_models(config, model, tx))
    return Trial(mesh, state, activations(batch), activations(one))
