"""Finds the arrays of a failed step that are not finite: batch, weights, gradients."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zjax.errors import NonFiniteError, Problem
from zjax.jaxprs.versions import dtype_promotion
from zjax.run.step import Step
from zjax.sharding.naming import path_of
from zjax.train.state import TrainState
from zjax.typing import Batch

_MAX_NAMED = 3
_REMEDIES = {
    "batch": "check the data of that step, unless they are intended",
    "weights": "start again from an earlier checkpoint",
    "gradients": "look for overflow or division by 0 in the model and its loss",
}


@contextlib.contextmanager
def report_nonfinite(find: Callable[[], Sequence[Problem]]) -> Iterator[None]:
    """Adds the names of non-finite arrays to a NonFiniteError of the enclosed code."""
    try:
        yield
    except NonFiniteError as error:
        raise NonFiniteError(*error.problems, *find()) from error


def find_nonfinite(
    step: Step, state: TrainState, batch: Batch, number: int
) -> list[Problem]:
    """Lists at most one problem each for batch, weights and gradients not finite.

    Compiles programs that no finite run needs. `state` is the state after the failed
    step or one step later, and is not consumed. Offloaded runs check the batch alone.
    """
    arrays: dict[str, Any] = {"batch": batch}
    with (
        contextlib.suppress(jax.errors.JaxRuntimeError),  # such as out of memory
        jax.set_mesh(step.mesh),
        dtype_promotion(),
    ):
        if "gradients" in step.programs:
            results = step.programs["gradients"](state, batch)
            # Errors of the device must be raised here, where they are suppressed.
            gradients, _ = jax.block_until_ready(results)
            arrays |= {"weights": state.master, "gradients": gradients}
    with jax.set_mesh(step.mesh):
        flags = jax.device_get(jax.jit(_is_finite)(arrays))
    problems = []
    for kind, remedy in _REMEDIES.items():
        leaves = jax.tree_util.tree_leaves_with_path(flags.get(kind))
        names = [path_of(keys) for keys, is_finite in leaves if not is_finite]
        if names:
            shown = ", ".join(names[:_MAX_NAMED])
            others = len(names) - _MAX_NAMED
            shown += f" and {others} more" if others > 0 else ""
            problem = f"of {len(leaves)} arrays are not finite at step {number}"
            problems.append(Problem(kind, shown, problem, remedy))
    return problems


def _is_finite(tree: Any) -> Any:
    """Reduces each array to one bool; integers count as finite."""

    def of(x: jax.Array) -> jax.Array:
        inexact = jnp.issubdtype(x.dtype, jnp.inexact)
        return jnp.isfinite(x).all() if inexact else jnp.bool_(True)

    return jax.tree.map(of, tree)
