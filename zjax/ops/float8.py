"""Products of float8 operands, forward and backward, from the numbers at hand alone.

Operands are scaled, rounded to float8 and multiplied with sums in float32: activations
and weights as e4m3 (three digits after the point), gradients as e5m2 (two digits, more
range). The scale is a power of two near the largest magnitude of the operand, so that
scaling loses no digit, and what a number becomes depends on its neighbours only where
it is 2**-14 times smaller than the largest of them. There is no history of magnitudes,
hence no state.

Each device's share of a batch has a scale of its own: a common one would be a reduction
over devices for every product.

Reference: Micikevicius et al., FP8 formats (arXiv:2209.05433).
"""

import functools

import jax
import jax.numpy as jnp
from absl import logging
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float

from zjax.errors import ConfigError, Problem
from zjax.typing import Device

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
_TOP = {E4M3: 2.0**8, E5M2: 2.0**15}
"""The largest power of two of each dtype; the largest number is 1.75 times that."""
_SMALLEST = 2.0**-100
"""Tensors of smaller numbers are scaled like this one: the inverse must be finite."""


def dot(
    x: Float[Array, "..."],
    kernel: Float[Array, "..."],
    num_contracted: int = 1,
    *,
    num_shares: int = 1,
) -> Float[Array, "..."]:
    """Multiplies the last dims of `x` by the first of `kernel`, like `jnp.tensordot`.

    The backward pass keeps `x` in float8 and makes two products of float8 operands.
    Numbers that are not finite come out as numbers that are not finite.

    Args:
        x: Activations in bfloat16 or float32; the first dim is the batch.
        kernel: Weights in the dtype of `x`.
        num_contracted: Dims to sum over, 1 or more.
        num_shares: Parts in which the devices hold the batch; divides its size. Each
            has its own scale.

    Returns:
        The product in the dtype of `x`.

    Example:
        >>> dot(jnp.full((2, 4), 3.0), jnp.full((4, 2), 0.5)).tolist()
        [[6.0, 6.0], [6.0, 6.0]]

    Reference:
        Micikevicius et al. (arXiv:2209.05433).
    """
    return _dot(num_contracted, num_shares, x, kernel)


def check_device(device: Device) -> None:
    """Refuses a GPU that cannot multiply float8; says once where it is emulated.

    Args:
        device: One of the devices of a run.

    Raises:
        ConfigError: An NVIDIA GPU older than Ada and Hopper.

    Example:
        >>> check_device(jax.devices("cpu")[0])
    """
    if device.platform != "gpu" or "cuda" not in device.client.platform_version:
        _log_emulation(device.platform)
        return
    found = device.compute_capability
    if tuple(map(int, found.split("."))) < (8, 9):
        problem = f"needs compute capability 8.9 and this GPU has {found}"
        remedy = "use 'compute'"
        raise ConfigError(Problem("precision.matmul_dtype", "float8", problem, remedy))


def _dot_forward(num_contracted, num_shares, x, kernel):
    rows, row_scale = _quantize(_split(x, num_shares), E4M3, 1)
    # Else a loop over layers keeps all weights a second time, transposed.
    stored = with_layout_constraint(kernel, Layout(tuple(range(kernel.ndim))))
    weights, weight_scale = _quantize(stored, E4M3, 0)
    inputs = tuple(range(rows.ndim - num_contracted, rows.ndim))
    dims = ((inputs, tuple(range(num_contracted))), ((), ()))
    y = _multiply(rows, weights, dims, row_scale * weight_scale, x.dtype, None)
    shape = x.shape[: x.ndim - num_contracted] + kernel.shape[num_contracted:]
    return y.reshape(shape), (rows, row_scale, kernel)


def _dot_backward(num_contracted, num_shares, residuals, dy):
    rows, row_scale, kernel = residuals
    # The sum in hardware keeps fewer digits than float32 unless asked for more.
    precision = lax.Precision.HIGHEST
    grads, grad_scale = _quantize(_split(dy, num_shares), E5M2, 1)
    # Rounded again: kept from the forward pass, it would be one more copy of all.
    weights, weight_scale = _quantize(kernel, E4M3, 0)
    num_outputs = kernel.ndim - num_contracted
    outputs = tuple(range(grads.ndim - num_outputs, grads.ndim))
    dims = ((outputs, tuple(range(num_contracted, kernel.ndim))), ((), ()))
    dx = _multiply(grads, weights, dims, grad_scale * weight_scale, dy.dtype, precision)
    tokens = tuple(range(1, rows.ndim - num_contracted))
    dims = ((tokens, tokens), ((0,), (0,)))
    by_share = _multiply(rows, grads, dims, row_scale * grad_scale, dy.dtype, precision)
    # `jnp.sum` would add, and thus send, float32.
    dkernel = lax.reduce(by_share, jnp.zeros((), dy.dtype), lax.add, (0,))
    shape = dy.shape[: dy.ndim - num_outputs] + kernel.shape[:num_contracted]
    return dx.reshape(shape), dkernel


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _dot(num_contracted, num_shares, x, kernel):
    return _dot_forward(num_contracted, num_shares, x, kernel)[0]


_dot.defvjp(_dot_forward, _dot_backward)


def _split(x, num_shares):
    return x.reshape(num_shares, x.shape[0] // num_shares, *x.shape[1:])


def _quantize(x, dtype, num_scaled):
    """Float8 numbers and float32 scales, one for each entry of the first dims."""
    largest = jnp.max(jnp.abs(x), axis=tuple(range(num_scaled, x.ndim)))
    largest = jnp.maximum(largest.astype(jnp.float32), _SMALLEST)
    # To the nearest power of two: `x` comes to at most 1.5 times the top.
    power = lax.reduce_precision(largest, exponent_bits=8, mantissa_bits=0)
    scaled = x.astype(jnp.float32) * _expand(_TOP[dtype] / power, x.ndim)
    return scaled.astype(dtype), power / _TOP[dtype]


def _multiply(left, right, dims, scale, dtype, precision):
    y = lax.dot_general(
        left, right, dims, precision=precision, preferred_element_type=dtype
    )
    return y * _expand(scale.astype(dtype), y.ndim)


def _expand(scale, num_dims):
    return lax.expand_dims(scale, range(scale.ndim, num_dims))


@functools.cache
def _log_emulation(platform: str) -> None:
    logging.warning("float8: emulated, as %s does not multiply it: slow", platform)
