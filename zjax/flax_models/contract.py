"""Contract of user losses and models: checks of results, with explanations."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from zjax.errors import ModelError, Problem
from zjax.ops.keys import key_from_data
from zjax.sharding.paths import path_of
from zjax.typing import Batch, Metrics, ModelState, Params


def call_loss(
    loss_fn: Callable[..., Any], view: Any, batch: Batch, key: jax.Array | None
) -> tuple[jax.Array, jax.Array, Metrics]:
    """Calls a user's loss, and normalises the result to (loss, weight, metrics).

    All are float32[]; the weight has no gradient. The loss may return a mean loss
    alone.
    """
    out = loss_fn(view, batch, key)
    value, weight, metrics = out if _is_triple(out) else (out, 1.0, {})
    problems = [] if _is_triple(out) or _is_array(out) else [_not_a_loss(out)]
    if not problems:
        scalars = {f"metrics/{name}": x for name, x in metrics.items()}
        problems = [
            Problem(name, _describe(x), "is not a scalar", _scalar_remedy(name))
            for name, x in {"loss": value, "weight": weight, **scalars}.items()
            if not _is_array(x) or jnp.shape(x) != ()
        ]
    if not problems and not jnp.issubdtype(jnp.result_type(value), jnp.floating):
        text, remedy = "is not floating-point", "return a loss with a gradient"
        problems = [Problem("loss", _describe(value), text, remedy)]
    if problems:
        raise ModelError(*problems)
    metrics = {name: jnp.asarray(x, jnp.float32) for name, x in metrics.items()}
    # Weights average microbatches; a gradient through them would bias the loss.
    weight = jax.lax.stop_gradient(jnp.asarray(weight, jnp.float32))
    return jnp.asarray(value, jnp.float32), weight, metrics


def evaluate_loss(
    loss_fn: Callable[..., Any], make_view: Callable[[], Any], batch: Batch
) -> tuple[jax.Array, jax.Array, Metrics]:
    """Calls a user's loss in evaluation, with a key of None.

    A loss that needs a key, such as a diffusion loss, is called again with a key
    derived from the batch: equal batches get equal noise.
    """
    try:
        return call_loss(loss_fn, make_view(), batch, None)
    except TypeError as error:
        # Only errors from a key of None are retried.
        if "NoneType" not in str(error):
            raise
        try:
            results = call_loss(loss_fn, make_view(), batch, key_from_data(batch))
        except Exception:
            raise error from None  # the first error is the user's own
    logging.warning(
        "loss_fn draws from its key in evaluation too: the same for the same batch"
    )
    return results


def _scalar_remedy(name: str) -> str:
    """Returns the remedy for a result that is not a scalar."""
    return "return its sum" if name == "weight" else "return its mean"


def _is_triple(out: Any) -> bool:
    """Whether a loss returned (loss, weight, metrics)."""
    return isinstance(out, tuple) and len(out) == 3 and isinstance(out[2], dict)


def _is_array(x: Any) -> bool:
    """Whether a value is an array or a number."""
    return isinstance(x, jax.Array | np.ndarray | np.generic | float | int)


def _not_a_loss(out: Any) -> Problem:
    """Describes a result that is no loss."""
    text = "is neither a loss nor (loss, weight, metrics)"
    return Problem("loss_fn(...)", _describe(out), text, "return one of the two")


def _describe(x: Any) -> str:
    """Returns text such as `float32[2,3]` or `(float32[], dict)`."""
    if _is_array(x) or isinstance(x, jax.ShapeDtypeStruct):
        dims = ",".join(map(str, jnp.shape(x)))
        return f"{jnp.result_type(x)}[{dims}]"
    if isinstance(x, tuple):
        return f"({', '.join(map(_describe, x))})"
    return type(x).__name__


def check_params(model: Any, params: Params) -> None:
    """Refuses parameters that cannot be trained; `model` is named in the message."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    problems = [
        Problem(
            path_of(keys),
            _describe(x),
            "is not floating-point",
            "keep it in another collection than the parameters",
        )
        for keys, x in leaves
        if not _is_array(x) or not jnp.issubdtype(jnp.result_type(x), jnp.floating)
    ]
    if not leaves:
        text, remedy = "has no parameters", "give it layers, and use them in loss_fn"
        problems = [Problem("model", type(model).__name__, text, remedy)]
    if problems:
        raise ModelError(*problems)


def check_model_state(before: ModelState, after: ModelState) -> None:
    """Refuses a step that changes paths, shapes or dtypes of the model state."""
    old, new = _described(before), _described(after)
    problems = [
        Problem(
            f"model_state/{path}",
            new.get(path, old.get(path)),
            _change(old.get(path), new.get(path)),
            "keep the shapes of the model state, and sow what is for one step only",
        )
        for path in dict.fromkeys((*old, *new))  # in order, each path once
        if old.get(path) != new.get(path)
    ]
    if problems:
        raise ModelError(*problems)


def _described(tree: Any) -> dict[str, str]:
    """Describes the arrays of a tree by path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {path_of(keys): _describe(x) for keys, x in leaves}


def _change(old: str | None, new: str | None) -> str:
    """Describes what happened to an array of the model state."""
    if old is None:
        return "appeared in loss_fn"
    return "vanished in loss_fn" if new is None else f"was {old} before loss_fn"


def without_weak_types(tree: Any) -> Any:
    """Converts leaves to arrays without weak types, which would change in a scan.

    Example:
        >>> jnp.asarray(1.0).weak_type, without_weak_types(1.0).weak_type
        (True, False)
    """

    def one(x: Any) -> jax.Array:
        x = jnp.asarray(x)
        return jax.lax.convert_element_type(x, x.dtype) if x.weak_type else x

    return jax.tree.map(one, tree)
