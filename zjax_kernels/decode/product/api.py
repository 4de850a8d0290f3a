"""Products of few rows: checks and choice of implementation."""

from typing import Literal

import jax.numpy as jnp
from jax import Array

from zjax_kernels.decode.product.reference import (
    ACTIVATIONS,
    Activation,
    Operands,
    Options,
)
from zjax_kernels.decode.product.tuning import DEPTH
from zjax_kernels.device import (
    DTYPES,
    choose_implementation,
    describe,
    load_implementation,
    refuse,
)

Implementation = Literal["auto", "mosaic_gpu", "reference"]
MAX_ROWS = 64
"""Rows that the kernel takes; with more, a product is not bound by memory."""


def few_rows_matmul(
    x: Array,
    weights: Array,
    *,
    norm: tuple[Array, float] | None = None,
    activation: Activation = "",
    residual: Array | None = None,
    implementation: Implementation = "auto",
) -> Array:
    """Multiplies few rows by a matrix, which is read once, as in decoding.

    Results repeat bit by bit. A row does not depend on the other rows, nor on their
    number up to the next multiple of 8.

    Args:
        x: [N, K] rows.
        weights: [K, M] matrix in the dtype of `x`; [K, 2 M], gates before values, for
            an activation with gates.
        norm: Scale [K] and number added to the mean square, at least 0, of an RMS norm
            of the rows before the product, or None.
        activation: `gelu` (with tanh), or with gates `swiglu`, `geglu` or
            `clamped_swiglu`, of the product in float32; empty is none.
        residual: [N, M] in the dtype of `x`, added to the result, or None.
        implementation: `mosaic_gpu` (one Hopper GPU, 16-bit arrays, 1 to 64 rows, K and
            M multiples of 64), `reference` (anywhere, any sharding), or `auto`:
            `mosaic_gpu` where possible, logged once.

    Returns:
        [N, M] in the dtype of `x`, summed in float32. There is no gradient rule.

    Raises:
        ValueError: Shapes or dtypes do not fit, an unknown implementation or
            activation, or arrays that the kernel does not support.
        NotImplementedError: This device cannot run `mosaic_gpu`.

    Example:
        >>> few_rows_matmul(jnp.ones((1, 4)), jnp.ones((4, 2))).tolist()
        [[4.0, 4.0]]

    Reference:
        Osama et al., Stream-K (arXiv:2301.03598), on splits of the summed dim.
    """
    scale, eps = (None, 0.0) if norm is None else norm
    operands = Operands(x, weights, scale, residual)
    options = Options(eps=float(eps), activation=activation)
    _check(operands, options)
    problem, remedy = _obstacle(operands, options)
    rows, (depth, columns) = len(x), weights.shape
    chosen = choose_implementation(
        implementation,
        "product of few rows",
        f"{x.dtype.name}, {rows} x {depth} x {columns}",
        problem=problem,
        remedy=remedy,
    )
    run = load_implementation("decode.product", chosen).few_rows_matmul
    return run(operands, options)


def _obstacle(operands: Operands, options: Options) -> tuple[str, str]:
    """Returns problem and remedy of arrays without a kernel, or empty strings."""
    x, (depth, columns) = operands.x, operands.weights.shape
    if x.dtype.name not in DTYPES:
        problem = f"it needs {' or '.join(DTYPES)} and the arrays are {x.dtype.name}"
        return problem, "cast them"
    if not 1 <= len(x) <= MAX_ROWS:
        problem = f"it needs 1 to {MAX_ROWS} rows and x has {len(x)}"
        return problem, "use x @ weights"
    columns //= options.num_parts
    if depth % DEPTH or columns % DEPTH or not depth * columns:
        problem = f"it needs inputs and outputs in multiples of {DEPTH}, not {depth} "
        return f"{problem}and {columns}", "pad them"
    return "", ""


def _check(operands: Operands, options: Options) -> None:
    """Refuses arrays that do not fit one another, and unknown activations."""
    x, weights, norm, residual = operands
    problems = []
    if options.activation not in ACTIVATIONS:
        remedy = f"use one of {', '.join(filter(None, ACTIVATIONS))}, or none"
        problem = "is not an activation"
        problems.append(describe("activation", options.activation, problem, remedy))
    if options.eps < 0:
        problems.append(describe("norm[1]", options.eps, "is below 0", "use 1e-5"))
    for name, array, form in (("x", x, "[N, K]"), ("weights", weights, "[K, M]")):
        if array.ndim != 2:
            problem, remedy = "does not have 2 dims", f"give {form}"
            problems.append(describe(f"{name}.shape", array.shape, problem, remedy))
    refuse(problems)
    if weights.shape[1] % options.num_parts:
        problem, remedy = "has no value for each gate", "give [K, 2 M]"
        problems.append(describe("weights.shape", weights.shape, problem, remedy))
    if not jnp.issubdtype(x.dtype, jnp.floating):
        problem, remedy = "is not of floats", "cast the arrays"
        problems.append(describe("x.dtype", x.dtype, problem, remedy))
    columns = weights.shape[1] // options.num_parts
    fitting = {
        "weights": (weights, (x.shape[1], *weights.shape[1:])),
        "norm[0]": (norm, x.shape[1:]),
        "residual": (residual, (len(x), columns)),
    }
    for name, (array, shape) in fitting.items():
        if array is not None and array.shape != shape:
            problem, remedy = f"does not fit x of shape {x.shape}", f"give {shape}"
            problems.append(describe(f"{name}.shape", array.shape, problem, remedy))
        if name != "norm[0]" and array is not None and array.dtype != x.dtype:
            problem = f"is not the dtype of x, {x.dtype}"
            problems.append(describe(f"{name}.dtype", array.dtype, problem, "cast one"))
    refuse(problems)
