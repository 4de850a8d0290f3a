"""How much memory of the host JAX may pin, decided before it starts its devices.

Its pool of pinned memory grows by doubling: without a limit it takes up to twice what
its arrays need, and a process that pins more than the host has is killed.
"""

import functools
import math
import os

from zjax.config.schema import Config, Mesh
from zjax.errors import ZjaxError
from zjax.models.build import make_model
from zjax.optim.build import make_optimizer
from zjax.processes.cluster import Cluster, count_gpus, own_gpus
from zjax.processes.host import PINNED_SPARE, limit_pinned_memory
from zjax.sharding import memory
from zjax.sharding import mesh as meshes
from zjax.sharding.plan import AUTO, DEVICE, HOST, NVME, Plan, make_plan
from zjax.storage.move import IN_FLIGHT_BYTES, passing_bytes

_SPARE_BYTES = 2**30
"""For batches on their way."""


def pin_what_is_needed(config: Config, cluster: Cluster | None = None) -> None:
    """Limits the pool to what a built-in model keeps on the host.

    Where the state rests on devices, or the inputs of blocks leave them, the limit is
    what this process has of the host. Does nothing once JAX has started.

    Args:
        config: Checked or not; what cannot work is told later.
        cluster: The processes that share the state; None where this is the only one.
    """
    cluster = cluster or Cluster()
    needed = _needed_bytes(config, cluster) or (math.inf, 0)
    limit_pinned_memory(*needed, num_processes=cluster.num_local)


def _needed_bytes(config: Config, cluster: Cluster) -> tuple[float, int] | None:
    """What this process pins, and keeps beside it; None where nobody can tell yet."""
    zero = config.zero
    memories = (zero.optimizer_memory, zero.parameter_memory, zero.gradient_memory)
    if not {HOST, AUTO} & {*memories}:
        return None
    if config.model.activation_memory != DEVICE or not zero.stage:
        return None
    # Kubernetes tells nobody how many there are.
    num_processes = cluster.num_processes or 1
    try:
        gpus = len(own_gpus(cluster, len(count_gpus(os.environ)))) or 1
        num_devices = gpus * num_processes
        arrays = pinned_bytes(config, num_devices)
        on_disks = _most_on_disks(config) // num_devices
    except (ZjaxError, ArithmeticError):  # as of a model without heads
        return None
    passing = passing_bytes(on_disks)
    needed = PINNED_SPARE * arrays / num_processes
    needed += gpus * (IN_FLIGHT_BYTES + passing.to_disks) + _SPARE_BYTES
    return needed, gpus * passing.from_disks


def _most_on_disks(config: Config) -> int:
    plan = _plan_of_one(config)
    if config.zero.optimizer_memory == AUTO and config.zero.nvme_paths:
        return memory.moved_bytes(plan)
    return memory.resting_bytes(plan, NVME)


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
