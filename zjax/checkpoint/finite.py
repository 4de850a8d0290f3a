"""Refuses to save a state that is not finite: it would replace a finite checkpoint.

Metrics do not tell in time. The loss of a step is computed before the update, replicas
that take local steps have metrics of their own, and finite gradients may overflow in an
optimizer.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from zjax.errors import NonFiniteError, Problem
from zjax.sharding.placement import ArrayPlan
from zjax.storage.move import to_devices

_PARAMETERS = ("master/", "params/", "ema/", "extra/replicas/master/")
_NUM_NAMED = 3


def check_finite(
    leaves: Mapping[str, Any], plans: Mapping[str, ArrayPlan], step: int
) -> None:
    """Refuses parameters that are not finite, and NaN in other arrays.

    An optimizer or a model may keep infinity on purpose, such as a best loss. Frozen
    parameters do not change, and are not read. Offloaded arrays are staged on the
    devices one after another.

    Args:
        leaves: Arrays of a state in their stored shapes, by name.
        plans: Their plans, by name.
        step: Steps taken.

    Raises:
        NonFiniteError: Names the first arrays.

    Example:
        >>> check_finite({}, {}, 10)
    """
    floating = {
        name: plan
        for name, plan in plans.items()
        if jnp.issubdtype(leaves[name].dtype, jnp.floating) and not plan.is_frozen
    }
    resident = {n: leaves[n] for n, plan in floating.items() if plan.is_on_device}
    flags: dict[str, Any] = _are_fine(resident)
    for name, plan in floating.items():
        if name not in resident:
            staged = to_devices(leaves[name], plan, is_consumed=False)
            flags |= jax.block_until_ready(_are_fine({name: staged}))
            staged.delete()
    names = [name for name, is_fine in jax.device_get(flags).items() if not is_fine]
    if names:
        shown = ", ".join(names[:_NUM_NAMED])
        others = len(names) - _NUM_NAMED
        shown += f" and {others} more" if others > 0 else ""
        problem = f"is not finite after step {step}, and is not saved"
        remedy = "go back to the newest checkpoint, and lower "
        remedy += "optimizer.peak_learning_rate or look at the data"
        raise NonFiniteError(Problem("state", shown, problem, remedy))


@jax.jit
def _are_fine(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: _is_fine(name, x) for name, x in arrays.items()}


def _is_fine(name: str, x: jax.Array) -> jax.Array:
    if name.startswith(_PARAMETERS):
        return jnp.isfinite(x).all()
    return ~jnp.isnan(x).any()
