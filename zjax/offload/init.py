"""A first state that never is on the devices as a whole."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zjax.config.schema import Config
from zjax.offload.parts import compile_parts
from zjax.offload.stream import rest
from zjax.optim.dataflow import trace
from zjax.sharding.placement import Row, layer_of, pad, place_tree, unpad
from zjax.sharding.plan import DEVICE, Plan, plan_on_device
from zjax.train.gradients import param_in_use
from zjax.train.state import TrainState, first_scalars
from zjax.typing import Model


def init_layer_by_layer(
    key: jax.Array, model: Model, tx: Any, plan: Plan, config: Config
) -> TrainState:
    """Creates the state of `zjax.train.init_state`, one layer after another.

    Args:
        key: Random key of the initial parameters.
        model: It starts layers by themselves.
        tx: Optax gradient transformation.
        plan: Places every array.
        config: Read for `precision` and `optimizer.ema_decay`.

    Returns:
        The state of step 0, at rest.
    """
    places = _Places(plan, config)
    arrays: dict[int, tuple[jax.Array, ...]] = {}
    for number in (None, *range(places.num_layers)):
        positions = places.positions(number)
        arrays |= zip(positions, places.start(model, key, number), strict=True)
    master, params, ema = zip(*(arrays[i] for i in range(len(arrays))), strict=True)
    _, model_state = jax.eval_shape(model.init, key)
    assert not jax.tree.leaves(model_state), "a model of blocks has parameters alone"
    return TrainState(
        **first_scalars(config),
        master=places.tree.unflatten(master),
        opt_state=_init_opt_state(tx, master, places),
        model_state=model_state,
        ema=places.tree.unflatten(ema) if plan.ema else (),
        params=places.tree.unflatten(params),
    )


class _Places:
    """The leaves of the parameters by layer, and their places."""

    def __init__(self, plan: Plan, config: Config):
        leaves, self.tree = jax.tree_util.tree_flatten_with_path(plan.master)
        self.layers = [layer_of(keys) for keys, _ in leaves]
        self.num_layers = 1 + max((n for n in self.layers if n is not None), default=-1)
        self.rows = [row for _, row in leaves]
        self.compute = jax.tree.leaves(plan.compute)
        self.ema = jax.tree.leaves(plan.ema) or [None] * len(leaves)
        self.on_device = plan_on_device(plan)
        self.opt_rows = jax.tree.leaves(plan.opt_state)
        self.programs: dict[bool, Any] = {}

    def positions(self, number: int | None) -> list[int]:
        """The leaves of one layer; of None, those outside of layers."""
        return [i for i, layer in enumerate(self.layers) if layer == number]

    def start(
        self, model: Model, key: jax.Array, number: int | None
    ) -> list[tuple[Any, ...]]:
        """Master weights, parameters in use and averages of one layer."""
        is_layer = number is not None
        if is_layer not in self.programs:
            self.programs[is_layer] = jax.jit(self.program(model, number))
        found = self.programs[is_layer](key, jnp.int32(number or 0))
        positions = self.positions(number)
        rows = (self.rows, self.compute, self.ema)
        return [
            tuple(
                None if x is None else rest([x], [kind[i]])[0]
                for x, kind in zip(each, rows, strict=True)
            )
            for each, i in zip(found, positions, strict=True)
        ]

    def program(self, model: Model, number: int | None) -> Any:
        """What creates the arrays of a layer on the devices."""
        init_layer = model.init_layer
        assert init_layer is not None
        positions = self.positions(number)
        master = jax.tree.leaves(self.on_device.master)
        compute = jax.tree.leaves(self.on_device.compute)

        def create(key: jax.Array, number: jax.Array) -> list[tuple[Any, ...]]:
            params = init_layer(key, number)
            stacks = _stacks_of(jax.tree.leaves(params), self.layers)
            return [one(stacks[i], i) for i in positions]

        def one(x: jax.Array, i: int) -> tuple[Any, ...]:
            x = x if self.layers[i] is None else x[0]
            x = place_tree(x.astype(master[i].dtype), master[i])
            used = pad(param_in_use(x, master[i], compute[i]), compute[i])
            ema = None
            if self.ema[i] is not None:
                ema = pad(place_tree(x.astype(jnp.float32), self.ema[i]), self.ema[i])
            return pad(x, master[i]), used, ema

        return create


def _stacks_of(arrays: Sequence[Any], layers: Sequence[int | None]) -> list[Any]:
    """For every leaf of layers apart, the array that stacks it."""
    found, stack = [], -1
    for layer in layers:
        stack += layer is None or layer == 0
        found.append(arrays[stack])
    return found


def _init_opt_state(tx: Any, master: Sequence[jax.Array], places: _Places) -> Any:
    """The state of the optimizer, array by array."""
    abstract = [jax.ShapeDtypeStruct(row.shape, row.dtype) for row in places.rows]
    program, shapes = trace(tx.init, places.tree.unflatten(abstract))
    on_device = jax.tree.leaves(places.on_device.opt_state)
    parts = compile_parts(
        [program.part((), [output]) for output in program.outputs],
        jax.jit,
    )
    arrays = []
    for part, row, here in zip(parts, places.opt_rows, on_device, strict=True):
        rows = {name: places.rows[name] for name in part.inputs}
        known = {name: unpad(_bring(master[name], r), r) for name, r in rows.items()}
        (x,) = part(known)
        x = jax.jit(pad, static_argnums=1, out_shardings=here.sharding)(x, row)
        arrays += rest([x], [row])
    return jax.tree.unflatten(jax.tree.structure(shapes), arrays)


def _bring(x: jax.Array, row: Row) -> jax.Array:
    if row.memory == DEVICE:
        return x
    return jax.device_put(x, row.rest_in(DEVICE).sharding)
