"""Shapes of the optimizer state, and a check that one gradient per step is enough."""

import inspect
import textwrap
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zjax.errors import PlanError, Problem
from zjax.sharding.paths import path_of


def abstract_opt_state(tx: Any, params: Any) -> Any:
    """The abstract state of an optimizer, after a check of one abstract update.

    Args:
        tx: Optax gradient transformation.
        params: Abstract parameters.

    Returns:
        A tree of ShapeDtypeStruct.

    Raises:
        PlanError: The optimizer rejects the parameters, needs more for an update than
            gradient, loss and loss function, or changes a shape or dtype of its state.
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

    name = optimizer_name(tx)
    try:
        state = jax.eval_shape(tx.init, params)
    except Exception as error:
        problem, remedy = "fails on the parameters", "correct what it raises"
        raise PlanError(_failure(name, problem, error, remedy)) from error
    try:
        updates, after = jax.eval_shape(update, params, state, params)
    except Exception as error:
        problem = "fails in an update from one mean gradient"
        remedy = "use a transformation that needs only gradient, params, value, grad "
        remedy += "and value_fn"
        raise PlanError(_failure(name, problem, error, remedy)) from error
    # Optax casts updates to the dtype of the parameters.
    changed = _difference(state, after) or _difference(params, updates, dtypes=False)
    if changed:
        remedy = "use a transformation that keeps shapes and dtypes"
        if "to float64" in changed:
            remedy += ", and give it Python numbers, not arrays or NumPy's float64"
        raise PlanError(
            Problem("optimizer", name, f"changes {changed} in an update", remedy)
        )
    return state


def optimizer_name(tx: Any) -> str:
    """Name of the function that made a transformation, with the members of a chain.

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
    if name in ("with_extra_args_support", "per_layer", "_on_states"):
        return inner[0]
    return f"{name}({', '.join(inner)})" if inner else name


def _failure(name: str, problem: str, error: Exception, remedy: str) -> Problem:
    text = str(error)
    if "pytree" in text or "tree structure" in text:
        remedy = "zjax holds parameters as nested dicts of arrays: give masks and "
        remedy += "labels that form, as nnx.to_pure_dict(mask) has"
    cause = textwrap.shorten(f"{type(error).__name__}: {text}", 400)
    return Problem("optimizer", name, f"{problem} ({cause})", remedy)


def _difference(before: Any, after: Any, *, dtypes: bool = True) -> str:
    if jax.tree.structure(before) != jax.tree.structure(after):
        return "the structure of its state"
    pairs = zip(
        jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True
    )
    for (keys, x), y in pairs:
        if x.shape != y.shape or (dtypes and x.dtype != y.dtype):
            return f"{path_of(keys)} from {x.dtype}{x.shape} to {y.dtype}{y.shape}"
    return ""
