"""Creates the first state array by array: it never is on the devices as a whole."""

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax

from zjax.jaxprs.program import Name, Program
from zjax.offload.compiled import CompiledGroup, compile_groups
from zjax.offload.groups import trace
from zjax.offload.units import positions_in, units_of
from zjax.settings.schema import Precision
from zjax.sharding.naming import layer_of
from zjax.sharding.placement import ArrayPlan, Form, pad, place_tree, unpad
from zjax.sharding.plan import Plan, trained_plan
from zjax.sharding.roles import trained
from zjax.storage.move import store_in_turn, to_devices
from zjax.storage.transfers import transfer_budget
from zjax.train.compute_params import join_param, stored_master
from zjax.train.state import (
    TrainState,
    cast_param,
    first_model_state,
    first_scalars,
)
from zjax.typing import Model, Params


def init_layer_by_layer(
    key: jax.Array,
    model: Model,
    tx: Any,
    plan: Plan,
    precision: Precision,
    *,
    weights: Iterable[jax.Array] | None = None,
) -> TrainState:
    """Creates the state of `zjax.init_state`, one array after another.

    The model has `init_layer`, or `weights` are given: stored parameters on the
    devices, created on demand, in the order and the dtypes of the master weights.
    """
    created = _created(key, model, plan) if weights is None else enumerate(weights)
    master, params, ema = _first_weights(created, plan)
    return TrainState(
        **jax.device_put(first_scalars(precision), plan.replicated),
        master=master,
        opt_state=_init_opt_state(tx, master, params, plan),
        model_state=first_model_state(key, model, plan),
        ema=ema,
        params=params,
    )


def _first_weights(created: Iterable[tuple[int, jax.Array]], plan: Plan) -> list[Any]:
    """Returns the stored trees `master`, `params` and `ema`."""
    trees = (plan.master, trained(plan.compute, plan.master), plan.ema)
    masters = jax.tree.leaves(plan.master)
    rows_by_tree = [masters, *(_by_parameter(rows, masters) for rows in trees[1:])]
    # Arrays are stored in order of creation; `order` finds tree and leaf again.
    order: list[tuple[int, int]] = []

    def first_weights() -> Iterator[tuple[jax.Array, ArrayPlan]]:
        for i, x in created:
            row, *others = (rows[i] for rows in rows_by_tree)
            for tree, other in enumerate(others, 1):
                if other is not None:
                    order.append((tree, i))
                    yield cast_param(x, row, other), other
            order.append((0, i))
            yield _stored_master(x, row.staged), row

    stored = list(store_in_turn(first_weights(), transfer_budget(plan.mesh)))
    arrays = dict(zip(order, stored, strict=True))
    return [
        jax.tree.unflatten(
            jax.tree.structure(tree),
            [arrays[number, i] for i, row in enumerate(rows) if row is not None],
        )
        for number, (tree, rows) in enumerate(zip(trees, rows_by_tree, strict=True))
    ]


def _by_parameter(rows: Any, masters: Sequence[ArrayPlan]) -> list[ArrayPlan | None]:
    """Lists the plan of each parameter in another tree; None if it is frozen."""
    leaves = iter(jax.tree.leaves(rows))
    return [None if row.is_frozen else next(leaves, None) for row in masters]


def _created(
    key: jax.Array, model: Model, plan: Plan
) -> Iterator[tuple[int, jax.Array]]:
    """Creates master weights unit by unit; yields each with the index of the leaf."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(plan.master)
    layers = [layer_of(keys) for keys, _ in leaves]
    rows = [row for _, row in leaves]
    assert model.stack is not None
    kinds: dict[int, tuple[int, int]] = {}
    for unit, tree in units_of(model.stack, positions_in(plan.master)):
        kinds.update((i, (unit.segment, unit.tile)) for i in jax.tree.leaves(tree))
    places = [
        (None, None) if layer is None else (layer, kinds.get(i))
        for i, layer in enumerate(layers)
    ]
    assert model.init_layer is not None
    traced = Program(jax.make_jaxpr(model.init_layer)(key, 0))
    programs: dict[Any, Any] = {}
    for place in dict.fromkeys(places):
        number, kind = place
        indices = [i for i, other in enumerate(places) if other == place]
        # Layers of one kind share a program: the number of the layer is an operand.
        if kind not in programs:
            programs[kind] = jax.jit(_creator(traced, layers, rows, indices))
        yield from zip(indices, programs[kind](key, number or 0), strict=True)


def _creator(
    traced: Program,
    layers: Sequence[int | None],
    rows: Sequence[ArrayPlan],
    indices: Sequence[int],
) -> Any:
    """Returns a function that creates one layer, or all leaves outside layers."""
    outputs = _stacks_of(traced.outputs, layers)
    part = traced.part(traced.inputs, [outputs[i] for i in indices])

    def create(key: jax.Array, number: jax.Array) -> list[jax.Array]:
        values = dict(zip(traced.inputs, (key, number), strict=True))
        params = part(*(values[name] for name in part.inputs))
        return [
            one(x, layers[i], rows[i].on_device)
            for i, x in zip(indices, params, strict=True)
        ]

    def one(x: jax.Array, layer: int | None, row: ArrayPlan) -> jax.Array:
        x = x if layer is None else x[0]
        return pad(place_tree(x.astype(row.dtype), row), row)

    return create


def _stacks_of(arrays: Sequence[Any], layers: Sequence[int | None]) -> list[Any]:
    """Returns for each leaf, one per layer, the array that stacks all layers."""
    stacks, index = [], -1
    for layer in layers:
        index += layer is None or layer == 0
        stacks.append(arrays[index])
    return stacks


def _init_opt_state(tx: Any, master: Params, params: Params, plan: Plan) -> Any:
    """Creates the stored optimizer state array by array."""
    learned = trained_plan(plan)
    trees = (
        trained(master, plan.master),
        learned.master,
        params,
        learned.compute,
    )
    weights = list(zip(*map(jax.tree.leaves, trees), strict=True))
    abstract = [jax.ShapeDtypeStruct(row.shape, row.dtype) for _, row, _, _ in weights]
    tree = jax.tree.structure(learned.master)
    program, shapes = trace(tx.init, tree.unflatten(abstract))
    by_name = dict(zip(program.inputs, weights, strict=True))
    rows = jax.tree.leaves(plan.opt_state)
    arrays = compile_groups(
        [program.part((), [output]) for output in program.outputs], jax.jit
    )

    def to_device(name: Name) -> jax.Array:
        x, row, upper, compute = by_name[name]
        x = to_devices(x, row, is_consumed=False)
        if row.form is Form.PLAIN:
            return unpad(x, row)
        upper = to_devices(upper, compute, is_consumed=False)
        return _joined(x, row.staged, upper, compute.staged)

    def create(array: CompiledGroup, row: ArrayPlan) -> jax.Array:
        (x,) = array({name: to_device(name) for name in array.inputs})
        row = row.staged
        return jax.jit(pad, static_argnums=1, out_shardings=row.stored)(x, row)

    pairs = zip(arrays, rows, strict=True)
    created = ((create(array, row), row) for array, row in pairs)
    stored = store_in_turn(created, transfer_budget(plan.mesh))
    return jax.tree.unflatten(jax.tree.structure(shapes), stored)


@functools.partial(jax.jit, static_argnums=(1, 3))
def _joined(
    x: jax.Array, row: ArrayPlan, upper: jax.Array, compute: ArrayPlan
) -> jax.Array:
    return unpad(join_param(x, row, upper, compute), row)


_stored_master = jax.jit(stored_master, static_argnums=1)
