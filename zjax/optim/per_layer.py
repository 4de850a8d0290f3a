"""Optimizers that see every layer by itself, though layers are stored in one array.

Most rules treat every entry alike and may work on the stack as it is, which is one
small program for all layers. Rules that measure an array (LAMB, Adafactor, Muon), or go
by its shape, get the layers one by one. Which it is shows where the program on layers
is written beside the program on stacks.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zjax.jaxprs.interpret import Equation, interpret
from zjax.jaxprs.primitives import ELEMENTWISE
from zjax.jaxprs.program import text_of_constant
from zjax.optim.matrices import Names
from zjax.sharding.layers import Layers, put_together, take_apart
from zjax.sharding.opt_state import abstract_opt_state
from zjax.sharding.paths import name_of, path_of
from zjax.typing import Params


def respect_layers(
    tx: optax.GradientTransformation, params: Params, names: Names
) -> optax.GradientTransformation:
    """Has a transformation update stacked layers as if each were an array of its own.

    Args:
        tx: Written for a tree with one array per layer.
        params: Abstract parameters.
        names: Dims by path; arrays whose first dim is `layers` are stacks.

    Returns:
        `tx` itself if it treats all entries of an array alike.

    Raises:
        PlanError: The transformation cannot update from one mean gradient.

    Example:
        >>> params, names = {"w": jnp.ones((2, 3))}, {"w": ("layers", "embed")}
        >>> adam, lamb = optax.adam(0.1), optax.lamb(0.1)
        >>> respect_layers(adam, params, names) is adam
        True
        >>> respect_layers(lamb, params, names) is lamb
        False
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    if not any(_is_stack(path_of(keys), names) for keys, _ in leaves):
        return tx
    abstract_opt_state(tx, params)
    return per_layer(tx, names) if knows_layers(tx, params, names) else tx


def per_layer(
    tx: optax.GradientTransformation, names: Names
) -> optax.GradientTransformationExtraArgs:
    """Gives a transformation trees in which `Layers` stand for stacked arrays.

    Args:
        tx: Written for a tree with one array per layer.
        names: Dims by path.

    Returns:
        A transformation of stacked arrays, with stacked state; `tx` if there are none.
    """
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
        given = dict(extra)
        if "grad" in extra:
            given["grad"] = apart(extra["grad"])
        if "value_fn" in extra:
            given["value_fn"] = lambda params: extra["value_fn"](put_together(params))
        updates, state = tx.update(
            apart(updates),
            take_apart(state, jax.eval_shape(lambda: tx.init(apart(like)))),
            None if params is None else apart(params),
            **given,
        )
        return put_together(updates), put_together(state)

    return optax.GradientTransformationExtraArgs(init, update)


def knows_layers(
    tx: optax.GradientTransformation, params: Params, names: Names
) -> bool:
    """Whether layers by themselves may be updated otherwise than their stack.

    A norm over all layers, such as clipping takes, is no such difference: it is the
    same number however they are stored.

    Args:
        tx: Optax gradient transformation.
        params: Abstract parameters.
        names: Dims by path.

    Returns:
        False only where `init` and `update` are the same expressions either way.
    """
    tx = optax.with_extra_args_support(tx)
    flow = _Flow()

    def update(updates: Params, state: Any, params: Params, value: Any) -> Any:
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
    except _KnowsLayersError:
        return True


class _KnowsLayersError(Exception):
    """An entry depends on others of its layer."""


@dataclasses.dataclass(frozen=True)
class _Entries:
    """Entry by entry from one layer, or from one stack, whose layer is None."""

    expression: int
    layer: int | None
    num_layers: int


@dataclasses.dataclass(frozen=True)
class _Uniform:
    """An array of one number."""

    expression: int


@dataclasses.dataclass(frozen=True)
class _Sum:
    """A number: the entries of layers or stacks, and other numbers, added up."""

    layers: frozenset[_Entries]
    others: frozenset[int]


@dataclasses.dataclass(frozen=True)
class _Other:
    """Any other array or number."""

    expression: int


_OF_SHAPES = frozenset(("broadcast_dimensions", "shape", "sharding"))


class _Flow:
    """Traces programs to expressions that are equal where the mathematics is."""

    def __init__(self):
        self.numbers: dict[Any, int] = {}
        self.depths: dict[str, int] = {}

    def number(self, *key: Any) -> int:
        return self.numbers.setdefault(key, len(self.numbers))

    def trace(self, function: Any, inputs: tuple[Any, ...]) -> dict[str, Any]:
        closed, outputs = jax.make_jaxpr(function, return_shape=True)(*inputs)
        kinds = [self.of_input(*cell) for cell in _cells(inputs)]
        found = interpret(closed, kinds, self.apply, self.of_constant)
        results: dict[str, Any] = {}
        for (path, layer, _, _), kind in zip(_cells(outputs), found, strict=True):
            result = self.of_result(kind, layer)
            if results.setdefault(path, result) != result:
                raise _KnowsLayersError
        return results

    def of_input(self, path: str, layer: int | None, depth: int, leaf: Any) -> Any:
        if layer is not None:
            self.depths[path] = depth
            return _Entries(self.number("input", path), layer, depth)
        if path not in self.depths:
            return _Other(self.number("input", path))
        if leaf.shape[:1] != (self.depths[path],):
            raise _KnowsLayersError
        return _Entries(self.number("input", path), None, 0)

    def of_constant(self, value: Any) -> _Other:
        return _Other(self.number("constant", text_of_constant(value)))

    def of_result(self, kind: Any, layer: int | None) -> Any:
        kind = self.added(kind)
        if isinstance(kind, _Entries) and kind.layer == layer:
            return ("entries", kind.expression)
        if layer is not None and not isinstance(kind, _Uniform):
            raise _KnowsLayersError
        return kind

    def apply(self, eqn: Equation, kinds: list[Any]) -> list[Any]:
        name = eqn.primitive.name
        entries = [kind for kind in kinds if isinstance(kind, _Entries)]
        if entries and name == "reduce_sum" and not eqn.outvars[0].aval.shape:
            return [_Sum(frozenset(entries), frozenset())]
        if name in ("add", "add_any") and any(isinstance(k, _Sum) for k in kinds):
            return [_add(*kinds)]
        kinds = [self.added(kind) for kind in kinds]
        is_array = [bool(atom.aval.shape) for atom in eqn.invars]
        arrays = [kind for kind, array in zip(kinds, is_array, strict=True) if array]
        if name == "broadcast_in_dim" and not is_array[0]:
            return [_Uniform(kinds[0].expression)]
        what = (name, *_settings(eqn.params), *((type(k), k.expression) for k in kinds))
        if entries:
            others = [kind for kind in arrays if isinstance(kind, _Other)]
            if name not in ELEMENTWISE or others or len({e.layer for e in entries}) > 1:
                raise _KnowsLayersError
            return [dataclasses.replace(entries[0], expression=self.number(*what))]
        if (
            arrays
            and name in ELEMENTWISE
            and all(isinstance(k, _Uniform) for k in arrays)
        ):
            return [_Uniform(self.number(*what))]
        shapes = str([x.aval for x in (*eqn.invars, *eqn.outvars)])
        return [
            _Other(self.number(*what, shapes, index))
            for index in range(len(eqn.outvars))
        ]

    def added(self, kind: Any) -> Any:
        """A sum as any other number, once it is over all layers or over none."""
        if not isinstance(kind, _Sum):
            return kind
        layers: dict[tuple[int, int], set[int | None]] = {}
        for each in kind.layers:
            layers.setdefault((each.expression, each.num_layers), set()).add(each.layer)
        for (_, depth), found in layers.items():
            if found != (set(range(depth)) or {None}):
                raise _KnowsLayersError
        stacks = frozenset(expression for expression, _ in layers)
        return _Other(self.number("sum", stacks, kind.others))


def _add(left: Any, right: Any) -> _Sum:
    sums = [
        x if isinstance(x, _Sum) else _Sum(frozenset(), frozenset((x.expression,)))
        for x in (left, right)
    ]
    if sums[0].layers & sums[1].layers or sums[0].others & sums[1].others:
        raise _KnowsLayersError
    return _Sum(sums[0].layers | sums[1].layers, sums[0].others | sums[1].others)


def _settings(params: Any) -> list[tuple[str, str]]:
    return sorted((k, str(v)) for k, v in params.items() if k not in _OF_SHAPES)


def _cells(tree: Any) -> Iterator[tuple[str, int | None, int, Any]]:
    """Path, layer (None where there are none), number of layers, and leaf."""
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
    def one(keys: Any, leaf: Any) -> Any:
        path = path_of(keys)
        if not _is_stack(path, names):
            return 0
        return Layers([0] * leaf.shape[0], name_of(path))

    return take_apart(params, jax.tree_util.tree_map_with_path(one, params))


def _is_stack(path: str, names: Names) -> bool:
    return names.get(path, ())[:1] == ("layers",)
