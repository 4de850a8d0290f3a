"""Activations of rows, and how many columns each of them takes."""

from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import Array

Activation = Literal["swiglu", "clamped_swiglu", "gelu", "relu"]
ACTIVATIONS = get_args(Activation)
SLOPE, LIMIT = 1.702, 7.0
"""Slope of the sigmoid of `clamped_swiglu`, and bound of its gates and values."""


def num_parts(activation: str) -> int:
    """Columns that one column of the result follows from: 2 with gates."""
    return 2 if activation.endswith("swiglu") else 1


def activate(activation: str, inputs: Array) -> Array:
    """Applies an activation to [M, N] in float32 or wider: [M, N / num_parts]."""
    wide = inputs.astype(jnp.promote_types(inputs.dtype, jnp.float32))
    if activation == "swiglu":
        gate, value = jnp.split(wide, 2, axis=1)
        return jax.nn.silu(gate) * value
    if activation == "clamped_swiglu":
        return clamped_swiglu(*jnp.split(wide, 2, axis=1))
    return {"gelu": jax.nn.gelu, "relu": jax.nn.relu}[activation](wide)


def clamped_swiglu(gate: Array, value: Array) -> Array:
    """`min(gate, 7) * sigmoid(1.702 * min(gate, 7)) * (clip(value, -7, 7) + 1)`.

    Reference:
        gpt-oss (arXiv:2508.10925), section 2.
    """
    gate, value = jnp.minimum(gate, LIMIT), jnp.clip(value, -LIMIT, LIMIT)
    return gate * jax.nn.sigmoid(SLOPE * gate) * (value + 1.0)
