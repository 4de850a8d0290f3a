"""A first state that never is on the devices as a whole."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax

from zjax.config.schema import Config
from zjax.offload.parts import Part, compile_parts
from zjax.offload.units import groups_of, num_units
from zjax.optim.dataflow import trace
from zjax.sharding.placement import Row, layer_of, pad, place_tree, shardings, unpad
from zjax.sharding.plan import DEVICE, Plan
from zjax.storage.move import move, rest_in_turn, room_to_pass
from zjax.train.state import TrainState, first_scalars, of_master, with_params
from zjax.typing import Model, Params


def init_layer_by_layer(
    key: jax.Array,
    model: Model,
    tx: Any,
    plan: Plan,
    config: Config,
    *,
    master: Params | None = None,
) -> TrainState:
    """Creates the state of `zjax.train.init_state`, one array after another.

    Args:
        key: Random key of the initial parameters.
        model: It starts layers by themselves, or its weights are given.
        tx: Optax gradient transformation.
        plan: Places every array.
        config: Read for `precision` and `optimizer.ema_decay`.
        master: Stored parameters at rest, in place of the model's.

    Returns:
        The state of step 0, at rest.
    """
    if master is None:
        master = _init_master(key, model, plan)
    create = jax.jit(
        lambda key: model.init(key)[1], out_shardings=shardings(plan.model_state)
    )
    state = TrainState(
        **jax.device_put(first_scalars(config), plan.replicated),
        master=master,
        opt_state=_init_opt_state(tx, master, plan),
        model_state=create(key),
        ema=of_master(master, plan.ema, plan) if plan.ema else (),
    )
    return with_params(state, plan)


def _init_master(key: jax.Array, model: Model, plan: Plan) -> Params:
    """Master weights, layer by layer and, where layers have tiles, tile by tile."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(plan.master)
    layers = [layer_of(keys) for keys, _ in leaves]
    rows = [row for _, row in leaves]
    places = list(zip(layers, _units(model, plan.master, layers), strict=True))
    programs: dict[int | None, Any] = {}
    order: list[int] = []

    def created() -> Iterator[tuple[jax.Array, Row]]:
        for place in dict.fromkeys(places):
            number, unit = place
            own = [i for i, other in enumerate(places) if other == place]
            if unit not in programs:
                programs[unit] = jax.jit(_creator(model, layers, rows, own))
            order.extend(own)
            yield from zip(
                programs[unit](key, number or 0), (rows[i] for i in own), strict=True
            )

    resting = list(rest_in_turn(created(), room_to_pass(plan.mesh)))
    arrays = dict(zip(order, resting, strict=True))
    return tree.unflatten(arrays[i] for i in range(len(arrays)))


def _units(
    model: Model, params: Params, layers: Sequence[int | None]
) -> list[int | None]:
    """For every leaf of layers apart, its unit in the layer; None outside of layers."""
    assert model.stack is not None
    size = num_units(model.stack, params)
    groups = groups_of(model.stack, params)
    pairs = zip(groups, layers, strict=True)
    return [None if layer is None else group % size for group, layer in pairs]


def _creator(
    model: Model, layers: Sequence[int | None], rows: Sequence[Row], own: Sequence[int]
) -> Any:
    """What creates the leaves of one layer, or those outside of layers."""
    init_layer = model.init_layer
    assert init_layer is not None

    def create(key: jax.Array, number: jax.Array) -> list[jax.Array]:
        params = jax.tree.leaves(init_layer(key, number))
        stacks = _stacks_of(params, layers)
        return [one(stacks[i], layers[i], rows[i].rest_in(DEVICE)) for i in own]

    def one(x: jax.Array, layer: int | None, row: Row) -> jax.Array:
        x = x if layer is None else x[0]
        return pad(place_tree(x.astype(row.dtype), row), row)

    return create


def _stacks_of(arrays: Sequence[Any], layers: Sequence[int | None]) -> list[Any]:
    """For every leaf of layers apart, the array that stacks it."""
    found, stack = [], -1
    for layer in layers:
        stack += layer is None or layer == 0
        found.append(arrays[stack])
    return found


def _init_opt_state(tx: Any, master: Params, plan: Plan) -> Any:
    """The state of the optimizer, array by array."""
    arrays, rows = jax.tree.leaves(master), jax.tree.leaves(plan.master)
    abstract = [jax.ShapeDtypeStruct(row.shape, row.dtype) for row in rows]
    tree = jax.tree.structure(plan.master)
    program, shapes = trace(tx.init, tree.unflatten(abstract))
    places = jax.tree.leaves(plan.opt_state)
    parts = compile_parts(
        [program.part((), [output]) for output in program.outputs], jax.jit
    )

    def bring(name: int) -> jax.Array:
        here = move(arrays[name], rows[name], DEVICE, is_consumed=False)
        return unpad(here, rows[name])

    def create(part: Part, place: Row) -> jax.Array:
        (x,) = part({name: bring(name) for name in part.inputs})
        here = place.rest_in(DEVICE).sharding
        return jax.jit(pad, static_argnums=1, out_shardings=here)(x, place.unnamed)

    pairs = zip(parts, places, strict=True)
    created = ((create(part, place), place) for part, place in pairs)
    resting = rest_in_turn(created, room_to_pass(plan.mesh))
    return jax.tree.unflatten(jax.tree.structure(shapes), resting)
