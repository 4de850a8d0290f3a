"""How much memory of the host JAX may pin, decided before it starts its devices.

Its pool of pinned memory grows by doubling: without a limit it takes up to twice what
its arrays need, and a process that pins more than the host has is killed.
"""

import functools
import math
import os
from collections.abc import Sequence

from zjax.budget.fit import abstract_batch
from zjax.config.axes import close_axes
from zjax.config.schema import Config
from zjax.errors import ZjaxError
from zjax.models.build import make_model
from zjax.offload.inputs import waiting_inputs
from zjax.optim.build import make_optimizer
from zjax.processes.cluster import Cluster, assign_gpus, visible_gpus
from zjax.processes.host import POOL_OVERHEAD, limit_pinned_memory
from zjax.sharding import memory
from zjax.sharding import mesh as meshes
from zjax.sharding.placement import ArrayPlan
from zjax.sharding.plan import AUTO, DEVICE, HOST, NVME, Plan, make_plan
from zjax.storage.passing import IN_FLIGHT_BYTES, passing_bytes

_SPARE_BYTES = 2**30
"""For batches on their way."""


def pin_what_is_needed(config: Config, cluster: Cluster | None = None) -> None:
    """Limits the pool to what a built-in model keeps on the host.

    Where the state rests on devices the limit is what this process has of the host.
    Does nothing once JAX has started.

    Args:
        config: Checked or not; what cannot work is told later.
        cluster: The processes that share the state; None where this is the only one.
    """
    cluster = cluster or Cluster()
    needed = _needed_bytes(config, cluster) or (math.inf, 0)
    limit_pinned_memory(*needed, num_processes=cluster.num_local)


def _needed_bytes(config: Config, cluster: Cluster) -> tuple[float, int] | None:
    """What this process pins, and keeps beside it; None where nobody can tell yet."""
    if config.zero.optimizer_memory == DEVICE:
        return None
    # Kubernetes tells nobody how many there are.
    num_processes = cluster.num_processes or 1
    try:
        gpus = len(assign_gpus(cluster, len(visible_gpus(os.environ)))) or 1
        num_devices = gpus * num_processes
        arrays = pinned_bytes(config, num_devices)
        passing = passing_bytes(_most_on_disks(config, num_devices))
    except (ZjaxError, ArithmeticError):  # as of a model without heads
        return None
    needed = POOL_OVERHEAD * arrays + IN_FLIGHT_BYTES + passing.to_disks
    return gpus * needed + _SPARE_BYTES, gpus * passing.from_disks


def _most_on_disks(config: Config, num_devices: int) -> int:
    plan, inputs = _planned(config, num_devices)
    of_inputs = memory.bytes_in(NVME, inputs)
    if config.zero.optimizer_memory == AUTO and config.zero.nvme_paths:
        return memory.moved_bytes(plan) + of_inputs
    return memory.tree_bytes(memory.rows_on_disk(plan, config)) + of_inputs


def pinned_bytes(config: Config, num_devices: int) -> int:
    """What a host pins of a built-in model for each of its devices.

    Args:
        config: Read for the model, the optimizer, the batch, the mesh and `zero`; what
            `mesh="auto"` leaves open is taken for 1.
        num_devices: Of all hosts.

    Returns:
        Bytes of state, and of gradients and inputs of blocks where they wait on the
        host; where no state rests there, of the copies that a checkpoint makes of what
        is on the devices.

    Raises:
        ConfigError: The mesh or the batch does not suit so many devices.
    """
    plan, inputs = _planned(config, num_devices)
    waiting = memory.waiting_on_host_bytes(plan, config, plan.num_batch_shares)
    waiting += memory.bytes_in(HOST, inputs)
    resting = memory.resting_bytes(plan, HOST) or memory.resting_bytes(plan, DEVICE)
    return resting + waiting


@functools.lru_cache(maxsize=1)  # a command asks before the run that it starts
def _planned(config: Config, num_devices: int) -> tuple[Plan, Sequence[ArrayPlan]]:
    """Placement of the state, and what else waits in other memories."""
    model = make_model(config)
    mesh = meshes.abstract_mesh(close_axes(config.mesh), num_devices)
    plan = make_plan(config, mesh, model, make_optimizer(config, model))
    return plan, waiting_inputs(model, plan, config, abstract_batch(config, plan))
