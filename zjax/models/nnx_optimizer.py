"""Optimizers whose masks or labels are made from `nnx.state(module, nnx.Param)`.

Such masks are trees of variables, while zjax's parameters are nested dicts of arrays;
parameters are converted where the optimizer runs.
"""

from collections.abc import Callable
from typing import Any

import jax
import optax
from flax import nnx

from zjax.models.metadata import names_only
from zjax.models.nnx import at_path, module_of, nest, values_of
from zjax.typing import Params


def accept_states(tx: Any, model: Any, params: Params) -> Any:
    """Makes an optimizer for `nnx.State` trees work on nested dicts.

    Returns:
        `tx` itself if it accepts dicts, or neither form; else a transformation of dicts
        whose state holds dicts.
    """
    if _accepts(tx, params):
        return tx
    with names_only():
        module = module_of(model)
    for is_eager in (True, False):
        abstract_params = _abstract_state(module, is_eager=is_eager)
        if _accepts(tx, abstract_params):
            return _on_states(optax.with_extra_args_support(tx), abstract_params)
    return tx


def _accepts(tx: Any, params: Any) -> bool:
    try:
        jax.eval_shape(tx.init, params)
    except Exception:
        return False
    return True


def _abstract_state(module: nnx.Module, *, is_eager: bool) -> Any:
    """Abstract parameters as variables, made with or without eager sharding."""

    def with_sharding_mode(variable: nnx.Variable[Any]) -> nnx.Variable[Any]:
        metadata = variable.get_metadata() | {"eager_sharding": is_eager}
        return type(variable).from_metadata(variable.get_value(), metadata)

    flat = nnx.to_flat_state(nnx.state(module, nnx.Param))
    return nnx.from_flat_state(
        [(path, with_sharding_mode(variable)) for path, variable in flat]
    )


def _on_states(tx: Any, abstract_params: Any) -> optax.GradientTransformationExtraArgs:
    abstract = jax.eval_shape(tx.init, abstract_params)

    def init(params: Params) -> Any:
        return _dicts(tx.init(_states(params, abstract_params)))

    def update(
        updates: Params, state: Any, params: Params | None = None, **extra: Any
    ) -> tuple[Params, Any]:
        converted = dict(extra)
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
    return isinstance(x, nnx.State)


def _over_states(one: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    return jax.tree.map(one, tree, *rest, is_leaf=_is_state)


def _dicts(tree: Any) -> Any:
    def one(x: Any) -> Any:
        return nest(values_of(x)) if _is_state(x) else x

    return _over_states(one, tree)


def _states(tree: Any, forms: Any) -> Any:
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
