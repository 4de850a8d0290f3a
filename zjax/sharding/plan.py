"""The plan: where every array of a run is stored. Nothing else decides placement.

A ZeRO stage is a choice of shardings (arXiv:1910.02054, section 5). "Unsharded" is the
model-parallel sharding alone; "sharded" extends it over the ZeRO axes:

    stage   master, optimizer state   gradient sum   compute parameters
      0           unsharded             unsharded        unsharded
      1           sharded               unsharded        unsharded
      2           sharded               sharded          unsharded
      3           sharded               sharded          sharded

Gradients enter the optimizer sharded as its state is. Offloaded blocks are sharded from
stage 1 on, and are gathered on the devices.

Master weights and optimizer state may be offloaded to host memory or disks. Each layer
is then an array of its own, so that layers move one by one, and compute parameters are
stored from step to step. Compute parameters in bfloat16 hold the high bits of the
master weights, of which only the low bits are stored besides.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from zjax.config.derived import is_derived
from zjax.config.schema import Config
from zjax.errors import PlanError, Problem
from zjax.sharding import mesh as meshes
from zjax.sharding import rules, zero
from zjax.sharding.layers import layer_by_layer
from zjax.sharding.naming import names_of_dims
from zjax.sharding.opt_state import abstract_opt_state
from zjax.sharding.paths import layer_of, owners, path_of
from zjax.sharding.placement import ArrayPlan, Form, abstract_key
from zjax.typing import Model, Params

DEVICE, HOST, NVME = "device", "pinned_host", "nvme"
"""Names of memories in settings; those of the first two are memory kinds of JAX."""
AUTO = "auto"
"""Setting for state: fill the devices, then the host, then disks; planned as `HOST`
until `zjax.fit_plan` knows the machine."""
MIN_MOVED_BYTES = 1 << 18
"""Smallest array per device to offload: moving less costs more than it frees."""


@dataclasses.dataclass(frozen=True)
class Splits:
    """What a ZeRO stage shards over the ZeRO axes.

    Args:
        state: Whether master weights, optimizer state and its gradients are sharded.
        grad_sum: Whether the sum of gradients over microbatches is sharded.
        compute: Whether compute parameters are sharded.
    """

    state: bool
    grad_sum: bool
    compute: bool


def splits_of(stage: int) -> Splits:
    """What a ZeRO stage, 0 to 3, shards; the one place that reads its number."""
    return Splits(state=stage >= 1, grad_sum=stage >= 2, compute=stage >= 3)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The placement of every array, one tree of `ArrayPlan` for each role.

    Args:
        mesh: Devices, or an abstract mesh for planning alone.
        stage: ZeRO stage, 0 to 3.
        master: Master weights, or their low bits.
        compute: Parameters in the compute dtype.
        grad_sum: Sum of gradients over microbatches.
        grads: Gradients that enter the optimizer.
        opt_state: Optimizer state.
        model_state: State of the model besides parameters.
        ema: Averaged weights in float32; an empty tuple without averaging.
        is_offloaded: Whether state may be offloaded; compute parameters are then stored
            from step to step.
        batch_casts: Dtypes to which arrays of a batch are cast, by path.
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

    def scalar(self, path: str, dtype: Any) -> ArrayPlan:
        """The plan of a replicated scalar."""
        place = self.replicated
        return ArrayPlan(path, (), jnp.dtype(dtype), place, place)

    @property
    def splits(self) -> Splits:
        """What its stage shards over the ZeRO axes."""
        return splits_of(self.stage)

    @property
    def splits_master(self) -> bool:
        """Whether some master weights are stored as low bits."""
        return any(row.form is Form.SPLIT for row in jax.tree.leaves(self.master))

    @property
    def replicated(self) -> NamedSharding:
        """The sharding of a replicated array."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def num_batch_shares(self) -> int:
        """Shards of the batch dim."""
        return meshes.num_shares(self.mesh, meshes.BATCH_AXES)

    @property
    def num_length_shares(self) -> int:
        """Shards of the sequence dim."""
        return meshes.num_shares(self.mesh, (meshes.SEQUENCE,))

    def batch_sharding(self, leaf: Any) -> NamedSharding:
        """The sharding of one array [B, L, ...] of a batch; scalars are replicated."""
        entries = (meshes.BATCH_AXES, meshes.SEQUENCE)[: len(leaf.shape)]
        return NamedSharding(self.mesh, PartitionSpec(*entries))


def make_plan(config: Config, mesh: Mesh | AbstractMesh, model: Model, tx: Any) -> Plan:
    """Decides where every array of a run is stored.

    Args:
        config: Settings; read for `zero`, `precision`, `mesh.names` and `mesh.rules`.
            "auto" memory is planned for the host, until `zjax.fit_plan` asks a machine.
        mesh: Devices, or an abstract mesh.
        model: Supplies abstract parameters and the names of their dims.
        tx: Optax gradient transformation of `make_optimizer` or `adopt_optimizer`.

    Returns:
        The plan; print it with `zjax.describe_plan`.

    Raises:
        PlanError: Parameters that no rule can place, or an optimizer that cannot work
            from one mean gradient per step; all problems at once.
    """
    params, model_state = jax.eval_shape(model.init, abstract_key())
    splits, dtypes = splits_of(config.zero.stage), config.precision
    planned = _ParamPlans.of(config, mesh, model, params).planned
    master = planned(dtypes.master_dtype, is_sharded=splits.state)
    opt_state = _plan_opt_state(config, mesh, tx, master)
    compute = _offload_blocks(
        planned(dtypes.compute_dtype, is_sharded=splits.compute),
        planned(dtypes.compute_dtype, is_sharded=splits.state),
        config,
    )
    return Plan(
        mesh=mesh,
        stage=config.zero.stage,
        master=_offload_master(master, compute, config),
        compute=compute,
        grad_sum=planned(dtypes.grad_sum_dtype, is_sharded=splits.grad_sum),
        grads=planned(dtypes.grad_sum_dtype, is_sharded=splits.state),
        opt_state=_offload_moments(opt_state, master, config),
        model_state=_replicated(model_state, mesh),
        ema=planned("float32", is_sharded=splits.state)
        if config.optimizer.ema_decay
        else (),
        is_offloaded=config.zero.offloads_state,
        batch_casts=dict.fromkeys(model.cast or (), dtypes.compute_dtype),
    )


@dataclasses.dataclass(frozen=True)
class _ParamPlans:
    """Plans of trees with one array per parameter.

    Args:
        params: Abstract parameters.
        unsharded: Model-parallel spec of each leaf.
        sharded: The same specs, extended over the ZeRO axes.
        is_stack: Whether each leaf stacks layers.
        is_by_layer: Whether stacks are planned as one array per layer.
    """

    params: Params
    mesh: Mesh | AbstractMesh
    unsharded: list[PartitionSpec]
    sharded: list[PartitionSpec]
    is_stack: list[bool]
    is_by_layer: bool

    @classmethod
    def of(
        cls, config: Config, mesh: Mesh | AbstractMesh, model: Model, params: Params
    ) -> "_ParamPlans":
        logical = names_of_dims(model, params, config.mesh, mesh)
        unsharded, sharded = [], []
        leaves = jax.tree_util.tree_leaves_with_path(params)
        for (keys, leaf), names in zip(leaves, logical, strict=True):
            spec = rules.spec_for(names, path_of(keys), mesh)
            rules.check_parts(leaf.shape, spec, path_of(keys), mesh)
            unsharded.append(spec)
            sharded.append(_zero_spec(config, mesh, leaf.shape, spec, names))
        is_stack = [names[:1] == ("layers",) for names in logical]
        by_layer = stores_layers_apart(config, model)
        return cls(params, mesh, unsharded, sharded, is_stack, by_layer)

    def planned(self, dtype: str, *, is_sharded: bool) -> Any:
        """A tree of plans in this dtype, of `Layers` where stacks are by layer."""
        leaves, tree = jax.tree_util.tree_flatten_with_path(_cast(self.params, dtype))
        specs = self.sharded if is_sharded else self.unsharded
        rows = [
            _array_plan(path_of(keys), leaf, spec, self.mesh, used, is_stack=is_stack)
            for (keys, leaf), spec, used, is_stack in zip(
                leaves, specs, self.unsharded, self.is_stack, strict=True
            )
        ]
        rows = jax.tree.unflatten(tree, rows)
        return jax.tree.map(layer_by_layer, rows) if self.is_by_layer else rows


def stores_layers_apart(config: Config, model: Model) -> bool:
    """Whether each layer is stored as an array of its own, as under offload."""
    return model.takes_layers_apart and config.zero.offloads_state


def _cast(tree: Any, dtype: str) -> Any:
    def cast(x: Any) -> jax.ShapeDtypeStruct:
        floating = jnp.issubdtype(x.dtype, jnp.floating)
        return jax.ShapeDtypeStruct(x.shape, jnp.dtype(dtype) if floating else x.dtype)

    return jax.tree.map(cast, tree)


def offload_pending(row: ArrayPlan, memory: str, config: Config) -> ArrayPlan:
    """Where a pending gradient or the input of a block is stored.

    Args:
        row: Its plan on the devices.
        memory: The setting for it; small arrays are never stored on disks.
        config: Settings; read for `zero.nvme_paths`.

    Returns:
        Its plan in that memory.
    """
    return (
        _offload(row, row, memory, config) if memory == NVME else row.stored_in(memory)
    )


while_it_waits = offload_pending  # old name, until all callers have moved


def _offload(
    row: ArrayPlan, other: ArrayPlan, memory: str, config: Config
) -> ArrayPlan:
    """`other` in `memory` where `row` is large enough on a device, else `row`."""
    is_moved = memory != DEVICE and row.device_bytes >= MIN_MOVED_BYTES
    return other.stored_in(memory, config.zero.nvme_paths) if is_moved else row


def _state_memory(config: Config) -> str:
    asked = config.zero.optimizer_memory
    return HOST if asked == AUTO else asked


def _offload_master(master: Any, compute: Any, config: Config) -> Any:
    """Offloaded master weights, as low bits beside bfloat16 compute parameters."""
    memory = _state_memory(config)
    offloaded = jax.tree.map(lambda row: _offload(row, row, memory, config), master)
    _check_moved("optimizer", config.zero.optimizer_memory, offloaded)
    _check_moved("parameter", config.zero.parameter_memory, compute)
    if not config.zero.offloads_state:
        return offloaded
    return jax.tree.map(_split, offloaded, compute)


def _offload_blocks(compute: Any, sharded: Any, config: Config) -> Any:
    """Compute parameters, those of blocks offloaded and then `sharded`."""
    memory = config.zero.parameter_memory
    return jax.tree_util.tree_map_with_path(
        lambda keys, row, other: (
            row if layer_of(keys) is None else _offload(row, other, memory, config)
        ),
        compute,
        sharded,
    )


def _offload_moments(opt_state: Any, master: Any, config: Config) -> Any:
    """Optimizer state, offloaded where it belongs to a parameter."""
    paths = {row.path: row for row in jax.tree.leaves(master)}
    memory = _state_memory(config)
    return jax.tree_util.tree_map_with_path(
        lambda keys, row: (
            _offload(row, row, memory, config) if any(owners(keys, paths)) else row
        ),
        opt_state,
    )


def _split(row: ArrayPlan, compute: ArrayPlan) -> ArrayPlan:
    """Master weights as low bits, where compute parameters hold their high bits."""
    dtypes = (jnp.dtype("float32"), jnp.dtype("bfloat16"))
    is_split = (row.dtype, compute.dtype) == dtypes
    return dataclasses.replace(row, form=Form.SPLIT) if is_split else row


def _check_moved(what: str, memory: str, rows: Any) -> None:
    """Refuses a memory that was asked for by name and would store nothing."""
    is_open = memory in (DEVICE, AUTO) or (what == "parameter" and is_derived(memory))
    if is_open or any(row.memory == memory for row in jax.tree.leaves(rows)):
        return
    problem = f"moves nothing: no array has {MIN_MOVED_BYTES:,} bytes on a device"
    remedy = "use device"
    if what == "parameter":
        problem = "moves nothing: no blocks of such a size run one by one"
        remedy += ", or give a zjax.Model whose stack has them"
    raise PlanError(Problem(f"zero.{what}_memory", memory, problem, remedy))


def _array_plan(
    path: str,
    leaf: Any,
    spec: PartitionSpec,
    mesh: Any,
    used: PartitionSpec | None = None,
    *,
    is_stack: bool = False,
) -> ArrayPlan:
    """The plan of an array that is used as it is stored, unless `used` is given."""
    return ArrayPlan(
        path,
        leaf.shape,
        leaf.dtype,
        stored=NamedSharding(mesh, spec),
        used=NamedSharding(mesh, spec if used is None else used),
        num_layers=leaf.shape[0] if is_stack else 0,
    )


def _replicated(tree: Any, mesh: Any) -> Any:
    return jax.tree_util.tree_map_with_path(
        lambda keys, leaf: _array_plan(path_of(keys), leaf, PartitionSpec(), mesh), tree
    )


def _zero_spec(
    config: Config,
    mesh: Any,
    shape: tuple[int, ...],
    spec: PartitionSpec,
    names: tuple[str | None, ...] = (),
) -> PartitionSpec:
    stacked = [dim for dim, name in enumerate(names) if name in rules.STACKED_DIMS]
    threshold = config.zero.min_shard_elements
    return zero.extend_spec(
        shape, spec, mesh, min_elements=threshold, stacked_dims=stacked
    )


def _plan_opt_state(config: Config, mesh: Any, tx: Any, master: Any) -> Any:
    """Shards optimizer state as its parameters; state of other shapes by `_zero_spec`.

    A leaf belongs to the parameter whose path its own path contains. It is sharded like
    it if their shapes agree but for dims of size 1, which are reductions.
    """
    params = {row.path: row for row in jax.tree.leaves(master)}
    arrays = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), master)
    is_sharded = splits_of(config.zero.stage).state

    def plan_leaf(keys: Any, leaf: Any) -> ArrayPlan:
        path, names = path_of(keys), ()
        for owner in owners(keys, params):
            spec = rules.reduced_spec(owner.spec, owner.shape, leaf.shape)
            if spec is not None:
                return _array_plan(path, leaf, spec, mesh)
            if owner.num_layers and leaf.shape[:1] == (owner.num_layers,):
                names = ("layers",)
        spec = PartitionSpec()
        if is_sharded and jnp.issubdtype(leaf.dtype, jnp.floating):
            spec = _zero_spec(config, mesh, leaf.shape, spec, names)
        return _array_plan(path, leaf, spec, mesh)

    return jax.tree_util.tree_map_with_path(plan_leaf, abstract_opt_state(tx, arrays))
