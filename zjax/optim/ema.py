"""The exponential moving average of the parameters."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def update_ema(ema: Any, params: Any, decay: float, step: Int[Array, ""]) -> Any:
    """Moves the average towards the parameters by `1 - decay`, in the dtypes of `ema`.

    The decay is at most `(1 + step) / (10 + step)`, so that the initial parameters do
    not dominate a short run. Store the average in float32: in bfloat16 a step of `1 -
    decay` below 1/256 is lost in rounding.

    Args:
        ema: Average so far, initially the parameters.
        params: Parameters after this step.
        decay: Upper limit of the decay, at least 0 and below 1.
        step: Number of steps applied before this one.

    Example:
        >>> start, target = jnp.zeros(()), jnp.ones(())
        >>> round(float(update_ema(start, target, 0.999, jnp.int32(0))), 6)
        0.9

    Reference:
        Polyak and Juditsky, 1992, doi:10.1137/0330046; the ramp of the decay is that
        of TensorFlow's ExponentialMovingAverage.
    """
    step = step.astype(jnp.float32)
    rate = 1 - jnp.minimum(decay, (1 + step) / (10 + step))

    def moved(
        average: Float[Array, "..."], target: Float[Array, "..."]
    ) -> Float[Array, "..."]:
        wide = average.astype(jnp.float32)
        wide += rate * (target.astype(jnp.float32) - wide)
        return wide.astype(average.dtype)

    return jax.tree.map(moved, ema, params)
