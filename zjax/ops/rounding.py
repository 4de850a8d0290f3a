"""Codes of few bits with scales, and values rounded to them: the adapter to Qwix.

Codes are symmetric: the largest magnitude of a group maps to the last code, which is
127 for int8, 7 for int4, 3 for int3, 448 for float8, 6 for mxfp4 and 1 for nf4. NF4:
Dettmers et al. (arXiv:2305.14314); the straight-through gradient: Bengio et al.
(arXiv:1308.3432).
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from zjax.errors import check_installed
from zjax.settings.quantize import Activations, Rule, Weights

_DTYPES = {
    "int8": jnp.int8,
    "int4": jnp.int4,
    "int3": jnp.int4,
    "nf4": jnp.uint4,
    "float8": jnp.float8_e4m3fn,
    "mxfp4": jnp.float4_e2m1fn,
}
"""Dtype that stores the codes of each type."""
_LAST = {
    "int8": 127.0,
    "int4": 7.0,
    "int3": 3.0,
    "nf4": 1.0,
    "float8": 448.0,
    "mxfp4": 6.0,
}
"""Largest value of a code of each type."""


def group_size(depth: int, most: int) -> int:
    """Returns the largest number up to `most` that divides the inputs of a matrix.

    A `most` of 0 makes one group of all inputs.

    Example:
        >>> [group_size(depth, 128) for depth in (4_096, 192, 80, 23)]
        [128, 96, 80, 23]
    """
    if most == 0:
        return depth
    return max(n for n in range(1, min(depth, most) + 1) if depth % n == 0)


def scales_to(largest: Any, weights: Weights, dtype: Any) -> Any:
    """Returns the scales that map the largest magnitudes of groups to the last code.

    Args:
        largest: Largest magnitude of each group, of NumPy or JAX.
        weights: Type of the codes; not `compute`.
        dtype: Dtype of the scales.

    Returns:
        Magnitudes over the last code, an array of the same library; mxfp4 rounds up to
        a power of two. Positive, and finite where the magnitudes are.

    Example:
        >>> scales_to(np.array([14.0, 0.0]), "int4", np.float16).tolist()
        [2.0, 6.103515625e-05]
        >>> scales_to(jnp.array([14.0, 12.0]), "mxfp4", jnp.bfloat16).tolist()
        [4.0, 2.0]
    """
    xp: Any = jnp if isinstance(largest, jax.Array) else np
    exact = scales = largest.astype(np.float32) / np.float32(_LAST[weights])
    if weights == "mxfp4":
        # A logarithm would round, and double the scale of exact powers.
        mantissa, exponent = xp.frexp(exact)
        scales = xp.ldexp(np.float32(1), exponent - (mantissa == 0.5))
    limits = jnp.finfo(dtype)
    # A group of zeros would divide 0 by 0; float16 ends at 65,504.
    scales = xp.clip(scales, float(limits.tiny), float(limits.max))
    # Weights that are not finite stay so.
    return xp.where(xp.isfinite(exact), scales, exact).astype(dtype)


def scales_of(
    x: Float[Array, "K M"], weights: Weights, most: int, dtype: Any = None
) -> Float[Array, "groups M"]:
    """Returns the scale of each group of up to `most` inputs, for each output.

    Args:
        x: Matrix, inputs first.
        weights: Type of the codes; not `compute`.
        most: Most inputs that share a scale, at least 0; 0 is all inputs.
        dtype: Dtype of the scales; None for the dtype of `x`.

    Returns:
        Scales of `scales_to`.
    """
    depth, columns = x.shape
    grouped = x.reshape(-1, group_size(depth, most), columns)
    largest = jnp.abs(grouped).max(axis=1)
    return scales_to(largest, weights, x.dtype if dtype is None else dtype)


def codes_of(
    x: Float[Array, "K M"], scales: Float[Array, "groups M"], weights: Weights
) -> Shaped[Array, "K M"]:
    """Returns the nearest code of each value, for given scales.

    Args:
        x: Matrix, inputs first.
        scales: Positive scales of equal groups of inputs, for each output.
        weights: Type of the codes; not `compute`.

    Returns:
        int8, int4 (also of int3), float8_e4m3fn or float4_e2m1fn values; of nf4 the
        numbers 0 to 15 of the sixteen levels, uint4.
    """
    wide = x.astype(jnp.float32).reshape(len(scales), -1, x.shape[1])
    wide = wide / scales.astype(jnp.float32)[:, None]
    return _nearest(wide, weights).reshape(x.shape)


def quantize(
    x: Float[Array, "K M"], weights: Weights, group_size: int
) -> tuple[Shaped[Array, "K M"], Float[Array, "groups M"]]:
    """Rounds a matrix to codes and scales.

    Args:
        x: Matrix, inputs first.
        weights: Type of the codes; not `compute`.
        group_size: Most inputs that share a scale, at least 0; 0 is all inputs.

    Returns:
        Codes of `codes_of` and scales of `scales_of`; codes are the nearest for the
        scales as rounded to the dtype of `x`.

    Raises:
        PackageError: Qwix is not installed, for nf4.

    Example:
        >>> codes, scales = quantize(jnp.array([[127.0, 0.0], [-1.6, 0.5]]), "int8", 0)
        >>> codes.tolist(), scales.tolist()
        ([[127, 0], [-2, 127]], [[1.0, 0.003937007859349251]])
    """
    scales = scales_of(x, weights, group_size)
    return codes_of(x, scales, weights), scales


def dequantize(
    codes: Shaped[Array, "K M"], scales: Float[Array, "groups M"]
) -> Float[Array, "K M"]:
    """Multiplies codes by scales, in the dtype of the scales.

    Args:
        codes: Codes of `quantize`.
        scales: Scales of equal groups of inputs, for each output.

    Returns:
        Matrix in the dtype of the scales.
    """
    values = _levels(codes) if codes.dtype == jnp.uint4 else codes
    grouped = values.astype(jnp.float32).reshape(len(scales), -1, codes.shape[1])
    # Levels of nf4 have no 16-bit values: the product is rounded once.
    wide = grouped * scales.astype(jnp.float32)[:, None]
    return wide.astype(scales.dtype).reshape(codes.shape)


def rounded(
    x: Float[Array, "K M"], weights: Weights, group_size: int, dtype: Any = None
) -> Float[Array, "K M"]:
    """Rounds a matrix to the values of its codes; the gradient passes unchanged.

    No value is clipped, as the last code is the largest magnitude: the straight-through
    gradient is the identity.

    Args:
        x: Matrix, inputs first.
        weights: Type of the codes; `compute` returns `x`.
        group_size: Most inputs that share a scale, at least 0; 0 is all inputs.
        dtype: Dtype of the products; None for the dtype of `x`.

    Returns:
        Codes of `quantize` times scales.

    Example:
        >>> rounded(jnp.array([[7.0], [-1.6]]), "int4", 0).tolist()
        [[7.0], [-2.0]]
    """
    dtype = x.dtype if dtype is None else dtype
    if weights == "compute":
        return x.astype(dtype)

    def change(x: Array) -> Array:
        codes, scales = quantize(x, weights, group_size)
        return dequantize(codes, scales.astype(dtype))

    return _through(x, change)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _through(x: Array, change: Callable[[Array], Array]) -> Any:
    """Changes values, while the gradient passes unchanged."""
    return change(x)


_through.defvjp(
    lambda x, change: (change(x), None), lambda change, saved, cotangent: (cotangent,)
)


def rounded_kernel(
    kernel: Float[Array, "..."],
    rule: Rule,
    num_outputs: int,
    num_stacked: int = 0,
    dtype: Any = None,
) -> Float[Array, "..."]:
    """Rounds a kernel, or a stack of kernels, as a rule says; see `rounded`.

    Args:
        kernel: Dims of a stack, then input dims, then output dims.
        rule: Type of the codes and size of the groups.
        num_outputs: Output dims, at least 1.
        num_stacked: Dims of the stack, at least 0; each kernel is rounded alone.
        dtype: Dtype of the products of codes and scales; None for the dtype of
            `kernel`, which may round the products.

    Returns:
        Kernel of the same shape.
    """

    def one(x: Array) -> Array:
        outputs = x.shape[x.ndim - num_outputs :]
        matrix = x.reshape(-1, math.prod(outputs))
        found = rounded(matrix, rule.weights, rule.group_size, dtype)
        return found.reshape(x.shape)

    for _ in range(num_stacked):
        one = jax.vmap(one)
    return one(kernel)


def rounded_rows(
    x: Float[Array, "..."], activations: Activations, num_inputs: int = 1
) -> Float[Array, "..."]:
    """Rounds what enters a layer, with one scale for each token; gradients pass.

    Args:
        x: Activations; the last `num_inputs` dims are of one token.
        activations: Type of the codes; `compute` returns `x`.
        num_inputs: Dims of one token, at least 1.

    Returns:
        Values of the nearest codes, in the shape and dtype of `x`.

    Example:
        >>> rounded_rows(jnp.array([[127.0, 0.6], [0.0, 0.0]]), "int8").tolist()
        [[127.0, 1.0], [0.0, 0.0]]
    """
    if activations == "compute":
        return x
    return _through(x, lambda x: _rounded_rows(x, activations, num_inputs))


def _rounded_rows(x: Array, activations: str, num_inputs: int) -> Array:
    """Rounds tokens to the values of their codes."""
    wide = x.astype(jnp.float32)
    dims = tuple(range(x.ndim - num_inputs, x.ndim))
    scales = jnp.abs(wide).max(axis=dims, keepdims=True) / _LAST[activations]
    scales = jnp.maximum(scales, jnp.finfo(jnp.float32).tiny)
    codes = _nearest(wide / scales, activations)
    return (codes.astype(jnp.float32) * scales).astype(x.dtype)


def _nearest(x: Array, kind: str) -> Array:
    """Returns the nearest codes of float32 values in units of the scale."""
    if kind == "nf4":
        # A range of 1 has the scale 1.
        return _qwix().quantize(x, kind, calibration_method="fixed,1").qvalue
    dtype, last = _DTYPES[kind], _LAST[kind]
    x = jnp.round(x) if jnp.issubdtype(dtype, jnp.integer) else x
    return jnp.clip(x, -last, last).astype(dtype)


def _levels(codes: Array) -> Array:
    """Returns the levels of nf4 that codes stand for, float32."""
    qwix, scale = _qwix(), jnp.ones([1] * codes.ndim, jnp.float32)
    return qwix.dequantize(qwix.QArray(codes, scale, None, "nf4"))


def _qwix() -> Any:
    """Imports Qwix, or refuses that it is missing."""
    check_installed("qwix")
    import qwix  # pyright: ignore[reportMissingImports]

    return qwix


def quantize_blocks(kernel: Array, dim: int, block_size: int, dtype: str) -> Any:
    """Rounds a kernel to codes whose scales stand in equal dims, as QLoRA stores them.

    Blocks of `block_size`, which divides dim `dim`, share a float32 scale. `dtype` is
    `int8` or `int4`.
    """
    last = _LAST[dtype]
    # By itself Qwix maps the largest value to last + 1/2, where rounding may overflow.
    found = _qwix().quantize(
        kernel.astype(jnp.float32),
        jnp.dtype(dtype),
        channelwise_axes=[other for other in range(kernel.ndim) if other != dim],
        tiled_axes={dim: block_size},
        calibration_method=f"absmax,{(last + 0.5) / last}",
    )
    return found.qvalue, found.scale


def dequantize_blocks(codes: Array, scales: Array) -> Array:
    """Multiplies codes of `quantize_blocks` by scales, in the dtype of the scales."""
    qwix = _qwix()
    return qwix.dequantize(qwix.QArray(codes, scales))


def multiply_blocks(
    x: Float[Array, "..."], codes: Array, scales: Array, num_inputs: int
) -> Float[Array, "..."]:
    """Multiplies activations by a matrix of codes, which gets no gradient.

    Codes have `num_inputs` input dims, then one output dim; blocks of scales lie along
    the last input dim.
    """
    return _multiply(x, codes, scales, num_inputs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _multiply(x: Array, codes: Array, scales: Array, num_inputs: int) -> Any:
    """Multiplies by the dequantised matrix."""
    return jnp.tensordot(x, dequantize_blocks(codes, scales), num_inputs)


def _forward(x: Array, codes: Array, scales: Array, num_inputs: int) -> Any:
    """Multiplies, and saves the codes for the gradient of the activations."""
    return _multiply(x, codes, scales, num_inputs), (codes, scales)


def _backward(num_inputs: int, saved: Any, cotangent: Array) -> Any:
    """Multiplies the cotangent by the matrix, dequantised again."""
    # Otherwise the compiler dequantises once, and holds the matrix until here.
    (codes, scales), cotangent = jax.lax.optimization_barrier((saved, cotangent))
    kernel = dequantize_blocks(codes, scales)
    dims = (cotangent.ndim - 1,), (num_inputs,)
    return jax.lax.dot_general(cotangent, kernel, (dims, ((), ()))), None, None


_multiply.defvjp(_forward, _backward)
