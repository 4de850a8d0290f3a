"""The plan: where every array of a run lives. Nothing else decides placement.

A ZeRO stage is a choice of placements, made here and nowhere else
(arXiv:1910.02054, section 5). "Whole" is the model-parallel placement, "split" is that
extended over the ZeRO axes:

    stage   master, optimizer state   sum of gradients   parameters in use
      0             whole                  whole               whole
      1             split                  whole               whole
      2             split                  split               whole
      3             split                  split               split

The optimizer takes gradients as it holds its state. Blocks that rest elsewhere do so
split from stage 1 on, and are put together on the devices.

Master weights and optimizer state may rest in the memory of the host or on disks. Their
layers are then stored one by one, to be moved one by one, and the parameters in use
are kept from step to step, on the devices or elsewhere. Where these are bfloat16, they
are the upper half of the master weights, of which only the lower half is stored beside
them.
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
from zjax.typing import Model

DEVICE, HOST, NVME = "device", "pinned_host", "nvme"
"""Memories; the first two as JAX calls them."""
AUTO = "auto"
"""For state: each in turn, as far as it has room; planned for the host at first."""
MIN_MOVED_BYTES = 1 << 18
"""On one device; smaller arrays cost more time to move than they free memory."""


@dataclasses.dataclass(frozen=True)
class Splits:
    """What a ZeRO stage splits over the ZeRO axes.

    Args:
        state: Master weights, optimizer state and the gradients that enter it.
        grad_sum: The sum of gradients over microbatches.
        compute: Parameters in use.
    """

    state: bool
    grad_sum: bool
    compute: bool


def splits_of(stage: int) -> Splits:
    """The one place where the number of a ZeRO stage gets a meaning.

    Args:
        stage: 0 to 3.

    Returns:
        What the stage splits.
    """
    return Splits(state=stage >= 1, grad_sum=stage >= 2, compute=stage >= 3)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The placement of every array, one tree of `ArrayPlan` for each role.

    Args:
        mesh: Devices, or an abstract mesh for planning alone.
        stage: ZeRO stage, 0 to 3.
        master: Parameters as the optimizer sees them, or their lower halves.
        compute: Parameters as the model sees them.
        grad_sum: Gradients as they are added over microbatches.
        grads: Gradients as they enter the optimizer.
        opt_state: State of the optimizer.
        model_state: What the model carries besides parameters.
        ema: Averaged parameters, in float32; an empty tuple where none are kept.
        is_offloaded: Whether part of the state rests outside of the devices, so that
            the parameters in use are kept from step to step.
        batch_casts: Dtypes to which arrays of a batch are cast, by their paths.
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
        """The row of a number that every device holds.

        Args:
            path: Its name.
            dtype: Its element type.

        Returns:
            A replicated row of shape ().
        """
        everywhere = self.replicated
        return ArrayPlan(path, (), jnp.dtype(dtype), everywhere, everywhere)

    @property
    def splits(self) -> Splits:
        """What its stage splits over the ZeRO axes."""
        return splits_of(self.stage)

    @property
    def splits_master(self) -> bool:
        """Whether some master weights are stored without the bits that are in use."""
        return any(row.form is Form.SPLIT for row in jax.tree.leaves(self.master))

    @property
    def replicated(self) -> NamedSharding:
        """The placement of what every device holds whole."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def num_batch_shares(self) -> int:
        """Parts into which the batch dim is cut."""
        return meshes.num_shares(self.mesh, meshes.BATCH_AXES)

    @property
    def num_length_shares(self) -> int:
        """Parts into which each sequence is cut."""
        return meshes.num_shares(self.mesh, (meshes.SEQUENCE,))

    def batch_sharding(self, leaf: Any) -> NamedSharding:
        """The placement of one array of a batch.

        Args:
            leaf: Anything with a shape; a scalar is replicated.

        Returns:
            Its first dim over the batch axes, its second over the sequence axis.
        """
        entries = (meshes.BATCH_AXES, meshes.SEQUENCE)[: len(leaf.shape)]
        return NamedSharding(self.mesh, PartitionSpec(*entries))


def make_plan(config: Config, mesh: Mesh | AbstractMesh, model: Model, tx: Any) -> Plan:
    """Decides where every array of a run lives.

    Args:
        config: Read for `zero`, `precision`, `mesh.names` and `mesh.rules`;
            `zero.optimizer_memory="auto"` is planned for the host, until
            `zjax.fit_plan` asks a machine.
        mesh: Devices, or an abstract mesh.
        model: Its abstract parameters and the names of their dims.
        tx: Optax gradient transformation of `make_optimizer` or `adopt_optimizer`.

    Returns:
        The plan; print it with `zjax.describe_plan`.

    Raises:
        PlanError: Parameters that no rule can place, or an optimizer that cannot work
            from one mean gradient per step; all problems at once.
    """
    params, model_state = jax.eval_shape(model.init, abstract_key())
    dtypes = config.precision
    master = _cast(params, dtypes.master_dtype)
    logical = names_of_dims(model, params, config.mesh, mesh)
    splits = splits_of(config.zero.stage)
    specs = _param_specs(config, mesh, master, logical)
    whole_specs = specs[False]
    is_apart = stores_layers_apart(config, model)

    def params_rows(specs: list[PartitionSpec], dtype: str) -> Any:
        leaves, tree = jax.tree_util.tree_flatten_with_path(_cast(params, dtype))
        rows = [
            _row(path_of(k), leaf, spec, mesh, used, is_stack=names[:1] == ("layers",))
            for (k, leaf), spec, used, names in zip(
                leaves, specs, whole_specs, logical, strict=True
            )
        ]
        rows = jax.tree.unflatten(tree, rows)
        return jax.tree.map(layer_by_layer, rows) if is_apart else rows

    asked = config.zero.optimizer_memory
    state_memory = HOST if asked == AUTO else asked

    def offload(rows: Any, memory: str = state_memory) -> Any:
        return jax.tree.map(lambda row: _offload(row, row, memory, config), rows)

    def offload_blocks(rows: Any) -> Any:
        where = config.zero.parameter_memory
        return jax.tree_util.tree_map_with_path(
            lambda keys, row, other: (
                row if layer_of(keys) is None else _offload(row, other, where, config)
            ),
            rows,
            params_rows(stored_specs, dtypes.compute_dtype),
        )

    def offload_owned(rows: Any) -> Any:
        paths = {row.path: row for row in jax.tree.leaves(stored)}
        return jax.tree_util.tree_map_with_path(
            lambda keys, row: offload(row) if any(owners(keys, paths)) else row, rows
        )

    is_offloaded = config.zero.optimizer_memory != DEVICE
    stored_specs = specs[splits.state]
    compute = offload_blocks(params_rows(specs[splits.compute], dtypes.compute_dtype))
    stored = params_rows(stored_specs, dtypes.master_dtype)
    opt_state = abstract_opt_state(tx, _logical_arrays(stored))
    offloaded = offload(stored)
    _check_moved("optimizer", asked, offloaded)
    _check_moved("parameter", config.zero.parameter_memory, compute)
    return Plan(
        mesh=mesh,
        stage=config.zero.stage,
        master=jax.tree.map(_split, offloaded, compute) if is_offloaded else stored,
        compute=compute,
        grad_sum=params_rows(specs[splits.grad_sum], dtypes.grad_sum_dtype),
        grads=params_rows(stored_specs, dtypes.grad_sum_dtype),
        opt_state=offload_owned(_opt_state_rows(config, mesh, opt_state, stored)),
        model_state=_rows(model_state, mesh),
        ema=params_rows(stored_specs, "float32") if config.optimizer.ema_decay else (),
        is_offloaded=is_offloaded,
        batch_casts=dict.fromkeys(model.cast or (), dtypes.compute_dtype),
    )


def stores_layers_apart(config: Config, model: Model) -> bool:
    """Whether layers are stored one by one: they are where they are moved.

    Args:
        config: Read for `zero.optimizer_memory`.
        model: Says whether it takes its layers apart.

    Returns:
        False where one array stacks them.
    """
    return model.takes_layers_apart and config.zero.optimizer_memory != DEVICE


def _cast(tree: Any, dtype: str) -> Any:
    def cast(x: Any) -> jax.ShapeDtypeStruct:
        floating = jnp.issubdtype(x.dtype, jnp.floating)
        return jax.ShapeDtypeStruct(x.shape, jnp.dtype(dtype) if floating else x.dtype)

    return jax.tree.map(cast, tree)


def while_it_waits(row: ArrayPlan, memory: str, config: Config) -> ArrayPlan:
    """Where a gradient waits, or what enters a block.

    Args:
        row: Its place on the devices.
        memory: That was asked for.
        config: Read for `zero.nvme_paths`.

    Returns:
        Its place while it waits; what is small never goes to disks.
    """
    return _offload(row, row, memory, config) if memory == NVME else row.rest_in(memory)


def _offload(row: ArrayPlan, other: ArrayPlan, where: str, config: Config) -> ArrayPlan:
    """The other place, in a memory, of what would take much of a device in its own."""
    is_moved = where != DEVICE and row.device_bytes >= MIN_MOVED_BYTES
    return other.rest_at(where, config.zero.nvme_paths) if is_moved else row


def _split(row: ArrayPlan, in_use: ArrayPlan) -> ArrayPlan:
    """Master weights without the bits that are kept as parameters in use."""
    splits = (jnp.dtype("float32"), jnp.dtype("bfloat16"))
    is_split = (row.dtype, in_use.dtype) == splits
    return dataclasses.replace(row, form=Form.SPLIT) if is_split else row


def _check_moved(what: str, memory: str, rows: Any) -> None:
    """Refuses a memory that would hold nothing, and was asked for by name."""
    is_open = memory in (DEVICE, AUTO) or (what == "parameter" and is_derived(memory))
    if is_open or any(row.memory == memory for row in jax.tree.leaves(rows)):
        return
    problem = f"moves nothing: no array has {MIN_MOVED_BYTES:,} bytes on a device"
    remedy = "use device"
    if what == "parameter":
        problem = "moves nothing: no blocks of such a size run one by one"
        remedy += ", or give a zjax.Model whose stack has them"
    raise PlanError(Problem(f"zero.{what}_memory", memory, problem, remedy))


def _logical_arrays(rows: Any) -> Any:
    return jax.tree.map(lambda row: jax.ShapeDtypeStruct(row.shape, row.dtype), rows)


def _row(
    path: str,
    leaf: Any,
    spec: PartitionSpec,
    mesh: Any,
    used: PartitionSpec | None = None,
    *,
    is_stack: bool = False,
) -> ArrayPlan:
    """An array that is used as it is stored, unless there is a spec for its use."""
    return ArrayPlan(
        path,
        leaf.shape,
        leaf.dtype,
        stored=NamedSharding(mesh, spec),
        used=NamedSharding(mesh, spec if used is None else used),
        num_layers=leaf.shape[0] if is_stack else 0,
    )


def _rows(tree: Any, mesh: Any) -> Any:
    return jax.tree_util.tree_map_with_path(
        lambda keys, leaf: _row(path_of(keys), leaf, PartitionSpec(), mesh), tree
    )


def _param_specs(
    config: Config, mesh: Any, params: Any, logical: list[tuple[str | None, ...]]
) -> dict[bool, list[PartitionSpec]]:
    """Of each leaf, by whether it is split over the ZeRO axes too."""
    whole, split = [], []
    leaves = jax.tree_util.tree_leaves_with_path(params)
    for (keys, leaf), names in zip(leaves, logical, strict=True):
        spec = rules.spec_for(names, path_of(keys), mesh)
        rules.check_parts(leaf.shape, spec, path_of(keys), mesh)
        whole.append(spec)
        split.append(_zero_spec(config, mesh, leaf.shape, spec, names))
    return {False: whole, True: split}


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
        shape, spec, mesh, min_elements=threshold, whole_dims=stacked
    )


def _opt_state_rows(config: Config, mesh: Any, opt_state: Any, master: Any) -> Any:
    """Gives a state leaf its parameter's place if it mirrors it, else one by its shape.

    A leaf mirrors the parameter whose path its own holds, if their shapes agree but for
    dims of size 1, over which the leaf is a sum or a maximum.
    """
    places = {row.path: row for row in jax.tree.leaves(master)}

    def row(keys: Any, leaf: Any) -> ArrayPlan:
        path, names = path_of(keys), ()
        for owner in owners(keys, places):
            own = rules.reduced_spec(owner.spec, owner.shape, leaf.shape)
            if own is not None:
                return _row(path, leaf, own, mesh)
            if owner.num_layers and leaf.shape[:1] == (owner.num_layers,):
                names = ("layers",)
        spec = PartitionSpec()
        if splits_of(config.zero.stage).state and jnp.issubdtype(
            leaf.dtype, jnp.floating
        ):
            spec = _zero_spec(config, mesh, leaf.shape, spec, names)
        return _row(path, leaf, spec, mesh)

    return jax.tree_util.tree_map_with_path(row, opt_state)
