"""Activations of rows, and how many columns each of them takes."""

from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import Array

Activation = Literal["swiglu", "gelu", "relu"]
ACTIVATIONS = get_args(Activation)


def num_parts(activation: str) -> int:
    """Columns that one column of the result follows from: 2 for `swiglu`."""
    return 2 if activation == "swiglu" else 1


def activate(activation: str, inputs: Array) -> Array:
    """Applies an activation to [M, N] in float32 or wider: [M, N / num_parts]."""
    wide = inputs.astype(jnp.promote_types(inputs.dtype, jnp.float32))
    if activation == "swiglu":
        gate, value = jnp.split(wide, 2, axis=1)
        return jax.nn.silu(gate) * value
    return {"gelu": jax.nn.gelu, "relu": jax.nn.relu}[activation](wide)
