"""The plan: where every array of a run is stored. Nothing else decides placement.

A ZeRO stage is a choice of shardings (arXiv:1910.02054, section 5). "Unsharded" is the
model-parallel sharding alone; "sharded" extends it over the ZeRO axes:

    stage   master, optimizer state   gradient sum   compute parameters
      0           unsharded             unsharded        unsharded
      1           sharded               unsharded        unsharded
      2           sharded               sharded          unsharded
      3           sharded               sharded          sharded

The optimizer gets gradients that are sharded like optimizer state. Frozen parameters
are stored as compute parameters, without master weights, gradients and optimizer state
(`zjax.sharding.roles`). Compute parameters of offloaded blocks are stored sharded from
stage 1 on, and gathered on the devices.

Master weights and optimizer state may be offloaded to host memory or disks. Each layer
is then stored as a separate array, so that layers move one by one, and the state also
holds the compute parameters. If these are bfloat16, they are the high 16 bits of the
float32 master weights, and `master` stores only the low 16 bits. Frozen parameters are
in `master` alone, where compute parameters would be stored.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from zjax.errors import PlanError, Problem
from zjax.jaxprs.versions import dtype_promotion
from zjax.settings.parameters import is_held_frozen
from zjax.settings.schema import Config, Zero
from zjax.sharding import mesh as meshes
from zjax.sharding import param_plans, zero
from zjax.sharding.layers import layer_by_layer
from zjax.sharding.naming import layer_of, owners
from zjax.sharding.param_plans import ParamPlans, plan_opt_state, replicated_plans
from zjax.sharding.placement import ArrayPlan, Form, abstract_key
from zjax.sharding.roles import assign_roles, hold_frozen, trained
from zjax.typing import Model

DEVICE, HOST, NVME = "device", "pinned_host", "nvme"
"""Names of memories in settings; `device` and `pinned_host` are memory kinds of JAX."""
AUTO = "auto"
"""Setting for state: fill the devices, then the host, then disks. Planned as `HOST`
until `zjax.fit_plan` knows the machine."""
MIN_MOVED_BYTES = 1 << 18
"""Fewest bytes per device of an array to offload: moving less costs more than it
frees."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """The placement of every array, one tree of `ArrayPlan` for each role.

    Args:
        mesh: Devices, or an abstract mesh for planning alone.
        stage: ZeRO stage, 0 to 3.
        master: Master weights or the low bits of master weights; for frozen parameters
            the compute parameters.
        compute: Parameters in the compute dtype.
        grad_sum: Sum of gradients over microbatches; None for frozen parameters.
        grads: Gradients that enter the optimizer; None for frozen parameters.
        opt_state: Optimizer state of the parameters that are trained.
        model_state: State of the model besides parameters.
        ema: Averaged weights in float32, None for frozen parameters; an empty tuple
            without averaging.
        is_offloaded: Whether state may be offloaded; the state then also holds the
            compute parameters of trained parameters.
        batch_casts: Dtypes to which arrays of a batch are cast, by path.
        is_of_replica: Whether programs see one replica, inside `shard_map` over
            `replica`.
        zero_axes: Mesh axes over which ZeRO shards state.
    """

    mesh: Mesh | AbstractMesh
    stage: int
    master: Any
    compute: Any
    grad_sum: Any
    grads: Any
    opt_state: Any
    model_state: Any
    ema: Any = ()
    is_offloaded: bool = False
    batch_casts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    is_of_replica: bool = False
    zero_axes: tuple[str, ...] = meshes.ZERO_AXES

    def scalar(self, path: str, dtype: Any) -> ArrayPlan:
        """Plans a replicated scalar."""
        place = self.replicated
        return ArrayPlan(path, (), jnp.dtype(dtype), place, place)

    @property
    def splits(self) -> zero.Splits:
        """Roles of arrays that the ZeRO stage shards over the ZeRO axes."""
        return zero.splits_of(self.stage)

    @property
    def splits_master(self) -> bool:
        """Whether some master weights are stored as low bits."""
        return any(row.form is Form.SPLIT for row in jax.tree.leaves(self.master))

    @property
    def has_secondary_partition(self) -> bool:
        """Whether some compute parameters are stored once per node (hpZ)."""
        pairs = zip(*map(jax.tree.leaves, (self.master, self.compute)), strict=True)
        axes = [(row.gathered_axes, other.gathered_axes) for row, other in pairs]
        return self.splits.compute and any(stored != node for stored, node in axes)

    @property
    def is_coded(self) -> bool:
        """Whether some collectives move packed codes (qwZ, qgZ)."""
        return any(row.codec for row in jax.tree.leaves((self.compute, self.grads)))

    @property
    def replicated(self) -> NamedSharding:
        """Sharding of a replicated array."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def of_replica(self) -> "Plan":
        """Plan as the programs of one replica see it."""
        return dataclasses.replace(self, is_of_replica=True)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """Mesh axes that shard the batch, without `replica` in plans of one replica."""
        outer = {meshes.REPLICA} if self.is_of_replica else set()
        return tuple(axis for axis in meshes.BATCH_AXES if axis not in outer)

    @property
    def mapped_mesh(self) -> Any:
        """Argument `mesh` of `jax.shard_map`: None inside another `shard_map`.

        None stands for the mesh in use, whose outer axes are manual already.
        """
        return None if self.is_of_replica else self.mesh

    @property
    def num_batch_shares(self) -> int:
        """Number of shards of the batch dim."""
        return meshes.num_shares(self.mesh, self.batch_axes)

    @property
    def num_length_shares(self) -> int:
        """Number of shards of the sequence dim."""
        return meshes.num_shares(self.mesh, (meshes.SEQUENCE,))

    def batch_sharding(self, leaf: Any) -> NamedSharding:
        """Sharding of one array [B, L, ...] of a batch; scalars are replicated."""
        entries = (self.batch_axes, meshes.SEQUENCE)[: len(leaf.shape)]
        return NamedSharding(self.mesh, PartitionSpec(*entries))


@dtype_promotion()
def make_plan(config: Config, mesh: Mesh | AbstractMesh, model: Model, tx: Any) -> Plan:
    """Decides where every array of a run is stored.

    Args:
        config: Settings; read for `zero`, `precision`, `mesh.names` and `mesh.rules`.
            "auto" memory is planned as host memory; `zjax.fit_plan` replaces it.
        mesh: Devices, or an abstract mesh.
        model: Model that supplies abstract parameters and the names of dims.
        tx: Optax gradient transformation of `make_optimizer` or `adopt_optimizer`.

    Returns:
        The plan; print it with `zjax.describe_plan`.

    Raises:
        PlanError: Parameters that no rule can place, an optimizer that cannot work from
            one mean gradient per step, or settings that move nothing.
    """
    # Abstract, as the model may fit on no device before it is planned.
    params, model_state = jax.eval_shape(model.init, abstract_key())
    settings, dtypes, groups = config.zero, config.precision, config.optimizer.groups
    splits = zero.splits_of(settings.stage)
    is_held = functools.partial(is_held_frozen, config=config)
    planned = ParamPlans.of(
        settings,
        config.mesh,
        mesh,
        model,
        params,
        is_by_layer=stores_layers_apart(settings, model),
    ).planned
    compute = planned(dtypes.compute_dtype, is_sharded=splits.compute)
    master = planned(dtypes.master_dtype, is_sharded=splits.state)
    master = assign_roles(master, model.stack, groups, is_held)
    master = hold_frozen(master, compute, is_held)
    opt_state = plan_opt_state(settings, mesh, tx, trained(master, master))
    # Reduced gradients enter the optimizer, and are sharded like optimizer state.
    grads = planned(dtypes.grad_sum_dtype, is_sharded=splits.state)
    grads = assign_roles(grads, model.stack, groups, is_held)
    grad_sum = planned(dtypes.grad_sum_dtype, is_sharded=splits.grad_sum)
    grads, grad_sum = trained(grads, master), trained(grad_sum, master)
    if splits.compute:
        # ZeRO++ changes collectives of ZeRO-3 alone.
        rows, compute = compute, param_plans.plan_compute(compute, settings.messages)
        is_coded = settings.messages.quantized_gradients
        grads = param_plans.plan_grads(grads, is_coded=is_coded)
        param_plans.check_effect(rows, compute, grads, settings.messages)
        grad_sum = param_plans.plan_grads(grad_sum, is_coded=is_coded)
    compute = _offload_blocks(
        compute,
        planned(dtypes.compute_dtype, is_sharded=splits.state),
        settings,
    )
    return Plan(
        mesh=mesh,
        stage=settings.stage,
        master=_offload_master(master, compute, settings, is_held),
        compute=compute,
        grad_sum=grad_sum,
        grads=grads,
        # `master` before offload: its paths alone are read.
        opt_state=_offload_moments(opt_state, master, settings),
        model_state=replicated_plans(model_state, mesh),
        # float32 whatever the master dtype: small steps of an average would round away.
        ema=trained(planned("float32", is_sharded=splits.state), master)
        if config.optimizer.ema_decay
        else (),
        is_offloaded=settings.offloads_state,
        batch_casts=dict.fromkeys(model.cast or (), dtypes.compute_dtype),
        zero_axes=zero.zero_axes(settings),
    )


def stores_layers_apart(settings: Zero, model: Model) -> bool:
    """Whether each layer is stored as a separate array, as under offload."""
    return model.takes_layers_apart and settings.offloads_state


def offload_pending(row: ArrayPlan, memory: str, disks: tuple[str, ...]) -> ArrayPlan:
    """Plans the storage of the input of a block, or of a gradient before the update.

    On disks, arrays below `MIN_MOVED_BYTES` stay on the devices instead.
    """
    return (
        _offload(row, row, memory, disks) if memory == NVME else row.stored_in(memory)
    )


def _offload(
    row: ArrayPlan, sharded: ArrayPlan, memory: str, disks: tuple[str, ...]
) -> ArrayPlan:
    """Stores an array as `sharded` in `memory`, or as `row` if it is too small."""
    is_moved = memory != DEVICE and row.device_bytes >= MIN_MOVED_BYTES
    return sharded.stored_in(memory, disks) if is_moved else row


def _planned_memory(memory: str) -> str:
    """Memory in which state is planned, with `auto` as the host."""
    return HOST if memory == AUTO else memory


def _offload_master(
    master: Any, compute: Any, settings: Zero, is_held: Callable[[str], bool]
) -> Any:
    """Offloads master weights, and stores low bits where parameters are bfloat16.

    Frozen parameters are stored where compute parameters are.
    """
    memory = _planned_memory(settings.optimizer_memory)
    disks = settings.placement.nvme_paths
    offloaded = jax.tree.map(lambda row: _offload(row, row, memory, disks), master)
    if settings.offloads_state:
        # Again, as `parameter_memory` may differ from the memory of master weights.
        offloaded = hold_frozen(offloaded, compute, is_held)
    _check_moved("zero.offload", settings.optimizer_memory, offloaded)
    memory = settings.placement.parameter_memory
    _check_moved("zero.offload.parameter_memory", memory, compute)
    if not settings.offloads_state:
        return offloaded
    return jax.tree.map(_split, offloaded, compute)


def _offload_blocks(compute: Any, sharded: Any, settings: Zero) -> Any:
    """Offloads the compute parameters of blocks, stored as in `sharded`."""
    memory, disks = settings.placement.parameter_memory, settings.placement.nvme_paths
    return jax.tree_util.tree_map_with_path(
        lambda keys, row, sharded: (
            row if layer_of(keys) is None else _offload(row, sharded, memory, disks)
        ),
        compute,
        sharded,
    )


def _offload_moments(opt_state: Any, master: Any, settings: Zero) -> Any:
    """Offloads the arrays of optimizer state that belong to a parameter."""
    paths = {row.path: row for row in jax.tree.leaves(master)}
    memory = _planned_memory(settings.optimizer_memory)
    disks = settings.placement.nvme_paths
    return jax.tree_util.tree_map_with_path(
        lambda keys, row: (
            # Counters and statistics of no parameter are small, and stay on the
            # devices.
            _offload(row, row, memory, disks) if any(owners(keys, paths)) else row
        ),
        opt_state,
    )


def _split(row: ArrayPlan, compute: ArrayPlan) -> ArrayPlan:
    """Stores float32 master weights of bfloat16 compute parameters as low bits."""
    dtypes = (jnp.dtype("float32"), jnp.dtype("bfloat16"))
    is_split = (row.dtype, compute.dtype) == dtypes
    return dataclasses.replace(row, form=Form.SPLIT) if is_split else row


def _check_moved(field: str, memory: str, rows: Any) -> None:
    """Refuses a memory that stores nothing, and warns where all arrays are too small.

    Arrays are too small where a small model tries the settings of a large run.
    """
    rows = jax.tree.leaves(rows)
    is_used = any(row.memory == memory for row in rows)
    if memory in (DEVICE, AUTO) or is_used:
        return
    if all(row.device_bytes < MIN_MOVED_BYTES for row in rows):
        _log_unmoved(f"{field}={memory!r}")
        return
    problem = "moves nothing: no blocks of such a size run one by one"
    remedy = "use device, or give a zjax.Model whose stack has them"
    raise PlanError(Problem(field, memory, problem, remedy))


@functools.cache
def _log_unmoved(setting: str) -> None:
    """Logs once that a setting moves nothing, however many plans a run makes."""
    text = "%s moves nothing: no array has %s bytes on a device, where all of them stay"
    logging.warning(text, setting, f"{MIN_MOVED_BYTES:,}")


def layerwise_plan(model: Model, plan: Plan) -> Plan:
    """Plans each layer of a stacked array apart, if the model takes layers apart.

    A stack becomes `Layers` if ZeRO shards it, or if no gradient is reduced over
    devices.
    """
    if not model.takes_layers_apart:
        return plan
    # Gradients of unsharded stacks are reduced at the end, in one collective per stack.
    is_whole = plan.splits.state and plan.num_batch_shares > 1
    is_apart = jax.tree.map(
        lambda row: row.num_layers > 0 and (any(row.spec) or not is_whole),
        plan.master,
    )

    def by_layer(rows: Any, is_apart: Any = is_apart) -> Any:
        return jax.tree.map(
            lambda row, apart: layer_by_layer(row) if apart else row, rows, is_apart
        )

    is_trained_apart = trained(is_apart, plan.master)

    return dataclasses.replace(
        plan,
        master=by_layer(plan.master),
        compute=by_layer(plan.compute),
        grad_sum=by_layer(plan.grad_sum, is_trained_apart),
        grads=by_layer(plan.grads, is_trained_apart),
    )


def trained_plan(plan: Plan) -> Plan:
    """Plan of an update: frozen parameters are None in all trees."""
    master, compute = (trained(x, plan.master) for x in (plan.master, plan.compute))
    return dataclasses.replace(plan, master=master, compute=compute)


def staged_plan(plan: Plan) -> Plan:
    """Plan of the device copies of offloaded state."""

    def on_device(rows: Any) -> Any:
        return jax.tree.map(lambda row: row.on_device, rows)

    return dataclasses.replace(
        plan,
        master=on_device(plan.master),
        compute=on_device(plan.compute),
        opt_state=on_device(plan.opt_state),
    )
