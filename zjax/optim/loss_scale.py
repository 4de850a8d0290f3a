"""Dynamic loss scaling: keeps float16 gradients in range by watching for overflow.

Micikevicius et al., arXiv:1710.03740, with the hysteresis of DeepSpeed.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from zjax.config import schema


class LossScaler(NamedTuple):
    """State of the loss scale: four scalars."""

    scale: jax.Array
    """float32[]: factor of the loss."""
    iteration: jax.Array
    """int32[]: number of updates, with or without overflow."""
    last_overflow: jax.Array
    """int32[]: iteration of the last overflow; -1 before the first."""
    hysteresis: jax.Array
    """int32[]: at 1, the next overflow halves the scale; above, it only counts down."""


def init_scaler(settings: schema.LossScale) -> LossScaler:
    """The loss scale of step 0.

    Example:
        >>> float(init_scaler(schema.LossScale(initial=8.0)).scale)
        8.0
    """
    return LossScaler(
        scale=jnp.float32(settings.initial),
        iteration=jnp.int32(0),
        last_overflow=jnp.int32(-1),
        hysteresis=jnp.int32(settings.hysteresis),
    )


def update_scaler(
    scaler: LossScaler, overflow: Bool[Array, ""], settings: schema.LossScale
) -> LossScaler:
    """Halves the scale after overflows, doubles it after clean steps.

    Divide gradients by the scale before this update, which their backward pass used. A
    window of 0 fixes the scale.

    Example:
        >>> settings = schema.LossScale(initial=8.0, hysteresis=1)
        >>> float(update_scaler(init_scaler(settings), jnp.bool_(True), settings).scale)
        4.0
    """
    if settings.window == 0:
        return scaler._replace(
            iteration=scaler.iteration + 1,
            last_overflow=jnp.where(overflow, scaler.iteration, scaler.last_overflow),
        )
    full = jnp.int32(settings.hysteresis)
    patient = scaler.hysteresis > 1
    smaller = jnp.maximum(scaler.scale / 2, settings.minimum)
    num_clean = scaler.iteration - scaler.last_overflow - 1
    grow = (num_clean > 0) & (num_clean % settings.window == 0)
    restore = grow | settings.consecutive_hysteresis
    return LossScaler(
        scale=jnp.where(
            overflow,
            jnp.where(patient, scaler.scale, smaller),
            jnp.where(grow, scaler.scale * 2, scaler.scale),
        ),
        iteration=scaler.iteration + 1,
        last_overflow=jnp.where(overflow, scaler.iteration, scaler.last_overflow),
        hysteresis=jnp.where(
            overflow,
            jnp.where(patient, scaler.hysteresis - 1, scaler.hysteresis),
            jnp.where(restore, full, scaler.hysteresis),
        ),
    )


def at_minimum(scaler: LossScaler, settings: schema.LossScale) -> Bool[Array, ""]:
    """bool[]: whether an overflow now would need a scale below the minimum.

    Never True for a fixed scale.

    Example:
        >>> settings = schema.LossScale(initial=1.0, hysteresis=1)
        >>> bool(at_minimum(init_scaler(settings), settings))
        True
    """
    lowest = scaler.scale <= settings.minimum
    return lowest & (scaler.hysteresis <= 1) & (settings.window > 0)
