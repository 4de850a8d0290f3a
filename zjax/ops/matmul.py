"""Matrix products in float8, and exact products of bfloat16 and float32 operands."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float

from zjax.errors import ConfigError, Problem
from zjax.ops import narrow
from zjax.typing import Device
from zjax_kernels import few_rows_matmul

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
_TOP = {E4M3: 2.0**8, E5M2: 2.0**15}
"""Largest power of two of each dtype; the largest finite number is 1.75 times as
large."""
_SMALLEST = 2.0**-100
"""Smallest magnitude used as a scale: the inverse of a scale has to be finite."""


def dot(
    x: Float[Array, "..."],
    kernel: Float[Array, "..."],
    num_contracted: int = 1,
    *,
    num_batch_shards: int = 1,
) -> Float[Array, "..."]:
    """Contracts the last dims of `x` with the first of `kernel`, like `jnp.tensordot`.

    The residual is `x` in float8; the backward pass makes two float8 products. Operands
    that are not finite give results that are not finite. `x` and `kernel` are both
    bfloat16 or float32. Each of `num_batch_shards` shards of the first dim of `x` has a
    scale.

    Reference:
        Micikevicius et al. (arXiv:2209.05433).
    """
    return _dot(num_contracted, num_batch_shards, x, kernel)


def dot_few_rows(
    x: Float[Array, "..."],
    kernel: Float[Array, "..."] | narrow.Codes,
    num_contracted: int = 1,
    *,
    residual: Float[Array, "..."] | None = None,
    **fused: Any,
) -> Float[Array, "..."]:
    """Contracts as `dot` does, by a GPU kernel for few rows where one runs.

    The GPU reads `kernel` while the operations before still run: it is a parameter of
    the program, which no recent operation computes. `fused` is `norm` or `activation`
    of `zjax_kernels.few_rows_matmul`. The product has no gradient. Output dims of codes
    are merged.
    """
    before = x.shape[: x.ndim - num_contracted]
    rows = x.reshape(math.prod(before), -1)
    if residual is not None:
        fused["residual"] = residual.reshape(rows.shape[0], -1)
    if isinstance(kernel, narrow.Codes):
        y, after = narrow.multiply(rows, kernel, **fused), ()
    else:
        matrix = kernel.reshape(rows.shape[1], -1)
        y = few_rows_matmul(rows, matrix, early=True, **fused)
        after = kernel.shape[num_contracted:]
    if residual is not None:
        return y.reshape(residual.shape)
    return y.reshape(*before, *(after if y.shape[1] == math.prod(after) else (-1,)))


def check_device(device: Device, field: str = "precision.matmul_dtype") -> None:
    """Refuses NVIDIA GPUs older than Ada and logs where float8 is emulated.

    `field` names the setting that asks for float8.
    """
    if device.platform != "gpu" or "cuda" not in device.client.platform_version:
        _log_emulation(device.platform)
        return
    version = device.compute_capability
    if tuple(map(int, version.split("."))) < (8, 9):
        problem = f"needs compute capability 8.9 and this GPU has {version}"
        remedy = "use 'compute'"
        raise ConfigError(Problem(field, "float8", problem, remedy))


def _dot_forward(num_contracted, num_batch_shards, x, kernel):
    """Computes the product in float8, with float8 `x` and the kernel as residuals."""
    # A scale per shard needs neither a history of maxima nor a maximum over devices.
    rows, row_scale = _quantize(_split_batch(x, num_batch_shards), E4M3, 1)
    # Without this, a loop over layers stores a transposed copy of all weights.
    stored = with_layout_constraint(kernel, Layout(tuple(range(kernel.ndim))))
    weights, weight_scale = _quantize(stored, E4M3, 0)
    inputs = tuple(range(rows.ndim - num_contracted, rows.ndim))
    dims = ((inputs, tuple(range(num_contracted))), ((), ()))
    y = _multiply(rows, weights, dims, row_scale * weight_scale, x.dtype, None)
    shape = x.shape[: x.ndim - num_contracted] + kernel.shape[num_contracted:]
    return y.reshape(shape), (rows, row_scale, kernel)


def _dot_backward(num_contracted, num_batch_shards, residuals, dy):
    """Computes the gradients of `x` and kernel as two products in float8."""
    rows, row_scale, kernel = residuals
    # The tensor cores accumulate with less than float32 precision by default.
    precision = lax.Precision.HIGHEST
    # Gradients need the range of E5M2 more than a third bit of mantissa.
    grads, grad_scale = _quantize(_split_batch(dy, num_batch_shards), E5M2, 1)
    # Quantized again: as a residual it would be another copy of all weights.
    weights, weight_scale = _quantize(kernel, E4M3, 0)
    num_outputs = kernel.ndim - num_contracted
    outputs = tuple(range(grads.ndim - num_outputs, grads.ndim))
    dims = ((outputs, tuple(range(num_contracted, kernel.ndim))), ((), ()))
    dx = _multiply(grads, weights, dims, grad_scale * weight_scale, dy.dtype, precision)
    tokens = tuple(range(1, rows.ndim - num_contracted))
    dims = ((tokens, tokens), ((0,), (0,)))
    by_shard = _multiply(rows, grads, dims, row_scale * grad_scale, dy.dtype, precision)
    # `jnp.sum` would accumulate, and thus all-reduce, in float32.
    dkernel = lax.reduce(by_shard, jnp.zeros((), dy.dtype), lax.add, (0,))
    shape = dy.shape[: dy.ndim - num_outputs] + kernel.shape[:num_contracted]
    return dx.reshape(shape), dkernel


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _dot(num_contracted, num_batch_shards, x, kernel):
    """Product in float8 with gradients in float8."""
    return _dot_forward(num_contracted, num_batch_shards, x, kernel)[0]


_dot.defvjp(_dot_forward, _dot_backward)


def _split_batch(x, num_batch_shards):
    return x.reshape(num_batch_shards, x.shape[0] // num_batch_shards, *x.shape[1:])


def _quantize(x, dtype, num_scaled):
    """Rounds to float8 codes, with float32 scales of the first `num_scaled` dims."""
    largest = jnp.max(jnp.abs(x), axis=tuple(range(num_scaled, x.ndim)))
    largest = jnp.maximum(largest.astype(jnp.float32), _SMALLEST)
    # The nearest power of two, so that `x` is scaled to at most 1.5 times the top.
    power = lax.reduce_precision(largest, exponent_bits=8, mantissa_bits=0)
    scaled = x.astype(jnp.float32) * _expand(_TOP[dtype] / power, x.ndim)
    return scaled.astype(dtype), power / _TOP[dtype]


def _multiply(left, right, dims, scale, dtype, precision):
    """Multiplies float8 operands into `dtype`, and undoes the scales."""
    y = lax.dot_general(
        left, right, dims, precision=precision, preferred_element_type=dtype
    )
    return y * _expand(scale.astype(dtype), y.ndim)


def _expand(scale, num_dims):
    return lax.expand_dims(scale, range(scale.ndim, num_dims))


@functools.cache
def _log_emulation(platform: str) -> None:
    """Logs once per platform that float8 is emulated."""
    logging.warning("float8: emulated, as %s does not multiply it: slow", platform)


_NUM_TERMS = 3
"""Three bfloat16 significands of 8 bits hold the 24 bits of a float32 significand."""


@jax.custom_vjp
def split_dot(
    x: Float[Array, "T M"], kernel: Float[Array, "M N"]
) -> Float[Array, "T N"]:
    """Multiplies bfloat16 rows by a float32 or bfloat16 matrix, in float32.

    The gradient of the kernel is as exact; the gradient of `x` has 16 bits. A narrow
    kernel is cheap, as the terms of the kernel are multiplied side by side.
    """
    return _forward(x, kernel)[0]


def _forward(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, tuple]:
    """Multiplies by all terms of the kernel in one product."""
    terms = jnp.concatenate(_terms(kernel), 1)
    products = jnp.dot(x, terms, preferred_element_type=jnp.float32)
    return _sum_columns(products, kernel.shape[1]), (x, kernel)


def _backward(saved: tuple, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes the gradients of `x` and kernel from products of bfloat16 terms."""
    x, kernel = saved
    terms, columns = _terms(cotangent), _terms(kernel)
    products = jax.lax.dot_general(
        x,
        jnp.concatenate(terms, 1),
        (((0,), (0,)), ((), ())),
        preferred_element_type=jnp.float32,
    )
    # Products of small terms are below the last bit of bfloat16.
    pairs = [(term, columns[0]) for term in terms[:2]]
    pairs += [(terms[0], column) for column in columns[1:2]]
    left, right = (jnp.concatenate(side, 1) for side in zip(*pairs, strict=True))
    x_cotangent = jnp.dot(left, right.T, preferred_element_type=jnp.float32)
    kernel_cotangent = _sum_columns(products, kernel.shape[1])
    return x_cotangent.astype(x.dtype), kernel_cotangent.astype(kernel.dtype)


split_dot.defvjp(_forward, _backward)


def _terms(x: jax.Array) -> list[jax.Array]:
    """Splits an array into bfloat16 arrays that add up to it, the largest first."""
    if x.dtype == jnp.bfloat16:
        return [x]
    terms = []
    for _ in range(_NUM_TERMS):
        # A compiler may drop a pair of dtype conversions, but not this.
        term = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
        terms.append(term.astype(jnp.bfloat16))
        x = x - term
    return terms


def _sum_columns(products: jax.Array, num_columns: int) -> jax.Array:
    """Adds blocks of columns, blocks of the smallest terms first."""
    blocks = jnp.split(products, products.shape[1] // num_columns, axis=1)
    return sum(blocks[-2::-1], start=blocks[-1])
