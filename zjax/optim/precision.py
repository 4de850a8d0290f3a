"""The dtypes of a run: casts, split master weights and dynamic loss scaling."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from zjax.settings import schema


@dataclasses.dataclass(frozen=True)
class Dtypes:
    """The dtypes of a run."""

    master: np.dtype
    compute: np.dtype
    grad_sum: np.dtype
    reduce: np.dtype


def make_dtypes(precision: schema.Precision) -> Dtypes:
    """Returns the dtypes that `config.precision` names."""
    reduce = precision.reduce_dtype
    return Dtypes(
        master=jnp.dtype(precision.master_dtype),
        compute=jnp.dtype(precision.compute_dtype),
        grad_sum=jnp.dtype(precision.grad_sum_dtype),
        reduce=jnp.dtype(precision.compute_dtype if reduce == "compute" else reduce),
    )


def cast_floating(tree: Any, dtype: Any) -> Any:
    """Casts floating arrays; integers, booleans, complex numbers and keys stay."""

    def cast(leaf: Any) -> Any:
        floating = jnp.issubdtype(leaf.dtype, jnp.floating)
        return leaf.astype(dtype) if floating else leaf

    return jax.tree.map(cast, tree)


def describe_precision(precision: schema.Precision, rule: schema.Rule) -> str:
    """Describes all dtypes of a run, in the line that is printed at the start."""
    dtypes = make_dtypes(precision)
    return " | ".join(
        (
            _describe_state(precision.master_dtype, rule),
            f"compute {dtypes.compute}{_describe_matmul(precision)}",
            f"gradients over devices {dtypes.reduce}, over microbatches "
            f"{dtypes.grad_sum}",
            f"loss scale {_describe_scale(precision)}",
            f"non-finite gradient: {precision.on_nonfinite}",
        )
    )


def moment_dtype(rule: schema.Rule) -> str:
    """Dtype of stored moments; empty if the rule stores factors of moments."""
    if isinstance(rule, schema.StoredMomentum):
        return rule.moment_dtype
    return "" if isinstance(rule, schema.Adafactor) else "float32"


def _describe_state(master: str, rule: schema.Rule) -> str:
    """Describes the dtypes of master weights and moments."""
    moments = moment_dtype(rule) or master
    if moments == master:
        return f"master weights and moments {master}"
    return f"master weights {master}, moments {moments}"


def _describe_matmul(precision: schema.Precision) -> str:
    return "" if precision.matmul_dtype == "compute" else ", projections in float8"


def _describe_scale(precision: schema.Precision) -> str:
    """Describes the loss scale."""
    settings = precision.loss_scale
    if precision.compute_dtype != "float16":
        return "none"
    if settings.window == 0:
        return f"{settings.initial:g}, fixed"
    return f"{settings.initial:g}, doubled after {settings.window} clean steps"


class LossScaler(NamedTuple):
    """State of the loss scale: four scalars."""

    scale: jax.Array
    iteration: jax.Array
    """int32[]: number of updates, with or without overflow."""
    last_overflow: jax.Array
    """int32[]: iteration of the last overflow; -1 before the first."""
    hysteresis: jax.Array
    """int32[]: at 1, the next overflow halves the scale; above, it only counts down."""


def init_scaler(settings: schema.LossScale) -> LossScaler:
    """Returns the loss scale of step 0."""
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

    Divide gradients by the scale from before this update, which their backward pass
    used. A window of 0 fixes the scale.
    """
    if settings.window == 0:
        return scaler._replace(
            iteration=scaler.iteration + 1,
            last_overflow=jnp.where(overflow, scaler.iteration, scaler.last_overflow),
        )
    full = jnp.int32(settings.hysteresis)
    patient = scaler.hysteresis > 1
    smaller = jnp.maximum(scaler.scale / 2, settings.minimum)
    # Steps since the last overflow: 0 right after one, which any window divides.
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
    """Whether an overflow now would need a scale below the minimum: bool[].

    Never True for a fixed scale.
    """
    lowest = scaler.scale <= settings.minimum
    return lowest & (scaler.hysteresis <= 1) & (settings.window > 0)
