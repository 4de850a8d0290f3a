"""Products of few rows in jax.numpy: the specification of the kernel, on any device."""

import dataclasses
from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import Array, lax

from zjax_kernels.decode.product.tuning import CHUNK, num_bits
from zjax_kernels.grouped.reference import clamped_swiglu

Activation = Literal["", "gelu", "swiglu", "geglu", "clamped_swiglu"]
ACTIVATIONS = get_args(Activation)
FLOAT8 = jnp.float8_e4m3fn
_LARGEST = float(jnp.finfo(FLOAT8).max)
_MIN_FLOAT8_ROWS = 16
"""Rows of a product of float8; a single row is no matrix product to XLA."""


class Operands(NamedTuple):
    """Arrays of a product.

    Args:
        x: [N, K] rows.
        weights: [K, M], or [K, 2 M] of gates and values; with scales, codes transposed:
            [M, K] or [2 M, K], integers in the order of `interleaved`.
        scales: [K / group, M] or [K / group, 2 M] scales of codes, or None.
        norm: [K] scale of the RMS norm of the rows, or None.
        residual: [N, M] that is added to the result, or None.
    """

    x: Array
    weights: Array
    scales: Array | None = None
    norm: Array | None = None
    residual: Array | None = None

    @property
    def columns(self) -> int:
        """Columns of the matrix."""
        return self.weights.shape[1 if self.scales is None else 0]


@dataclasses.dataclass(frozen=True)
class Options:
    """Static choices of a product.

    Args:
        eps: Number added to the mean square of the norm.
        activation: Name of the activation of the product; empty is none.
        rounds_rows: Whether rows are rounded to float8, as the codes are.
        early: Whether the weights are read before the last kernels end.
    """

    eps: float = 0.0
    activation: Activation = ""
    rounds_rows: bool = False
    early: bool = False

    @property
    def num_parts(self) -> int:
        """Equal blocks of columns in the weights: gates and values, or one."""
        return 2 if self.activation.endswith("glu") else 1

    @property
    def activate(self) -> Callable[..., Array]:
        """Function of the parts of a product, in float32."""
        return {
            "": lambda total: total,
            "gelu": jax.nn.gelu,
            "swiglu": lambda gate, value: jax.nn.silu(gate) * value,
            "geglu": lambda gate, value: jax.nn.gelu(gate) * value,
            "clamped_swiglu": clamped_swiglu,
        }[self.activation]


def few_rows_matmul(operands: Operands, options: Options) -> Array:
    """Multiplies rows by weights, and sums in float32: [N, M]."""
    x, weights, scales, norm, residual = operands
    x = normalised(x, norm, options.eps)
    if scales is None:
        total = jnp.matmul(x, weights, preferred_element_type=jnp.float32)
    elif options.rounds_rows:
        total = _multiply_float8(x, weights, scales)
    else:
        total = _multiply_codes(x, weights, scales)
    total = options.activate(*jnp.split(total, options.num_parts, axis=1))
    if residual is not None:
        total += residual.astype(jnp.float32)
    return total.astype(x.dtype)


def normalised(x: Array, norm: Array | None, eps: float) -> Array:
    """Applies an RMS norm of scale `norm` [K] to rows [N, K]; none without a scale."""
    if norm is None:
        return x
    wide = x.astype(jnp.float32)
    mean_square = jnp.square(wide).mean(axis=1, keepdims=True)
    wide *= jax.lax.rsqrt(mean_square + eps)
    return (wide * norm.astype(jnp.float32)[None]).astype(x.dtype)


def interleaved(codes: Array, bits: int) -> Array:
    """Orders codes [M, K] of `bits` bits as the kernel reads them.

    Of 16 / bits runs of 64 channels, the codes at one place lie side by side, so that
    16 bits have a code of each run, and are an element of each of as many matrices.
    Other depths than multiples of these runs stay in order.

    Example:
        >>> interleaved(jnp.arange(128)[None], 8)[0, :6].tolist()
        [0, 64, 1, 65, 2, 66]
    """
    return _swap(codes, 16 // bits, CHUNK)


def restored(codes: Array, bits: int) -> Array:
    """Undoes `interleaved`.

    Example:
        >>> restored(interleaved(jnp.arange(128)[None], 8), 8)[0, :3].tolist()
        [0, 1, 2]
    """
    return _swap(codes, CHUNK, 16 // bits)


def _swap(x: Array, runs: int, length: int) -> Array:
    """Transposes each `runs` x `length` channels, if all channels are such tiles."""
    if x.shape[1] % (runs * length):
        return x
    return x.reshape(len(x), -1, runs, length).swapaxes(2, 3).reshape(x.shape)


def _multiply_codes(x: Array, codes: Array, scales: Array) -> Array:
    """Sums each group of channels, scales the sums and adds them: float32[N, M]."""
    if jnp.issubdtype(codes.dtype, jnp.integer):
        bits = num_bits(codes.dtype)
        # The rows are the smaller operand, but groups are of channels in order.
        if len(scales) == 1:
            x = interleaved(x, bits)
        else:
            codes = restored(codes, bits)
    x = x.reshape(len(x), len(scales), -1)
    codes = codes.astype(x.dtype).reshape(len(codes), *x.shape[1:])
    sums = jnp.einsum("ngk,mgk->ngm", x, codes, preferred_element_type=jnp.float32)
    return (sums * scales.astype(jnp.float32)[None]).sum(axis=1)


def _multiply_float8(x: Array, codes: Array, scales: Array) -> Array:
    """Rounds each row to float8 multiples of a scale, and multiplies: float32[N, M]."""
    wide = x.astype(jnp.float32)
    largest = jnp.abs(wide).max(axis=1, keepdims=True)
    row_scales = jnp.maximum(largest / _LARGEST, jnp.finfo(jnp.float32).tiny)
    rows = (wide / row_scales).astype(codes.dtype)
    missing = max(0, _MIN_FLOAT8_ROWS - len(x))
    rows = jnp.pad(rows, [(0, missing), (0, 0)])
    # In the dtype of `x`, as products in float8 of a training step are.
    total = lax.dot_general(
        rows, codes, (((1,), (1,)), ((), ())), preferred_element_type=x.dtype
    )
    total = total[: len(x)].astype(jnp.float32)
    return total * row_scales * scales.astype(jnp.float32)
