"""What the state of an optimizer looks like, and whether a step can drive it."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zjax.errors import PlanError, Problem
from zjax.sharding.placement import path_of


def abstract_opt_state(tx: Any, params: Any) -> Any:
    """The optimizer's state without data; refuses what one update cannot drive.

    Args:
        tx: Optax gradient transformation.
        params: Abstract parameters.

    Returns:
        A tree of ShapeDtypeStruct.

    Raises:
        PlanError: The optimizer fails when it is given the gradient, the loss and the
            loss function of one step, or its state changes shape.
    """

    def update(grads: Any, state: Any, params: Any) -> Any:
        return optax.with_extra_args_support(tx).update(
            grads,
            state,
            params,
            value=jnp.zeros(()),
            grad=grads,
            value_fn=lambda p: sum(jnp.sum(x) for x in jax.tree.leaves(p)) * 1.0,
        )

    try:
        state = jax.eval_shape(tx.init, params)
        updates, after = jax.eval_shape(update, params, state, params)
    except Exception as error:
        raise PlanError(
            Problem(
                "optimizer",
                optimizer_name(tx),
                f"cannot update from one mean gradient ({_first_line(error)})",
                "use a transformation that needs only gradient, params, value, grad "
                "and value_fn",
            )
        ) from error
    changed = _difference(state, after) or _difference(params, updates)
    if changed:
        raise PlanError(
            Problem(
                "optimizer",
                optimizer_name(tx),
                f"changes {changed} in an update",
                "use a transformation that keeps shapes and dtypes",
            )
        )
    return state


def optimizer_name(tx: Any) -> str:
    """The name of an optax transformation, as its author wrote it.

    Args:
        tx: Optax gradient transformation.

    Returns:
        The function that made it, with the members of a chain in parentheses.

    Example:
        >>> optimizer_name(optax.chain(optax.clip(1.0), optax.trace(0.9)))
        'chain(clip, trace)'
    """
    update = getattr(tx, "update", None)
    if inspect.ismethod(update):
        return type(tx).__name__
    return _function_name(update) if inspect.isfunction(update) else repr(tx)


def _function_name(update: Any) -> str:
    name = update.__qualname__.split(".")[0]
    inner = []
    for cell in inspect.unwrap(update).__closure__ or ():
        members = cell.cell_contents
        if isinstance(members, optax.GradientTransformation):
            members = (members.update,)
        if isinstance(members, tuple):
            inner += [_function_name(m) for m in members if inspect.isfunction(m)]
    if name in ("with_extra_args_support", "per_layer"):
        return inner[0]
    return f"{name}({', '.join(inner)})" if inner else name


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _difference(before: Any, after: Any) -> str:
    if jax.tree.structure(before) != jax.tree.structure(after):
        return "the structure of its state"
    pairs = zip(
        jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True
    )
    for (keys, x), y in pairs:
        if (x.shape, x.dtype) != (y.shape, y.dtype):
            return f"{path_of(keys)} from {x.dtype}{x.shape} to {y.dtype}{y.shape}"
    return ""
