"""How much memory of the host JAX may pin, decided before it starts its devices.

Its pool of pinned memory grows by doubling: without a limit it takes up to twice what
its arrays need, and a process that pins more than the host has is killed.
"""

import functools
import os

from zjax.config.schema import Config, Mesh
from zjax.errors import ZjaxError
from zjax.models.build import make_model
from zjax.optim.build import make_optimizer
from zjax.processes.cluster import count_gpus
from zjax.processes.host import PINNED_SPARE, limit_pinned_memory
from zjax.sharding import memory
from zjax.sharding import mesh as meshes
from zjax.sharding.plan import AUTO, DEVICE, HOST, Plan, make_plan
from zjax.storage.move import IN_FLIGHT_BYTES, buffer_bytes

_SPARE_BYTES = 2**30
"""For batches on their way."""


def pin_what_is_needed(config: Config, num_processes: int = 1) -> None:
    """Limits the pool to what a built-in model keeps on the host.

    Does nothing where the state rests on devices, where the inputs of blocks leave
    them, and once JAX has started.

    Args:
        config: Checked or not; what cannot work is told later.
        num_processes: That share the state.
    """
    zero = config.zero
    shares = num_processes if zero.stage else 1
    memories = (zero.optimizer_memory, zero.parameter_memory, zero.gradient_memory)
    if not {HOST, AUTO} & {*memories}:
        return
    if config.model.activation_memory != DEVICE or not zero.stage:
        return
    gpus = len(count_gpus(os.environ)) or 1
    num_devices = gpus * num_processes
    try:
        arrays = pinned_bytes(config, num_devices)
        moved = memory.moved_bytes(_plan_of_one(config)) // num_devices
    except (ZjaxError, ArithmeticError):  # as of a model without heads
        return
    needed = PINNED_SPARE * arrays / shares + gpus * IN_FLIGHT_BYTES
    buffers = gpus * buffer_bytes(moved, zero.nvme_paths)
    limit_pinned_memory(int(needed) + _SPARE_BYTES, beside_bytes=buffers)


def pinned_bytes(config: Config, num_devices: int) -> int:
    """What all hosts hold of a built-in model, each number once.

    Args:
        config: Read for the model, the optimizer, the batch and `zero`.
        num_devices: Over which the batch is split.

    Returns:
        Bytes of state, and of gradients where they wait on the host.
    """
    plan = _plan_of_one(config)
    waiting = memory.waiting_on_host_bytes(plan, config, num_devices)
    return memory.resting_bytes(plan, HOST) + waiting


@functools.lru_cache(maxsize=1)  # a command asks before the run that it starts
def _plan_of_one(config: Config) -> Plan:
    model = make_model(config)
    mesh = meshes.abstract_mesh(Mesh(), 1)
    return make_plan(config, mesh, model, make_optimizer(config, model))
