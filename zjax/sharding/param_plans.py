"""Plans of parameters and optimizer state by their sharding, before offload."""

import dataclasses
import re
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from zjax.config.schema import Config
from zjax.sharding import rules, zero
from zjax.sharding.layers import layer_by_layer
from zjax.sharding.moves import moved_params
from zjax.sharding.naming import names_of_dims
from zjax.sharding.opt_state import abstract_opt_state
from zjax.sharding.paths import owners, path_of
from zjax.sharding.placement import ArrayPlan
from zjax.typing import Model, Params

_ROUTER = re.compile(r"(^|/)router(/kernel)?$")


@dataclasses.dataclass(frozen=True)
class ParamPlans:
    """Plans of trees with one array per parameter.

    Args:
        params: Abstract parameters.
        mesh: Devices, or an abstract mesh.
        unsharded: Model-parallel spec of each leaf.
        sharded: The same specs, extended over the ZeRO axes.
        is_stack: Whether each leaf stacks layers.
        is_by_layer: Whether stacks are planned as one array per layer.
        wide: Paths of parameters that are float32 in every role: matrices of routers,
            and parameters that totals move.
    """

    params: Params
    mesh: Mesh | AbstractMesh
    unsharded: list[PartitionSpec]
    sharded: list[PartitionSpec]
    is_stack: list[bool]
    is_by_layer: bool
    wide: Collection[str] = ()

    @classmethod
    def of(
        cls,
        config: Config,
        mesh: Mesh | AbstractMesh,
        model: Model,
        params: Params,
        *,
        is_by_layer: bool,
    ) -> "ParamPlans":
        """Finds the specs of all parameters.

        Args:
            config: Settings; read for `mesh.names`, `mesh.rules` and `zero`.
            mesh: Devices, or an abstract mesh.
            model: Names the dims of its parameters.
            params: Abstract parameters.
            is_by_layer: Whether stacks are planned as one array per layer.

        Returns:
            The specs, from which `planned` makes trees.

        Raises:
            PlanError: Parameters that no rule can place.
        """
        logical = names_of_dims(model, params, config.mesh, mesh)
        unsharded, sharded = [], []
        leaves = jax.tree_util.tree_leaves_with_path(params)
        for (keys, leaf), names in zip(leaves, logical, strict=True):
            spec = rules.spec_for(names, path_of(keys), mesh)
            rules.check_parts(leaf.shape, spec, path_of(keys), mesh)
            unsharded.append(spec)
            sharded.append(_zero_spec(config, mesh, leaf.shape, spec, names))
        is_stack = [names[:1] == ("layers",) for names in logical]
        routers = (path_of(keys) for keys, _ in leaves if _ROUTER.search(path_of(keys)))
        wide = {*moved_params(model.stack, params), *routers}
        return cls(params, mesh, unsharded, sharded, is_stack, is_by_layer, wide)

    def planned(self, dtype: str, *, is_sharded: bool) -> Any:
        """A tree of plans in this dtype, of `Layers` where stacks are by layer."""
        cast = _cast(self.params, dtype, self.wide)
        leaves, tree = jax.tree_util.tree_flatten_with_path(cast)
        specs = self.sharded if is_sharded else self.unsharded
        rows = [
            _array_plan(path_of(keys), leaf, spec, self.mesh, used, is_stack=is_stack)
            for (keys, leaf), spec, used, is_stack in zip(
                leaves, specs, self.unsharded, self.is_stack, strict=True
            )
        ]
        rows = jax.tree.unflatten(tree, rows)
        return jax.tree.map(layer_by_layer, rows) if self.is_by_layer else rows


def _array_plan(
    path: str,
    leaf: Any,
    spec: PartitionSpec,
    mesh: Any,
    used: PartitionSpec | None = None,
    *,
    is_stack: bool = False,
) -> ArrayPlan:
    """The plan of an array stored with `spec` and used with `used`, else `spec`."""
    return ArrayPlan(
        path,
        leaf.shape,
        leaf.dtype,
        stored=NamedSharding(mesh, spec),
        used=NamedSharding(mesh, spec if used is None else used),
        num_layers=leaf.shape[0] if is_stack else 0,
    )


def replicated_plans(tree: Any, mesh: Any) -> Any:
    """Plans of arrays that every device stores, such as the model state."""
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
    return zero.extend_spec(
        shape,
        spec,
        mesh,
        axes=zero.zero_axes(config.zero),
        min_elements=config.zero.min_shard_elements,
        stacked_dims=stacked,
    )


def plan_opt_state(config: Config, mesh: Any, tx: Any, master: Any) -> Any:
    """Shards optimizer state as its parameters; state of other shapes by `_zero_spec`.

    A leaf belongs to the parameter whose path its own path contains. It is sharded like
    it if their shapes agree but for dims of size 1, which are reductions.
    """
    params = {row.path: row for row in jax.tree.leaves(master)}
    arrays = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), master)
    is_sharded = zero.splits_of(config.zero.stage).state

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


def _cast(tree: Any, dtype: str, wide: Collection[str]) -> Any:
    def cast(keys: Any, x: Any) -> jax.ShapeDtypeStruct:
        floating = jnp.issubdtype(x.dtype, jnp.floating)
        to = jnp.dtype("float32" if path_of(keys) in wide else dtype)
        return jax.ShapeDtypeStruct(x.shape, to if floating else x.dtype)

    return jax.tree_util.tree_map_with_path(cast, tree)
