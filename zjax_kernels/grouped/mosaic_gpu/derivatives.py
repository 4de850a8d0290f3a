"""Activations and their derivatives, in operations that a GPU has instructions for.

A sigmoid stands in for `tanh`, and `rsqrt` for a division.
"""

import math
from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array, lax

from zjax_kernels.grouped.activations import LIMIT, SLOPE

_SLOPE, _CUBE = 2 * math.sqrt(2 / math.pi), 0.044715
"""`gelu(x)` is `x * sigmoid(_SLOPE * (x + _CUBE * x**3))`."""


def activate(activation: str, parts: Sequence[Array]) -> Array:
    """Applies an activation to float32 arrays: x, or the gates and values of SwiGLU."""
    x = parts[0]
    if activation == "relu":
        return jnp.maximum(x, 0.0)
    if activation == "gelu":
        return x * _gelu_share(x)
    if activation == "clamped_swiglu":
        x, factor = _at_most(x, LIMIT), 1.0 + _clipped(parts[1])
        return x * _sigmoid(SLOPE * x) * factor
    return x * _sigmoid(x) * parts[1]


def differentiate(
    activation: str, parts: Sequence[Array], cotangent: Array
) -> tuple[Array, tuple[Array, ...]]:
    """Returns the activation, and the cotangents of its parts."""
    x = parts[0]
    if activation == "relu":
        return jnp.maximum(x, 0.0), (jnp.where(x > 0.0, cotangent, 0.0),)
    if activation == "gelu":
        share = _gelu_share(x)
        inner = _SLOPE * (1.0 + 3.0 * _CUBE * x * x)
        slope = share * (1.0 + x * (1.0 - share) * inner)
        return x * share, (cotangent * slope,)
    if activation == "clamped_swiglu":
        return _differentiate_clamped(x, parts[1], cotangent)
    share = _sigmoid(x)
    silu, slope = x * share, share * (1.0 + x * (1.0 - share))
    return silu * parts[1], (cotangent * parts[1] * slope, cotangent * silu)


def _differentiate_clamped(
    gate: Array, value: Array, cotangent: Array
) -> tuple[Array, tuple[Array, ...]]:
    x, factor = _at_most(gate, LIMIT), 1.0 + _clipped(value)
    share = _sigmoid(SLOPE * x)
    silu, slope = x * share, share * (1.0 + SLOPE * x * (1.0 - share))
    of_gate = jnp.where(gate < LIMIT, cotangent * factor * slope, 0.0)
    of_value = jnp.where(value < LIMIT, cotangent * silu, 0.0)
    of_value = jnp.where(value > -LIMIT, of_value, 0.0)
    return silu * factor, (of_gate, of_value)


def _clipped(value: Array) -> Array:
    return jnp.maximum(_at_most(value, LIMIT), -LIMIT)


def _at_most(x: Array, bound: float) -> Array:
    return jnp.where(x < bound, x, bound)


def _gelu_share(x: Array) -> Array:
    return _sigmoid(_SLOPE * (x + _CUBE * x * x * x))


def _sigmoid(x: Array) -> Array:
    root = lax.rsqrt(1.0 + jnp.exp(-x))
    return root * root
