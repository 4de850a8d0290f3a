"""NNX modules as submodels: nested dicts of arrays outside, the module inside."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from zjax.errors import ModelError, Problem
from zjax.models.submodel import Started, Submodel, names_of_sharding, names_only
from zjax.ops.keys import fold_name
from zjax.sharding.placement import abstract_key
from zjax.typing import ModelState, Params

Change = Callable[[nnx.Module, jax.Array], None]
Flat = dict[tuple[Any, ...], Any]


@dataclasses.dataclass(frozen=True)
class Skeleton:
    """Module without arrays."""

    graphdef: Any
    params: tuple[tuple[Any, ...], ...]
    other_state: tuple[tuple[Any, ...], ...]
    streams: dict[tuple[Any, ...], tuple[type, tuple[int, ...]]]


def make_submodel(model: Any, field: str, change: Change | None = None) -> Submodel:
    """Makes a submodel of an NNX module, which may be abstract, or of `rngs -> module`.

    Random streams restart from the key of each step; evaluation always draws equal
    numbers. `change(module, key)` changes a new module, or a copy of the given one.
    """
    if isinstance(model, nnx.Module):
        return _submodel_of_module(model, field, change)
    make = _check_factory(model, field)
    if change is not None:
        make = _changed(make, change)
    skeleton = _trace_skeleton(make)

    def start(key: jax.Array) -> tuple[Any, Callable[[], Started]]:
        module = make(key)
        params, other_state = _split(module)
        started = nest(params), nest(other_state), nest(logical_of(module))
        module.train()
        return module, lambda: started

    return Submodel(
        start=start,
        resume=functools.partial(_resume, skeleton),
        model_state=_model_state,
    )


def _changed(make: Callable[[jax.Array], Any], change: Change) -> Any:
    """Makes a factory that also applies a change to new modules."""

    def make_changed(key: jax.Array) -> Any:
        module = make(key)
        change(module, key)
        return module

    return make_changed


def _submodel_of_module(
    model: nnx.Module, field: str, change: Change | None
) -> Submodel:
    """Makes a submodel of an existing module, changed in a copy."""
    # The user's module stays as it is.
    model = nnx.clone(model)
    if change is not None:
        # A fixed key, as the weights of a given module do not depend on a seed.
        change(model, jax.random.key(0))
    skeleton = _skeleton(model)
    params, other_state = _split(model)
    weights = nest(params), nest(other_state)
    logical = nest(logical_of(model))
    is_abstract = any(map(_is_abstract, jax.tree.leaves(weights)))

    def start(key: jax.Array) -> tuple[Any, Callable[[], Started]]:
        params, other_state = jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype) if _is_abstract(x) else x, weights
        )
        started = params, other_state, logical
        return _resume(skeleton, params, other_state, key), lambda: started

    def given() -> tuple[Params, ModelState]:
        if is_abstract:
            text = "is abstract and has no weights"
            remedy = "pass the function that makes it, or a module with weights"
            raise ModelError(Problem(field, type(model).__name__, text, remedy))
        return weights

    return Submodel(
        start=start,
        resume=functools.partial(_resume, skeleton),
        model_state=_model_state,
        given=given,
    )


def module_of(model: Any) -> nnx.Module:
    """Returns the module that a user gave, or an abstract one from a factory."""
    if isinstance(model, nnx.Module):
        return model
    return nnx.eval_shape(_check_factory(model, "model"), abstract_key())


def _check_factory(model: Any, field: str) -> Callable[[jax.Array], Any]:
    """Returns `key -> module` of a factory; refuses one that needs more than rngs."""
    partial = model if isinstance(model, functools.partial) else None
    target = partial.func if partial else model
    bound = (partial.args, partial.keywords) if partial else ((), {})
    is_class = inspect.isclass(target)
    # The metaclass of nnx.Module hides the arguments of its classes.
    signature = inspect.signature(target.__init__ if is_class else target)
    by_name = "rngs" in signature.parameters
    name = getattr(target, "__name__", type(target).__name__)

    def arguments(rngs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return ((), {"rngs": rngs}) if by_name else ((rngs,), {})

    def make(key: jax.Array) -> Any:
        args, keywords = arguments(nnx.Rngs(key))
        module = model(*args, **keywords)
        if isinstance(module, nnx.Module):
            return module
        text = f"returns {type(module).__name__}, not an nnx.Module"
        raise ModelError(Problem(field, name, text, "return the module"))

    args, keywords = arguments(None)
    self_argument = (None,) if is_class else ()
    try:
        signature.bind(*self_argument, *bound[0], *args, **{**bound[1], **keywords})
    except TypeError as error:
        text = f"cannot be called with rngs alone ({error})"
        remedy = "give the other arguments with functools.partial"
        raise ModelError(Problem(field, name, text, remedy)) from None
    return make


def _trace_skeleton(make: Callable[[jax.Array], Any]) -> Skeleton:
    """Traces a factory for the skeleton of a module."""
    # A skeleton is no array, and leaves the trace as a side effect.
    skeletons: list[Skeleton] = []

    def trace(key: jax.Array) -> None:
        skeletons.append(_skeleton(make(key)))

    jax.eval_shape(trace, abstract_key())
    return skeletons[0]


def _skeleton(module: nnx.Module) -> Skeleton:
    """Returns the skeleton of a module."""
    params, other_state = _split(module)
    streams = nnx.to_flat_state(nnx.state(module, nnx.RngState))
    return Skeleton(
        graphdef=nnx.graphdef(module),
        params=tuple(params),
        other_state=tuple(other_state),
        streams={path: (type(var), var.shape) for path, var in streams},
    )


def _split(module: nnx.Module) -> tuple[Flat, Flat]:
    """Splits off parameters, and other state without the random state, by path."""
    # Sown values belong to one call, not to the state.
    nnx.pop(module, nnx.Intermediate)
    _mark_arrays(module)
    _, params, _, other_state = nnx.split(module, nnx.Param, nnx.RngState, ...)
    return values_of(params), values_of(other_state)


def _mark_arrays(module: nnx.Module) -> None:
    """Marks bare array attributes as data."""
    # While tracing, Flax takes a bare array attribute for a static one.
    for _, node in list(nnx.iter_graph(module)):
        if isinstance(node, nnx.Pytree):
            for name, value in list(vars(node).items()):
                if isinstance(value, jax.Array):
                    setattr(node, name, nnx.data(value))


def values_of(state: Any) -> Flat:
    """Returns the arrays of an NNX state, by path."""
    return {
        path: x.get_value() if isinstance(x, nnx.Variable) else x
        for path, x in nnx.to_flat_state(state)
    }


def logical_of(module: nnx.Module) -> Flat:
    """Returns the dim names of a module's parameters, by path."""

    def names(var: nnx.Variable[Any]) -> Any:
        metadata = var.get_metadata()
        logical = metadata.get("logical") or metadata.get("out_sharding")
        names = names_of_sharding(logical) or None
        return jax.tree.map(lambda _: names, var.get_value())

    params = nnx.to_flat_state(nnx.state(module, nnx.Param))
    return {path: names(var) for path, var in params}


def _resume(
    skeleton: Skeleton,
    params: Params,
    model_state: ModelState,
    key: jax.Array | None,
) -> Any:
    """Rebuilds a module from arrays, in training mode or, without key, evaluation."""
    # Evaluation draws equal numbers each time.
    base = jax.random.key(0) if key is None else key
    flat = {p: _as_variable(at_path(params, p), nnx.Param) for p in skeleton.params}
    flat |= {
        p: _as_variable(at_path(model_state, p), nnx.Variable)
        for p in skeleton.other_state
    }
    for path, (kind, shape) in skeleton.streams.items():
        flat[path] = _seed(base, path, kind, shape)
    module = nnx.merge(skeleton.graphdef, nnx.from_flat_state(list(flat.items())))
    if key is None:
        module.eval()
    else:
        module.train()
    return module


def _as_variable(value: Any, kind: type) -> Any:
    """Wraps a tree of arrays in a variable; bare, it would count as several."""
    return value if hasattr(value, "shape") else kind(value)


def _seed(
    base: jax.Array, path: tuple[Any, ...], kind: type, shape: tuple[int, ...]
) -> jax.Array:
    """Returns a random stream's key or count, restarted from `base`."""
    if not issubclass(kind, nnx.RngKey):
        return jnp.zeros(shape, jnp.uint32)
    # By path: streams of a module differ, and a new stream leaves others alone.
    key = fold_name(base, "/".join(map(str, path)))
    return jax.random.split(key, shape) if shape else key


def _model_state(module: Any) -> ModelState:
    """Returns the state of a module besides parameters and random state."""
    _, other_state = _split(module)
    return nest(other_state)


def nest(flat: Flat) -> dict[str, Any]:
    """Nests values by path in dicts."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        node = tree
        for name in path[:-1]:
            node = node.setdefault(str(name), {})
        node[str(path[-1])] = value
    return tree


def nest_named(named: Mapping[str, Any]) -> dict[str, Any]:
    """Nests values by names whose parts are separated by slashes.

    Example:
        >>> nest_named({"mlp/up": 1, "mlp/down": 2})
        {'mlp': {'up': 1, 'down': 2}}
    """
    return nest({tuple(name.split("/")): value for name, value in named.items()})


def at_path(tree: Any, path: tuple[Any, ...]) -> Any:
    """Returns the value at a path of nested dicts."""
    for name in path:
        tree = tree[str(name)]
    return tree


def _is_abstract(x: Any) -> bool:
    """Whether a leaf has a shape and no values."""
    return isinstance(x, jax.ShapeDtypeStruct)


def accept_states(tx: Any, model: Any, params: Params) -> Any:
    """Makes an optimizer for `nnx.State` work on dicts; returns any other unchanged."""
    if _accepts(tx, params):
        return tx
    with names_only():
        module = module_of(model)
    # The user's optimizer may be made from variables with either metadata.
    for is_eager in (True, False):
        abstract_params = _abstract_state(module, is_eager=is_eager)
        if _accepts(tx, abstract_params):
            return _on_states(optax.with_extra_args_support(tx), abstract_params)
    return tx


def _accepts(tx: Any, params: Any) -> bool:
    """Whether an optimizer can be initialised with parameters of this form."""
    try:
        jax.eval_shape(tx.init, params)
    except Exception:  # any error means that the form does not fit
        return False
    return True


def _abstract_state(module: nnx.Module, *, is_eager: bool) -> Any:
    """Returns abstract parameters as variables, with or without eager sharding."""

    def with_sharding_mode(variable: nnx.Variable[Any]) -> nnx.Variable[Any]:
        metadata = variable.get_metadata() | {"eager_sharding": is_eager}
        return type(variable).from_metadata(variable.get_value(), metadata)

    flat = nnx.to_flat_state(nnx.state(module, nnx.Param))
    return nnx.from_flat_state(
        [(path, with_sharding_mode(variable)) for path, variable in flat]
    )


def _on_states(tx: Any, abstract_params: Any) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer of states, so that arguments and state are dicts."""
    abstract = jax.eval_shape(tx.init, abstract_params)

    def init(params: Params) -> Any:
        return _dicts(tx.init(_states(params, abstract_params)))

    def update(
        updates: Params, state: Any, params: Params | None = None, **extra: Any
    ) -> tuple[Params, Any]:
        converted = dict(extra)
        # Line searches of Optax get parameters in extra arguments, too.
        if "grad" in extra:
            converted["grad"] = _states(extra["grad"], abstract_params)
        if "value_fn" in extra:
            converted["value_fn"] = lambda params: extra["value_fn"](_dicts(params))
        updates, state = tx.update(
            _states(updates, abstract_params),
            _states(state, abstract),
            None if params is None else _states(params, abstract_params),
            **converted,
        )
        return _dicts(updates), _dicts(state)

    return optax.GradientTransformationExtraArgs(init, update)


def _is_state(x: Any) -> bool:
    """Whether a node is an NNX state."""
    return isinstance(x, nnx.State)


def _over_states(one: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Maps over trees with NNX states as leaves."""
    return jax.tree.map(one, tree, *rest, is_leaf=_is_state)


def _dicts(tree: Any) -> Any:
    """Converts NNX states in a tree to nested dicts."""

    def one(x: Any) -> Any:
        return nest(values_of(x)) if _is_state(x) else x

    return _over_states(one, tree)


def _states(tree: Any, forms: Any) -> Any:
    """Converts nested dicts in a tree to NNX states of the given forms."""

    def one(abstract_params: Any, x: Any) -> Any:
        if not _is_state(abstract_params):
            return x
        flat = [
            (path, each.replace(at_path(x, path)))
            if isinstance(each, nnx.Variable)
            else (path, each)
            for path, each in nnx.to_flat_state(abstract_params)
        ]
        return nnx.from_flat_state(flat)

    return _over_states(one, forms, tree)
