"""Recovers the scales and codes of weights that lie on a grid."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from zjax.errors import CheckpointError, Problem

_SLACK = 4
"""Roundings of a weight and of a quotient that count as exact."""


def shared_scales(name: str, scales: np.ndarray) -> np.ndarray:
    """Takes the one scale of each group of float32[..., group]."""
    found = scales[..., 0]
    if (scales != found[..., np.newaxis]).any():
        size = scales.shape[-1]
        problem = f"has several scales in a group of {size} inputs"
        remedy = f"quantise it with a scale for each {size} inputs of an output"
        raise CheckpointError(Problem("tensor", name, problem, remedy))
    if not (np.isfinite(found) & (found > 0)).all():
        remedy = "quantise it again"
        raise CheckpointError(
            Problem("tensor", name, "has a scale that is not positive", remedy)
        )
    return found


def codes_on_grid(
    name: str,
    groups: np.ndarray,
    scales: np.ndarray,
    rounding: Callable[[np.ndarray], np.ndarray],
    dtype: str = "float32",
) -> np.ndarray:
    """Recovers the codes of weights that are products of codes and scales."""
    quotients = groups / scales[..., np.newaxis]
    codes = rounding(quotients)
    # Weights are products that were rounded to `dtype`.
    slack = _SLACK * float(jnp.finfo(jnp.dtype(dtype)).eps)
    if (np.abs(quotients - codes) > slack * np.maximum(np.abs(codes), 1)).any():
        problem = "has weights that are no code times their scale"
        remedy = "give the scales with which it was quantised, or none"
        raise CheckpointError(Problem("tensor", name, problem, remedy))
    return codes
