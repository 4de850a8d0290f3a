"""Matrices as codes of 8 or 4 bits with scales, for products that train nothing."""

from typing import Any, Literal, NamedTuple, get_args

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from zjax.ops import rounding
from zjax_kernels import few_rows_matmul
from zjax_kernels.decode.product.reference import (
    Activation,
    Options,
    interleaved,
    normalised,
    restored,
)
from zjax_kernels.decode.product.tuning import (
    CODE_ROWS,
    GATE_ROWS,
    NORM_ROWS,
    PIECE_ROWS,
    num_bits,
)

WeightDtype = Literal["compute", "int8", "int4", "float8"]
"""How matrices are stored; `compute` is the dtype of the rows."""
WEIGHT_DTYPES: tuple[WeightDtype, ...] = get_args(WeightDtype)
_DTYPES = {"int8": jnp.int8, "int4": jnp.int4, "float8": jnp.float8_e4m3fn}
GROUP = 128
"""Most inputs that share a scale of int4, as in AWQ and GPTQ."""


class Codes(NamedTuple):
    """A matrix [K, M] of codes times scales, in the layout of `few_rows_matmul`."""

    codes: Shaped[Array, "M K"]
    """int8, int4 or float8_e4m3fn."""
    scales: Float[Array, "groups M"]
    """Scale of each group of inputs of a column."""


def quantize(
    kernel: Float[Array, "K M"], weight_dtype: Literal["int8", "int4", "float8"]
) -> Codes:
    """Rounds a matrix to the nearest codes; the largest value maps to the last code.

    int8 and float8 have a scale for each column, int4 for each group of up to 128
    inputs. Scales are in the dtype of the matrix.

    Example:
        >>> found = quantize(jnp.array([[127.0, 0.0], [-1.6, 0.5]]), "int8")
        >>> found.codes.tolist(), found.scales[0].tolist()
        ([[127, -2], [0, 127]], [1.0, 0.003937007859349251])
    """
    most = GROUP if weight_dtype == "int4" else 0
    codes, scales = rounding.quantize(kernel, weight_dtype, most)
    codes = codes.T
    if jnp.issubdtype(codes.dtype, jnp.integer):
        codes = interleaved(codes, num_bits(codes.dtype))
    return Codes(codes, scales)


def dequantize(matrix: Codes) -> Float[Array, "K M"]:
    """Multiplies codes by scales, in the dtype of the scales."""
    codes, scales = matrix.codes, matrix.scales
    if jnp.issubdtype(codes.dtype, jnp.integer):
        codes = restored(codes, num_bits(codes.dtype))
    grouped = codes.reshape(len(codes), len(scales), -1).astype(scales.dtype)
    return (grouped * scales.T[..., None]).reshape(codes.shape).T


def multiply(
    x: Float[Array, "N K"],
    matrix: Codes,
    *,
    norm: tuple[Array, float] | None = None,
    activation: Activation = "",
    residual: Float[Array, "N M"] | None = None,
) -> Float[Array, "N M"]:
    """Multiplies rows by codes; all else is as of `few_rows_matmul`.

    Codes and scales are parameters of the program: the GPU reads them early.
    Few rows (`CODE_ROWS`) stream the codes through the kernel, in pieces. More rows
    take one product of 16-bit numbers. XLA widens the codes of int8 inside of the
    product, or before it if that is faster, and scales the columns behind it; groups of
    int4 are scaled before. More rows than few meet codes of float8 in float8, in one
    product at twice the speed of 16 bits.
    """
    codes, scales = matrix.codes, matrix.scales
    fused: dict[str, Any] = {"activation": activation, "residual": residual}
    if len(x) <= CODE_ROWS.get(codes.dtype.name, 0):
        return _multiply_pieces(x, matrix, norm=norm, **fused)
    fused |= {"norm": norm, "implementation": "reference"}
    if len(scales) == 1:
        fused["rounds_rows"] = codes.dtype == jnp.float8_e4m3fn
        return few_rows_matmul(x, codes, scales=scales, **fused)
    return few_rows_matmul(x, dequantize(matrix), **fused)


def _multiply_pieces(
    x: Array,
    matrix: Codes,
    *,
    norm: tuple[Array, float] | None,
    activation: Activation,
    residual: Array | None,
) -> Array:
    """Multiplies pieces of rows by codes in the kernel.

    A program normalises all rows for itself, and has the sums of gates and of values in
    registers: where rows are many, one operation before or behind all programs is
    faster.
    """
    codes, scales = matrix.codes, matrix.scales
    if norm is not None and len(x) > NORM_ROWS:
        x, norm = normalised(x, *norm), None
    options = Options(activation=activation)
    # No kernel takes rows of float16, whose sums of gates might be above 65,504.
    has_room = x.dtype != jnp.float16
    if options.num_parts > 1 and has_room and len(x) > GATE_ROWS[codes.dtype.name]:
        total = _multiply_pieces(x, matrix, norm=norm, activation="", residual=None)
        total = jnp.split(total.astype(jnp.float32), options.num_parts, axis=1)
        found = options.activate(*total)
        if residual is not None:
            found += residual.astype(jnp.float32)
        return found.astype(x.dtype)
    pieces = []
    for start in range(0, len(x), PIECE_ROWS[codes.dtype.name]):
        rows = slice(start, start + PIECE_ROWS[codes.dtype.name])
        added = None if residual is None else residual[rows]
        given = {"norm": norm, "activation": activation, "residual": added}
        given |= {"scales": scales, "early": True}
        pieces.append(few_rows_matmul(x[rows], codes, **given))
    return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces)


def describe_products(weight_dtype: WeightDtype) -> str:
    """Describes which products a pass takes, by the number of tokens that it reads."""
    dtype = jnp.dtype(_DTYPES[weight_dtype])
    numbers = "float8" if weight_dtype == "float8" else "16-bit numbers"
    if (most := CODE_ROWS.get(dtype.name)) is None:
        return f"products of all passes are in {numbers}"
    return f"passes of up to {most} tokens multiply codes, others {numbers}"
