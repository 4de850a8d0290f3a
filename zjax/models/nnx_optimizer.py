"""Optimizers whose masks or labels have the form that NNX gives to parameters.

`nnx.state(module, nnx.Param)` is a tree of variables. Parameters are nested dicts of
arrays here, so that a mask made from it fits them only where it is used.
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
    """Gives an optimizer the form of parameters that it was written for.

    Args:
        tx: Optax gradient transformation.
        model: A module, or a function that makes it.
        params: Abstract parameters as nested dicts.

    Returns:
        `tx` itself where it starts from dicts, or from neither form; else a
        transformation of dicts whose state holds dicts.
    """
    if _starts(tx, params):
        return tx
    with names_only():
        module = module_of(model)
    for is_eager in (True, False):
        form = _form(module, is_eager=is_eager)
        if _starts(tx, form):
            return _on_states(optax.with_extra_args_support(tx), form)
    return tx


def _starts(tx: Any, params: Any) -> bool:
    try:
        jax.eval_shape(tx.init, params)
    except Exception:
        return False
    return True


def _form(module: nnx.Module, *, is_eager: bool) -> Any:
    """Abstract parameters as variables, which say how they were made."""

    def made(variable: nnx.Variable[Any]) -> nnx.Variable[Any]:
        metadata = variable.get_metadata() | {"eager_sharding": is_eager}
        return type(variable).from_metadata(variable.get_value(), metadata)

    flat = nnx.to_flat_state(nnx.state(module, nnx.Param))
    return nnx.from_flat_state([(path, made(variable)) for path, variable in flat])


def _on_states(tx: Any, form: Any) -> optax.GradientTransformationExtraArgs:
    abstract = jax.eval_shape(tx.init, form)

    def init(params: Params) -> Any:
        return _dicts(tx.init(_states(params, form)))

    def update(
        updates: Params, state: Any, params: Params | None = None, **extra: Any
    ) -> tuple[Params, Any]:
        given = dict(extra)
        if "grad" in extra:
            given["grad"] = _states(extra["grad"], form)
        if "value_fn" in extra:
            given["value_fn"] = lambda params: extra["value_fn"](_dicts(params))
        updates, state = tx.update(
            _states(updates, form),
            _states(state, abstract),
            None if params is None else _states(params, form),
            **given,
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
    def one(form: Any, x: Any) -> Any:
        if not _is_state(form):
            return x
        flat = [
            (path, each.replace(at_path(x, path)))
            if isinstance(each, nnx.Variable)
            else (path, each)
            for path, each in nnx.to_flat_state(form)
        ]
        return nnx.from_flat_state(flat)

    return _over_states(one, forms, tree)
