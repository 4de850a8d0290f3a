"""Limits JAX's pool of pinned host memory before JAX starts devices.

The pool grows by doubling: without a limit it takes up to twice the bytes of the
arrays, and a process that pins more than the host has is killed.
"""

import dataclasses
import functools
import math
import os
from collections.abc import Sequence

from zjax.errors import ZjaxError
from zjax.estimate.models import held_beside
from zjax.estimate.tables import num_microbatches
from zjax.models.build import make_model
from zjax.optim.build import make_optimizer
from zjax.processes.cluster import Cluster, assign_gpus, visible_gpus
from zjax.processes.host import POOL_RATIO, limit_pinned_memory
from zjax.run.batch import abstract_batch
from zjax.run.fit import offloaded_inputs
from zjax.settings.axes import close_axes
from zjax.settings.schema import Config
from zjax.sharding import memory
from zjax.sharding import mesh as meshes
from zjax.sharding.placement import ArrayPlan
from zjax.sharding.plan import AUTO, Plan, make_plan
from zjax.storage.transfers import IN_FLIGHT_BYTES, staging_bytes

_SPARE_BYTES = 2**30
"""Pinned bytes for batches in transfer, per process."""


def limit_pinned_pool(config: Config, cluster: Cluster | None = None) -> None:
    """Limits the pool to the bytes that a run of a built-in model stores on the host.

    Without offload the limit is this process's share of host memory. The call has no
    effect once JAX has started. Settings need not be checked: the run reports errors.
    """
    cluster = cluster or Cluster()
    needed = _needed_bytes(config, cluster) or (math.inf, 0)
    limit_pinned_memory(*needed, num_processes=cluster.num_local)


def _needed_bytes(config: Config, cluster: Cluster) -> tuple[float, int] | None:
    """Bytes this process pins, and bytes of unpinned staging buffers.

    None without offloaded state, or for settings that cannot be planned.
    """
    if not config.zero.offloads_state:
        return None
    # Under Kubernetes the number of processes is not known: count one.
    num_processes = cluster.num_processes or 1
    try:
        gpus = len(assign_gpus(cluster, len(visible_gpus(os.environ)))) or 1
        num_devices = gpus * num_processes
        arrays = pinned_bytes(config, num_devices)
        staging = staging_bytes(_most_on_disks(config, num_devices))
    except (
        ZjaxError,
        ArithmeticError,
    ):  # such as a mesh that does not fit: check_config reports the error later
        return None
    needed = POOL_RATIO * arrays + IN_FLIGHT_BYTES + staging.to_disks
    return gpus * needed + _SPARE_BYTES, gpus * staging.from_disks


def _most_on_disks(config: Config, num_devices: int) -> int:
    """Upper bound of the bytes on disks: all state if `zero.offload=auto`."""
    plan, inputs = _planned(config, num_devices)
    input_bytes = memory.bytes_by_memory(inputs).disks
    if config.zero.optimizer_memory == AUTO and config.zero.placement.nvme_paths:
        return memory.stored_bytes(plan).offloaded + input_bytes
    rows = memory.rows_on_disk(plan, config.zero, num_microbatches(plan, config))
    return memory.tree_bytes(rows) + input_bytes


def pinned_bytes(config: Config, num_devices: int) -> int:
    """Pinned bytes per device of all that a run stores on the host.

    These are state, pending gradients, block inputs, and models beside a policy.

    If no state is offloaded, bytes of the host copies that saving a checkpoint makes.
    Mesh axes left open count as 1.
    """
    plan, inputs = _planned(config, num_devices)
    gradients = memory.stored_gradients(
        plan, config.zero, num_microbatches(plan, config)
    )
    stored = memory.stored_bytes(plan)
    pending = memory.bytes_by_memory((gradients, inputs)).host
    closed = dataclasses.replace(config, mesh=close_axes(config.mesh))
    pending += held_beside(closed, num_devices).host
    return (stored.host or stored.device) + pending


@functools.lru_cache(maxsize=1)  # computed by the command, and again by its Trainer
def _planned(config: Config, num_devices: int) -> tuple[Plan, Sequence[ArrayPlan]]:
    """Plan on a mesh without devices, and plans of offloaded block inputs."""
    model = make_model(config)
    mesh = meshes.abstract_mesh(close_axes(config.mesh), num_devices)
    plan = make_plan(config, mesh, model, make_optimizer(config, model))
    return plan, offloaded_inputs(model, plan, config, abstract_batch(config, plan))
