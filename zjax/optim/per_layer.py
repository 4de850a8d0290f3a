"""Optimizers that see every layer by itself, though layers are stored in one array.

Most rules treat every entry alike and may work on the stack as it is, which is one
small program for all layers. Rules that measure an array (LAMB, Adafactor, Muon) get
the layers one by one. Which it is shows in the dataflow of `tx.update`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.extend import core

from zjax.optim.matrices import Names
from zjax.sharding.layers import Layers, put_together, take_apart
from zjax.sharding.placement import owners, path_of
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

    Example:
        >>> params, names = {"w": jnp.ones((2, 3))}, {"w": ("layers", "embed")}
        >>> adam, lamb = optax.adam(0.1), optax.lamb(0.1)
        >>> respect_layers(adam, params, names) is adam
        True
        >>> respect_layers(lamb, params, names) is lamb
        False
    """
    return per_layer(tx, names) if mixes_layers(tx, params, names) else tx


def per_layer(
    tx: optax.GradientTransformation, names: Names
) -> optax.GradientTransformationExtraArgs:
    """Gives a transformation trees in which `Layers` stand for stacked arrays.

    Args:
        tx: Written for a tree with one array per layer.
        names: Dims by path.

    Returns:
        A transformation of stacked arrays, with stacked state.
    """
    tx = optax.with_extra_args_support(tx)

    def apart(params: Params) -> Params:
        return take_apart(params, _stacks(params, names))

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


def mixes_layers(
    tx: optax.GradientTransformation, params: Params, names: Names
) -> bool:
    """Whether the update of an entry may depend on other entries of its stack.

    A norm over all stacked arrays, such as clipping takes, is no such dependence: it is
    the same number however layers are stored.

    Args:
        tx: Optax gradient transformation.
        params: Abstract parameters.
        names: Dims by path.

    Returns:
        False only where the dataflow of `init` and `update` shows it.
    """
    tx = optax.with_extra_args_support(tx)
    by_path = {
        path_of(keys): (number, leaf.shape)
        for number, (keys, leaf) in enumerate(_leaves_with_path(params))
        if _is_stack(path_of(keys), names)
    }

    def update(updates: Params, state: Any, params: Params, value: Any) -> Any:
        extra = {"value": value, "grad": updates, "value_fn": lambda _: value}
        return tx.update(updates, state, params, **extra)

    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    state = jax.eval_shape(tx.init, abstract)
    flow = _Flow(frozenset(number for number, _ in by_path.values()))
    value = jax.ShapeDtypeStruct((), jnp.float32)
    try:
        for function, inputs in (
            (tx.init, (abstract,)),
            (update, (abstract, state, abstract, value)),
        ):
            closed, results = jax.make_jaxpr(function, return_shape=True)(*inputs)
            found = flow.run(closed.jaxpr, _tags(inputs, by_path))
            flow.check_sums(found)
            for tag, expected in zip(found, _tags(results, by_path), strict=True):
                if expected is not None and tag not in (expected, _UNIFORM):
                    raise _MixesError
    except _MixesError:
        return True
    return False


class _MixesError(Exception):
    """An entry depends on others."""


@dataclasses.dataclass(frozen=True)
class _Entries:
    """Entry by entry from one stack."""

    stack: int


@dataclasses.dataclass(frozen=True)
class _Sum:
    """A scalar: sums over whole stacks, added."""

    stacks: frozenset[int]


_UNIFORM = "the same in every entry"
_CALLS = frozenset(("jit", "pjit", "closed_call", "custom_jvp_call", "remat2"))
_ADDS = frozenset("add add_any convert_element_type copy reduce_precision".split())
_ENTRYWISE = _ADDS | frozenset(
    """abs and cbrt ceil clamp div eq erf exp exp2 expm1 floor ge gt integer_pow
    is_finite le log log1p logistic lt max min mul ne neg nextafter not or pow rem round
    rsqrt select_n sign sqrt square stop_gradient sub tanh""".split()
)


@dataclasses.dataclass(frozen=True)
class _Flow:
    """What every value of a program is, as far as stacks are concerned."""

    stacks: frozenset[int]

    def run(self, jaxpr: Any, tags: Sequence[Any]) -> list[Any]:
        known = dict(zip(jaxpr.invars, tags, strict=True))

        def tag_of(atom: Any) -> Any:
            return None if isinstance(atom, core.Literal) else known.get(atom)

        for eqn in jaxpr.eqns:
            outs = self.apply(eqn, [tag_of(atom) for atom in eqn.invars])
            known |= dict(zip(eqn.outvars, outs, strict=True))
        return [tag_of(atom) for atom in jaxpr.outvars]

    def apply(self, eqn: Any, tags: list[Any]) -> list[Any]:
        name = eqn.primitive.name
        if name in _CALLS:
            inner = eqn.params.get("jaxpr") or eqn.params["call_jaxpr"]
            return self.run(getattr(inner, "jaxpr", inner), tags)
        sums = [tag.stacks for tag in tags if isinstance(tag, _Sum)]
        stacks = {tag.stack for tag in tags if isinstance(tag, _Entries)}
        if stacks and name == "reduce_sum" and not eqn.outvars[0].aval.shape:
            return [_Sum(frozenset(stacks))]
        if sums and not stacks and name in _ADDS:
            return [_Sum(frozenset().union(*sums))]
        self.check_sums(tags)
        if name == "broadcast_in_dim" and not eqn.invars[0].aval.shape:
            return [_UNIFORM]
        arrays = [tag for x, tag in zip(eqn.invars, tags, strict=True) if x.aval.shape]
        if stacks:
            if name not in _ENTRYWISE or len(stacks) > 1 or None in arrays:
                raise _MixesError
            return [_Entries(*stacks)]
        is_uniform = name in _ENTRYWISE and arrays and None not in arrays
        return [_UNIFORM if is_uniform else None] * len(eqn.outvars)

    def check_sums(self, tags: Sequence[Any]) -> None:
        """A sum may be used once it is over all stacks: it then knows no layers."""
        for tag in tags:
            if isinstance(tag, _Sum) and tag.stacks != self.stacks:
                raise _MixesError


def _tags(tree: Any, by_path: dict[str, tuple[int, tuple[int, ...]]]) -> list[Any]:
    return [_tag(keys, leaf, by_path) for keys, leaf in _leaves_with_path(tree)]


def _tag(keys: Any, leaf: Any, by_path: dict[str, tuple[int, tuple[int, ...]]]) -> Any:
    owner = next(iter(owners(keys, by_path)), None)
    if owner is None:
        return None
    number, shape = owner
    if leaf.shape != shape:
        raise _MixesError
    return _Entries(number)


def _stacks(params: Params, names: Names) -> Any:
    def one(keys: Any, leaf: Any) -> Any:
        return Layers([0] * leaf.shape[0]) if _is_stack(path_of(keys), names) else 0

    return jax.tree_util.tree_map_with_path(one, params)


def _is_stack(path: str, names: Names) -> bool:
    return names.get(path, ())[:1] == ("layers",)


def _leaves_with_path(tree: Any) -> list[tuple[Any, Any]]:
    return jax.tree_util.tree_leaves_with_path(tree)
