"""Plans of parameters and optimizer state by sharding, before offload."""

import dataclasses
import functools
import inspect
import math
import re
import textwrap
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from zjax.errors import PlanError, Problem
from zjax.settings.schema import Mesh as MeshSettings
from zjax.settings.schema import Sharded, Zero
from zjax.sharding import mesh as meshes
from zjax.sharding import zero
from zjax.sharding.layers import layer_by_layer
from zjax.sharding.mesh import REPLICA, axes_of, entry, num_shares
from zjax.sharding.naming import names_of_dims, owners, path_of
from zjax.sharding.placement import ArrayPlan
from zjax.sharding.roles import moved_params
from zjax.typing import Model, Params

MIN_CODED_ELEMENTS = 2_048
"""Fewest elements of a shard, per layer, that a codec moves: one block of int8."""


def plan_compute(rows: Any, settings: Sharded) -> Any:
    """Plans the compute parameters of ZeRO-3 by the settings of ZeRO++."""
    coded = plan_codec(rows, "int8") if settings.quantized_weights else rows
    return jax.tree.map(_in_node, coded) if settings.secondary_partition else coded


def plan_grads(rows: Any, *, is_coded: bool) -> Any:
    """Plans the reduced gradients of ZeRO-3, as int4 blocks if coded (qgZ)."""
    return plan_codec(rows, "int4") if is_coded else rows


def check_effect(rows: Any, compute: Any, grads: Any, settings: Sharded) -> None:
    """Refuses settings of ZeRO++ that change the plan of no array in `rows`."""
    pairs = zip(*map(jax.tree.leaves, (rows, compute)), strict=True)
    coded = f"codes nothing: no matrix has shards of {MIN_CODED_ELEMENTS:,} elements"
    whole = "moves nothing: no array is sharded in a dim that the devices divide"
    effects = (
        ("secondary_partition", whole, any(x.stored != y.stored for x, y in pairs)),
        ("quantized_weights", coded, any(x.codec for x in jax.tree.leaves(compute))),
        ("quantized_gradients", coded, any(x.codec for x in jax.tree.leaves(grads))),
    )
    remedy = "use False, a smaller zero.min_shard_elements or a larger model"
    problems = [
        Problem(f"zero.replicas.{name}", True, problem, remedy)
        for name, problem, has_effect in effects
        if getattr(settings, name) and not has_effect
    ]
    if problems:
        raise PlanError(*problems)


def plan_codec(rows: Any, codec: str) -> Any:
    """Gives a codec to the matrices of a tree whose shards are large enough."""

    def one(row: ArrayPlan) -> ArrayPlan:
        is_stack = row.num_layers > 0
        shard = math.prod(row.stored.shard_shape(row.stored_shape))
        is_small = shard // max(1, row.num_layers) < MIN_CODED_ELEMENTS
        is_vector = len(row.shape) - is_stack < 2
        # Only traffic between nodes is worth the rounding of a codec.
        is_split = any(REPLICA in axes for axes in row.gathered_axes)
        is_coded = is_split and not is_small and not is_vector
        return dataclasses.replace(row, codec=codec) if is_coded else row

    return jax.tree.map(one, rows)


def _in_node(row: ArrayPlan) -> ArrayPlan:
    """Stores an array once per node, unless the padding of the array would change."""
    dims = axes_of(row.spec, len(row.shape))
    for size, axes in zip(row.shape, dims, strict=True):
        if REPLICA in axes and size % num_shares(row.stored.mesh, axes):
            return row
    kept = (tuple(axis for axis in axes if axis != REPLICA) for axes in dims)
    stored = row.stored.update(spec=PartitionSpec(*map(entry, kept)))
    return dataclasses.replace(row, stored=stored)


# JAX traces equal calls once, as for plans of several stages or meshes.
@functools.partial(jax.jit, static_argnums=0)
def _update(tx: Any, grads: Any, state: Any, params: Any) -> Any:
    """Updates parameters by an optimizer with all that a step gives."""
    return optax.with_extra_args_support(tx).update(
        grads,
        state,
        params,
        value=jnp.zeros(()),
        grad=grads,
        # Any scalar of the parameters has the type of the loss.
        value_fn=lambda p: sum(jnp.sum(x) for x in jax.tree.leaves(p)) * 1.0,
    )


def abstract_opt_state(tx: Any, params: Any) -> Any:
    """Traces one update of an optimizer, and returns the abstract optimizer state.

    Refuses an optimizer that rejects the parameters, that needs more than gradient,
    parameters, loss and loss function, or that changes shapes or dtypes of the state.
    """
    name = optimizer_name(tx)
    try:
        state = jax.eval_shape(tx.init, params)
    except Exception as error:
        problem, remedy = "fails on the parameters", "correct what it raises"
        raise PlanError(_failure(name, problem, error, remedy)) from error
    try:
        # Gradients have the shapes and dtypes of the parameters.
        updates, after = _update.eval_shape(tx, params, state, params)
    except Exception as error:
        problem = "fails in an update from one mean gradient"
        remedy = "use a transformation that needs only gradient, params, value, grad "
        remedy += "and value_fn"
        raise PlanError(_failure(name, problem, error, remedy)) from error
    # Optax casts updates to the dtype of the parameters.
    changed = _difference(state, after) or _difference(params, updates, dtypes=False)
    if changed:
        remedy = "use a transformation that keeps shapes and dtypes"
        if "to float64" in changed:
            remedy += ", and give it Python numbers, not arrays or NumPy's float64"
        raise PlanError(
            Problem("optimizer", name, f"changes {changed} in an update", remedy)
        )
    return state


def optimizer_name(tx: Any) -> str:
    """Name of the function that made a transformation, with the members of a chain."""
    update = getattr(tx, "update", None)
    if inspect.ismethod(update):
        return type(tx).__name__
    return _function_name(update) if inspect.isfunction(update) else repr(tx)


def _function_name(update: Any) -> str:
    """Name of the factory of an Optax update function, with the members of a chain."""
    # Optax defines update functions inside factories: "adam.<locals>.update_fn".
    name = update.__qualname__.split(".")[0]
    inner = []
    for cell in inspect.unwrap(update).__closure__ or ():
        members = cell.cell_contents
        if isinstance(members, optax.GradientTransformation):
            members = (members.update,)
        if isinstance(members, tuple):
            inner += [_function_name(m) for m in members if inspect.isfunction(m)]
    # Wrappers take the name of the transformation inside.
    if name in ("with_extra_args_support", "per_layer", "_on_states"):
        return inner[0]
    return f"{name}({', '.join(inner)})" if inner else name


def _failure(name: str, problem: str, error: Exception, remedy: str) -> Problem:
    """Describes why an optimizer raises, with the remedy for trees of another form."""
    text = str(error)
    if "pytree" in text or "tree structure" in text:
        remedy = "zjax holds parameters as nested dicts of arrays: give masks and "
        remedy += "labels that form, as nnx.to_pure_dict(mask) has"
    cause = textwrap.shorten(f"{type(error).__name__}: {text}", 400)
    return Problem("optimizer", name, f"{problem} ({cause})", remedy)


def _difference(before: Any, after: Any, *, dtypes: bool = True) -> str:
    """Describes the first leaf whose shape or dtype differs; empty for equal trees."""
    if jax.tree.structure(before) != jax.tree.structure(after):
        return "the structure of its state"
    pairs = zip(
        jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True
    )
    for (keys, x), y in pairs:
        if x.shape != y.shape or (dtypes and x.dtype != y.dtype):
            return f"{path_of(keys)} from {x.dtype}{x.shape} to {y.dtype}{y.shape}"
    return ""


_ROUTER = re.compile(r"(^|/)router(/kernel)?$")
"""Paths of router matrices, which are float32 in every role, as router logits are."""


@dataclasses.dataclass(frozen=True)
class ParamPlans:
    """Plans of trees with one array per parameter.

    Args:
        unsharded: Model-parallel spec of each leaf.
        sharded: Model-parallel spec of each leaf, extended over the ZeRO axes.
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
        settings: Zero,
        dims: MeshSettings,
        mesh: Mesh | AbstractMesh,
        model: Model,
        params: Params,
        *,
        is_by_layer: bool,
    ) -> "ParamPlans":
        """Finds the model-parallel spec and the ZeRO spec of each parameter.

        `dims` are settings that name dims.
        """
        logical = names_of_dims(model, params, dims, mesh)
        unsharded, sharded = [], []
        leaves = jax.tree_util.tree_leaves_with_path(params)
        for (keys, leaf), names in zip(leaves, logical, strict=True):
            spec = meshes.spec_for(names, path_of(keys), mesh)
            # The spec before ZeRO, which pads a dim that batch axes do not divide.
            meshes.check_parts(leaf.shape, spec, path_of(keys), mesh)
            unsharded.append(spec)
            sharded.append(_zero_spec(settings, mesh, leaf.shape, spec, names))
        is_stack = [names[:1] == ("layers",) for names in logical]
        routers = (path_of(keys) for keys, _ in leaves if _ROUTER.search(path_of(keys)))
        wide = {*moved_params(model.stack, params), *routers}
        return cls(params, mesh, unsharded, sharded, is_stack, is_by_layer, wide)

    def planned(self, dtype: str, *, is_sharded: bool) -> Any:
        """Plans one array per parameter in a dtype; stacks by layer become `Layers`."""
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
    """Plans an array that is stored with `spec`, and used with `used` if given."""
    return ArrayPlan(
        path,
        leaf.shape,
        leaf.dtype,
        stored=NamedSharding(mesh, spec),
        used=NamedSharding(mesh, spec if used is None else used),
        num_layers=leaf.shape[0] if is_stack else 0,
    )


def replicated_plans(tree: Any, mesh: Any) -> Any:
    """Plans arrays that every device stores whole, such as the model state."""
    return jax.tree_util.tree_map_with_path(
        lambda keys, leaf: _array_plan(path_of(keys), leaf, PartitionSpec(), mesh), tree
    )


def _zero_spec(
    settings: Zero,
    mesh: Any,
    shape: tuple[int, ...],
    spec: PartitionSpec,
    names: tuple[str | None, ...] = (),
) -> PartitionSpec:
    """Extends the spec of an array over the ZeRO axes, never along stacked layers."""
    stacked = [dim for dim, name in enumerate(names) if name in meshes.STACKED_DIMS]
    return zero.extend_spec(
        shape,
        spec,
        mesh,
        axes=zero.zero_axes(settings),
        min_elements=settings.min_shard_elements,
        stacked_dims=stacked,
    )


def plan_opt_state(settings: Zero, mesh: Any, tx: Any, master: Any) -> Any:
    """Shards optimizer state like the parameters, and other shapes by `_zero_spec`.

    A leaf belongs to a parameter if the path of the leaf contains the path of the
    parameter. Both are sharded alike if the shapes agree but for dims of size 1, which
    are reductions.
    """
    params = {row.path: row for row in jax.tree.leaves(master)}
    arrays = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), master)
    is_sharded = zero.splits_of(settings.stage).state

    def plan_leaf(keys: Any, leaf: Any) -> ArrayPlan:
        path, names = path_of(keys), ()
        for owner in owners(keys, params):
            spec = meshes.reduced_spec(owner.spec, owner.shape, leaf.shape)
            if spec is not None:
                return _array_plan(path, leaf, spec, mesh)
            # State per layer is stacked as the parameter is: ZeRO must not split the
            # layers.
            if owner.num_layers and leaf.shape[:1] == (owner.num_layers,):
                names = ("layers",)
        spec = PartitionSpec()
        if is_sharded and jnp.issubdtype(leaf.dtype, jnp.floating):
            spec = _zero_spec(settings, mesh, leaf.shape, spec, names)
        return _array_plan(path, leaf, spec, mesh)

    return jax.tree_util.tree_map_with_path(plan_leaf, abstract_opt_state(tx, arrays))


def _cast(tree: Any, dtype: str, wide: Collection[str]) -> Any:
    """Casts abstract floating arrays to `dtype`, and paths in `wide` to float32."""

    def cast(keys: Any, x: Any) -> jax.ShapeDtypeStruct:
        floating = jnp.issubdtype(x.dtype, jnp.floating)
        to = jnp.dtype("float32" if path_of(keys) in wide else dtype)
        return jax.ShapeDtypeStruct(x.shape, to if floating else x.dtype)

    return jax.tree_util.tree_map_with_path(cast, tree)
