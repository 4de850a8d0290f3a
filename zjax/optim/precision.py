"""The dtypes of a run, and casting to them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zjax.config import schema


@dataclasses.dataclass(frozen=True)
class Dtypes:
    """The dtypes of a run.

    Args:
        master: Parameters as the optimizer sees them.
        compute: Parameters and activations of the forward and backward pass.
        grad_sum: Gradients as they are added over microbatches.
        reduce: Gradients as they are added over devices.
    """

    master: np.dtype
    compute: np.dtype
    grad_sum: np.dtype
    reduce: np.dtype


def make_dtypes(precision: schema.Precision) -> Dtypes:
    """The dtypes that `config.precision` names.

    Example:
        >>> make_dtypes(schema.Precision(compute_dtype="float16")).reduce
        dtype('float16')
    """
    reduce = precision.reduce_dtype
    return Dtypes(
        master=jnp.dtype(precision.master_dtype),
        compute=jnp.dtype(precision.compute_dtype),
        grad_sum=jnp.dtype(precision.grad_sum_dtype),
        reduce=jnp.dtype(precision.compute_dtype if reduce == "compute" else reduce),
    )


def cast_floating(tree: Any, dtype: Any) -> Any:
    """Casts floating arrays; integers, booleans, complex numbers and keys stay.

    Example:
        >>> tree = {"x": jnp.ones(2), "n": jnp.arange(2)}
        >>> jax.tree.map(lambda x: x.dtype.name, cast_floating(tree, "bfloat16"))
        {'n': 'int32', 'x': 'bfloat16'}
    """

    def cast(leaf: Any) -> Any:
        floating = jnp.issubdtype(leaf.dtype, jnp.floating)
        return leaf.astype(dtype) if floating else leaf

    return jax.tree.map(cast, tree)


def describe_precision(config: schema.Config) -> str:
    """Describes all dtypes of a run in the line that is printed at its start.

    Example:
        >>> describe_precision(schema.Config()).split(" | ")[0]
        'master weights and moments float32'
    """
    precision = config.precision
    dtypes = make_dtypes(precision)
    return " | ".join(
        (
            _describe_state(config),
            f"compute {dtypes.compute}{_describe_matmul(precision)}",
            f"gradients over devices {dtypes.reduce}, over microbatches "
            f"{dtypes.grad_sum}",
            f"loss scale {_describe_scale(precision)}",
            f"non-finite gradient: {precision.on_nonfinite}",
        )
    )


def _describe_state(config: schema.Config) -> str:
    master, settings = config.precision.master_dtype, config.optimizer
    moments = master if settings.name == "adafactor" else settings.moment_dtype
    if moments == master:
        return f"master weights and moments {master}"
    return f"master weights {master}, moments {moments}"


def _describe_matmul(precision: schema.Precision) -> str:
    return "" if precision.matmul_dtype == "compute" else ", projections in float8"


def _describe_scale(precision: schema.Precision) -> str:
    settings = precision.loss_scale
    if precision.compute_dtype != "float16":
        return "none"
    if settings.window == 0:
        return f"{settings.initial:g}, fixed"
    return f"{settings.initial:g}, doubled after {settings.window} clean steps"
