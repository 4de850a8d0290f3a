"""Optimizers that update each layer separately, though layers are stacked in one array.

Elementwise rules (Adam) work on the stack as it is, in one small program for all
layers. Rules that measure an array (LAMB, Adafactor, Muon) or depend on the array's
shape get the layers one by one. `needs_layers` decides by comparing the traced programs
of the two ways.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zjax.jaxprs.program import ELEMENTWISE, Equation, interpret, text_of_constant
from zjax.optim.groups import Names
from zjax.sharding.layers import Layers, put_together, take_apart
from zjax.sharding.naming import name_of, path_of
from zjax.sharding.param_plans import abstract_opt_state
from zjax.typing import Params


def per_layer_if_needed(
    tx: optax.GradientTransformation, params: Params, names: Names
) -> optax.GradientTransformation:
    """Makes a transformation treat stacked layers as separate arrays, if that matters.

    An array is a stack if the first of its dim names is `layers`.
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    if not any(_is_stack(path_of(keys), names) for keys, _ in leaves):
        return tx
    # Raises PlanError first where `tx` cannot update from one mean gradient.
    abstract_opt_state(tx, params)
    return per_layer(tx, names) if needs_layers(tx, params, names) else tx


def per_layer(
    tx: optax.GradientTransformation, names: Names
) -> optax.GradientTransformationExtraArgs:
    """Wraps a transformation of single layers to take stacked arrays."""
    tx = optax.with_extra_args_support(tx)
    if not any(_is_stack(path, names) for path in names):
        return tx

    def apart(params: Params) -> Params:
        return _apart(params, names)

    def init(params: Params) -> Any:
        return put_together(tx.init(apart(params)))

    def update(
        updates: Params, state: Any, params: Params | None = None, **extra: Any
    ) -> tuple[Params, Any]:
        like = updates if params is None else params
        layer_extra = dict(extra)
        if "grad" in extra:
            layer_extra["grad"] = apart(extra["grad"])
        if "value_fn" in extra:
            layer_extra["value_fn"] = lambda params: extra["value_fn"](
                put_together(params)
            )
        updates, state = tx.update(
            apart(updates),
            take_apart(state, jax.eval_shape(lambda: tx.init(apart(like)))),
            None if params is None else apart(params),
            **layer_extra,
        )
        return put_together(updates), put_together(state)

    return optax.GradientTransformationExtraArgs(init, update)


def needs_layers(
    tx: optax.GradientTransformation, params: Params, names: Names
) -> bool:
    """Whether updating single layers may differ from updating the stack of layers.

    False only if `init` and `update` trace to equal expressions either way. A norm over
    all layers, as in clipping, makes no difference.
    """
    tx = optax.with_extra_args_support(tx)
    flow = _Flow()

    def update(updates: Params, state: Any, params: Params, value: Any) -> Any:
        # Optimizers may ask for the loss, the gradients, or a function of the loss.
        extra = {"value": value, "grad": updates, "value_fn": lambda _: value}
        return tx.update(updates, state, params, **extra)

    def results(params: Params) -> tuple[Any, ...]:
        state = jax.eval_shape(tx.init, params)
        value = jax.ShapeDtypeStruct((), jnp.float32)
        inputs = (params, state, params, value)
        return flow.trace(tx.init, (params,)), flow.trace(update, inputs)

    apart = jax.eval_shape(lambda params: _apart(params, names), params)
    try:
        return results(apart) != results(params)
    # A program that the rules do not understand counts as needing layers: always right.
    except _NeedsLayersError:
        return True


class _NeedsLayersError(Exception):
    """An entry depends on more of a layer than the entry at one index."""


@dataclasses.dataclass(frozen=True)
class _Entries:
    """An elementwise result of one layer, or of a whole stack if `layer` is None."""

    expression: int
    layer: int | None
    num_layers: int


@dataclasses.dataclass(frozen=True)
class _Uniform:
    """An array filled with one number."""

    expression: int


@dataclasses.dataclass(frozen=True)
class _Sum:
    """A scalar: the sum of all entries of some layers or stacks, plus other scalars."""

    layers: frozenset[_Entries]
    others: frozenset[int]


@dataclasses.dataclass(frozen=True)
class _Other:
    """An array or scalar of any kind that the classes above do not describe."""

    expression: int


_SHAPE_PARAMS = frozenset(("broadcast_dimensions", "shape", "sharding"))
"""Parameters of primitives that differ between a layer and a stack by shape alone."""


class _Flow:
    """Numbers expressions of traced programs; equal expressions get equal numbers."""

    def __init__(self):
        self.numbers: dict[Any, int] = {}
        self.depths: dict[str, int] = {}

    def number(self, *key: Any) -> int:
        return self.numbers.setdefault(key, len(self.numbers))

    def trace(self, function: Any, inputs: tuple[Any, ...]) -> dict[str, Any]:
        """Returns the expression of each output of a function, by path."""
        closed, outputs = jax.make_jaxpr(function, return_shape=True)(*inputs)
        values = [self.input_value(*cell) for cell in _layer_leaves(inputs)]
        values_out = interpret(closed, values, self.apply, self.constant_value)
        results: dict[str, Any] = {}
        for (path, layer, _, _), value in zip(
            _layer_leaves(outputs), values_out, strict=True
        ):
            result = self.result_value(value, layer)
            # All layers of a stack must follow one expression.
            if results.setdefault(path, result) != result:
                raise _NeedsLayersError
        return results

    def input_value(self, path: str, layer: int | None, depth: int, leaf: Any) -> Any:
        """Describes one input by path and layer."""
        if layer is not None:
            self.depths[path] = depth
            return _Entries(self.number("input", path), layer, depth)
        if path not in self.depths:
            return _Other(self.number("input", path))
        # This path was traced as layers before; a stack of them keeps the count in
        # front.
        if leaf.shape[:1] != (self.depths[path],):
            raise _NeedsLayersError
        return _Entries(self.number("input", path), None, 0)

    def constant_value(self, value: Any) -> _Other:
        return _Other(self.number("constant", text_of_constant(value)))

    def result_value(self, value: Any, layer: int | None) -> Any:
        """Describes one output, and refuses outputs that differ between layers."""
        value = self.finish_sum(value)
        if isinstance(value, _Entries) and value.layer == layer:
            return ("entries", value.expression)
        if layer is not None and not isinstance(value, _Uniform):
            raise _NeedsLayersError
        return value

    def apply(self, eqn: Equation, values: list[Any]) -> list[Any]:
        """Describes the outputs of one equation from the descriptions of its inputs."""
        name = eqn.primitive.name
        entries = [value for value in values if isinstance(value, _Entries)]
        if entries and name == "reduce_sum" and not eqn.outvars[0].aval.shape:
            return [_Sum(frozenset(entries), frozenset())]
        if name in ("add", "add_any") and any(isinstance(k, _Sum) for k in values):
            return [_add(*values)]
        values = [self.finish_sum(value) for value in values]
        is_array = [bool(atom.aval.shape) for atom in eqn.invars]
        arrays = [value for value, array in zip(values, is_array, strict=True) if array]
        # One number all over an array is alike for layers and stacks.
        if name == "broadcast_in_dim" and not is_array[0]:
            return [_Uniform(values[0].expression)]
        expression_key = (
            name,
            *_settings(eqn.params),
            *((type(k), k.expression) for k in values),
        )
        if entries:
            others = [value for value in arrays if isinstance(value, _Other)]
            if name not in ELEMENTWISE or others or len({e.layer for e in entries}) > 1:
                raise _NeedsLayersError
            return [
                dataclasses.replace(entries[0], expression=self.number(*expression_key))
            ]
        if (
            arrays
            and name in ELEMENTWISE
            and all(isinstance(k, _Uniform) for k in arrays)
        ):
            return [_Uniform(self.number(*expression_key))]
        # Away from stacks, equal expressions of unequal shapes are different values.
        shapes = str([x.aval for x in (*eqn.invars, *eqn.outvars)])
        return [
            _Other(self.number(*expression_key, shapes, index))
            for index in range(len(eqn.outvars))
        ]

    def finish_sum(self, value: Any) -> Any:
        """Converts a sum over all layers, or over a whole stack, to `_Other`."""
        if not isinstance(value, _Sum):
            return value
        layers: dict[tuple[int, int], set[int | None]] = {}
        for each in value.layers:
            layers.setdefault((each.expression, each.num_layers), set()).add(each.layer)
        for (_, depth), layer_set in layers.items():
            if layer_set != (set(range(depth)) or {None}):
                raise _NeedsLayersError
        stacks = frozenset(expression for expression, _ in layers)
        return _Other(self.number("sum", stacks, value.others))


def _add(left: Any, right: Any) -> _Sum:
    """Adds two scalars, of which at least one is a sum over layers."""
    sums = [
        x if isinstance(x, _Sum) else _Sum(frozenset(), frozenset((x.expression,)))
        for x in (left, right)
    ]
    # Sets cannot count a term twice.
    if sums[0].layers & sums[1].layers or sums[0].others & sums[1].others:
        raise _NeedsLayersError
    return _Sum(sums[0].layers | sums[1].layers, sums[0].others | sums[1].others)


def _settings(params: Any) -> list[tuple[str, str]]:
    """Lists the parameters of a primitive that must agree between layer and stack."""
    return sorted((k, str(v)) for k, v in params.items() if k not in _SHAPE_PARAMS)


def _layer_leaves(tree: Any) -> Iterator[tuple[str, int | None, int, Any]]:
    """Yields path, layer (None without layers), number of layers, and leaf."""
    pairs = jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda x: isinstance(x, Layers)
    )
    for keys, node in pairs:
        if not isinstance(node, Layers):
            yield path_of(keys), None, 0, node
            continue
        for number, layer in enumerate(node):
            for more, leaf in jax.tree_util.tree_leaves_with_path(layer):
                yield path_of((*keys, *more)), number, len(node), leaf


def _apart(params: Params, names: Names) -> Params:
    """Slices the stacks of a tree of parameters into `Layers`."""

    def one(keys: Any, leaf: Any) -> Any:
        path = path_of(keys)
        if not _is_stack(path, names):
            return 0
        # Any leaf will do: `take_apart` reads the structure alone.
        return Layers([0] * leaf.shape[0], name_of(path))

    return take_apart(params, jax.tree_util.tree_map_with_path(one, params))


def _is_stack(path: str, names: Names) -> bool:
    """Whether the first dim of a parameter stacks layers."""
    return names.get(path, ())[:1] == ("layers",)
