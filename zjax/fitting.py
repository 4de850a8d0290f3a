"""The plan of a run on this machine, where the settings leave memories to it."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from zjax.config.batch import resolve_batch
from zjax.config.schema import Config
from zjax.errors import PlanError, Problem
from zjax.offload.stream import IN_FLIGHT_BYTES, READ_AHEAD_BYTES
from zjax.processes.host import HOST_SHARE, PINNED_SPARE, host_memory_bytes
from zjax.sharding import memory
from zjax.sharding.describe import format_bytes
from zjax.sharding.mesh import device_capacity_bytes
from zjax.sharding.plan import AUTO, DEVICE, HOST, NVME, Plan, make_plan
from zjax.sharding.room import spread_state
from zjax.step import make_step
from zjax.typing import Batch, Model

DEVICE_SHARE = 0.94
"""Of a device's memory, that a step may be said to take."""


def fit_plan(
    config: Config, mesh: Mesh, model: Model, tx: Any, batch: Batch | None = None
) -> Plan:
    """Plans a run; `zero.optimizer_memory="auto"` takes the memories of this machine.

    What a step takes of a device while all state moves is found by compiling it. State
    then stays on the devices, and after that on the host, as far as there is room; the
    rest goes to disks. The parameters that the forward pass reads first stay nearest.

    Args:
        config: Checked settings.
        mesh: Devices that are here.
        model: The model as pure functions.
        tx: Optax gradient transformation of `make_optimizer` or `adopt_optimizer`.
        batch: Arrays or ShapeDtypeStructs of the global batch; None for that of the
            built-in models.

    Returns:
        The plan.

    Raises:
        PlanError: Arrays or an optimizer that cannot be placed, or a step whose memory
            cannot be predicted.
    """
    plan = make_plan(config, mesh, model, tx)
    if config.zero.optimizer_memory != AUTO:
        return plan
    step = make_step(model, tx, plan, config)
    peak = step.predict_peak(abstract_batch(config, plan) if batch is None else batch)
    if peak is None:
        problem = "does not know what a step takes of these devices"
        remedy = "use 'pinned_host' or 'nvme'"
        raise PlanError(Problem("zero.optimizer_memory", AUTO, problem, remedy))
    room = _room(plan, config, peak.total)
    order = step.programs["train"].forward_order()
    found = spread_state(plan, order, room, config.zero.nvme_paths)
    rows = jax.tree.leaves((found.master, found.opt_state))
    sizes = (
        format_bytes(memory.tree_bytes([row for row in rows if row.memory == where]))
        for where in (DEVICE, HOST, NVME)
    )
    logging.warning("state per device: %s there, %s on the host, %s on disks", *sizes)
    return found


def abstract_batch(config: Config, plan: Plan) -> Batch:
    """The batch of a run of the built-in models, without data.

    Args:
        config: Its batch size and length.
        plan: Its number of batch shares.

    Returns:
        Tokens, targets and weights, all [B, L].
    """
    size = resolve_batch(config, plan.num_batch_shares).global_batch_size
    shape = (size, config.data.length)
    dtypes = {"tokens": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name, dtype in dtypes.items()}


def _room(plan: Plan, config: Config, peak_bytes: int) -> Mapping[str, float]:
    """Bytes per device for state, the same in all processes."""
    mesh = plan.mesh
    assert isinstance(mesh, Mesh)
    host = (HOST_SHARE * host_memory_bytes()) / len(mesh.local_devices)
    host -= IN_FLIGHT_BYTES + (2 * READ_AHEAD_BYTES if config.zero.nvme_paths else 0)
    blocks = [row for row in jax.tree.leaves(plan.compute) if row.memory == HOST]
    taken = memory.tree_bytes(blocks)
    taken += memory.waiting_on_host_bytes(plan, config, plan.num_batch_shares)
    here = np.array(
        [
            DEVICE_SHARE * device_capacity_bytes(mesh) - peak_bytes,
            host / PINNED_SPARE - taken,
        ]
    )
    if jax.process_count() > 1:
        here = multihost_utils.process_allgather(here).min(0)
    return dict(zip((DEVICE, HOST), here.tolist(), strict=True))
