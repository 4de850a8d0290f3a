"""Products of few rows: checks and choice of implementation."""

from collections.abc import Iterator
from typing import Literal

import jax.numpy as jnp
from jax import Array

from zjax_kernels.decode.product.reference import (
    ACTIVATIONS,
    FLOAT8,
    Activation,
    Operands,
    Options,
)
from zjax_kernels.decode.product.tuning import (
    CHUNK,
    MAX_CODE_ROWS,
    MAX_ROWS,
    step_depth,
)
from zjax_kernels.device import (
    DTYPES,
    choose_implementation,
    describe,
    load_implementation,
    refuse,
)

Implementation = Literal["auto", "mosaic_gpu", "reference"]
CODES = ("int8", "int4", "float8_e4m3fn")
"""Dtypes of codes."""
GROUPS = (64, 128)
"""Inputs that share a scale, in the kernel."""


def few_rows_matmul(
    x: Array,
    weights: Array,
    *,
    scales: Array | None = None,
    norm: tuple[Array, float] | None = None,
    activation: Activation = "",
    residual: Array | None = None,
    rounds_rows: bool = False,
    early: bool = False,
    implementation: Implementation = "auto",
) -> Array:
    """Multiplies few rows by a matrix, which is read once, as in decoding.

    Results repeat bit by bit. A row does not depend on the other rows, nor on their
    number up to the next multiple of 8.

    Args:
        x: [N, K] rows.
        weights: [K, M] matrix in the dtype of `x`; [K, 2 M], gates before values, for
            an activation with gates. With `scales`, codes transposed: int8, int4 or
            float8_e4m3fn [M, K] or [2 M, K]. Where K is a multiple of 128 for int8, of
            256 for int4, codes of integers are in the order of `interleaved`.
        scales: [K / group, M] or [K / group, 2 M] floats, by which the sums of each
            group of inputs are multiplied, or None.
        norm: Scale [K] and number added to the mean square, at least 0, of an RMS norm
            of the rows before the product, or None.
        activation: `gelu` (with tanh), or with gates `swiglu`, `geglu` or
            `clamped_swiglu`, of the product in float32; empty is none.
        residual: [N, M] in the dtype of `x`, added to the result, or None.
        rounds_rows: Whether rows are rounded to float8, each with a scale, and meet
            codes of float8, of one group, in a product of float8.
        early: Whether the kernel reads `weights` and `scales` while the operations
            before still run (dependent launch, JAX 0.11.2 or newer). They must be
            arrays that no recent operation computes, as parameters of a model are:
            otherwise results are wrong.
        implementation: `mosaic_gpu` (one Hopper GPU, 16-bit arrays, 1 to 64 rows, K and
            M multiples of 64; for codes 1 to 128 rows of bfloat16 as they are, K a
            multiple of 128, for int4 of 256, and one group, or groups of 64 or 128),
            `reference` (anywhere, any sharding), or `auto`: `mosaic_gpu` where
            possible, logged once.

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
    operands = Operands(x, weights, scales, scale, residual)
    options = Options(float(eps), activation, rounds_rows=rounds_rows, early=early)
    _check(operands, options)
    problem, remedy = _obstacle(operands, options)
    rows, depth = x.shape
    chosen = choose_implementation(
        implementation,
        "product of few rows",
        f"{weights.dtype.name}, {rows} x {depth} x {operands.columns}",
        problem=problem,
        remedy=remedy,
    )
    run = load_implementation("decode.product", chosen).few_rows_matmul
    return run(operands, options)


def _obstacle(operands: Operands, options: Options) -> tuple[str, str]:
    """Returns problem and remedy of arrays without a kernel, or empty strings."""
    x, weights, scales, *_ = operands
    if options.rounds_rows:
        return "it multiplies rows as they are", "leave out rounds_rows"
    dtypes = DTYPES if scales is None else DTYPES[:1]
    if x.dtype.name not in dtypes:
        problem = f"it needs {' or '.join(dtypes)} rows and x is {x.dtype.name}"
        return problem, "cast it"
    most = MAX_ROWS if scales is None else MAX_CODE_ROWS
    if not 1 <= len(x) <= most:
        problem = f"it needs 1 to {most} rows and x has {len(x)}"
        return problem, "use x @ weights"
    depth, columns = x.shape[1], operands.columns // options.num_parts
    step = step_depth(weights.dtype)
    if depth % step or columns % CHUNK or not depth * columns:
        problem = (
            f"it needs multiples of {step} inputs and {CHUNK} outputs, not {depth}"
        )
        return f"{problem} and {columns}", "pad them"
    if scales is not None and len(scales) > 1 and depth // len(scales) not in GROUPS:
        known = " or ".join(map(str, GROUPS))
        problem = f"it needs groups of {known} inputs, not {depth // len(scales)}"
        return problem, "quantise again"
    return "", ""


def _check(operands: Operands, options: Options) -> None:
    """Refuses arrays that do not fit one another, and unknown activations."""
    x, weights, scales, *_ = operands
    problems = []
    if options.activation not in ACTIVATIONS:
        remedy = f"use one of {', '.join(filter(None, ACTIVATIONS))}, or none"
        problem = "is not an activation"
        problems.append(describe("activation", options.activation, problem, remedy))
    if options.eps < 0:
        problems.append(describe("norm[1]", options.eps, "is below 0", "use 1e-5"))
    form = "[K, M]" if scales is None else "[M, K]"
    arrays = {"x": (x, "[N, K]"), "weights": (weights, form)}
    if scales is not None:
        arrays["scales"] = scales, "[K / group, M]"
    for name, (array, form) in arrays.items():
        if array.ndim != 2:
            problem, remedy = "does not have 2 dims", f"give {form}"
            problems.append(describe(f"{name}.shape", array.shape, problem, remedy))
    refuse(problems)
    if options.rounds_rows and (scales is None or weights.dtype != FLOAT8):
        problem = f"meets weights of {weights.dtype}, not codes of float8"
        problems.append(describe("rounds_rows", True, problem, "leave it out"))
    problems += [*_shape_problems(operands, options), *_dtype_problems(operands)]
    refuse(problems)


def _shape_problems(operands: Operands, options: Options) -> Iterator[str]:
    """Yields operands that do not fit x."""
    x, weights, scales, norm, residual = operands
    (rows, depth), columns = x.shape, operands.columns
    if columns % options.num_parts:
        problem, remedy = "has no value for each gate", "give twice the outputs"
        yield describe("weights.shape", weights.shape, problem, remedy)
    fitting = {
        "weights": (weights, (depth, columns) if scales is None else (columns, depth)),
        "norm[0]": (norm, (depth,)),
        "residual": (residual, (rows, columns // options.num_parts)),
    }
    for name, (array, shape) in fitting.items():
        if array is not None and array.shape != shape:
            problem, remedy = f"does not fit x of shape {x.shape}", f"give {shape}"
            yield describe(f"{name}.shape", array.shape, problem, remedy)
    if scales is not None:
        groups, outputs = scales.shape
        if outputs != columns or not groups or depth % groups:
            problem = f"does not scale codes of shape {weights.shape}"
            remedy = f"give ({depth} / group, {columns})"
            yield describe("scales.shape", scales.shape, problem, remedy)
        elif options.rounds_rows and groups > 1:
            problem, remedy = "has several groups", f"give (1, {columns})"
            yield describe("scales.shape", scales.shape, problem, remedy)


def _dtype_problems(operands: Operands) -> Iterator[str]:
    """Yields operands of unusable dtypes."""
    x, weights, scales, _, residual = operands
    if not jnp.issubdtype(x.dtype, jnp.floating):
        yield describe("x.dtype", x.dtype, "is not of floats", "cast the arrays")
    same = {"weights": weights if scales is None else None, "residual": residual}
    for name, array in same.items():
        if array is not None and array.dtype != x.dtype:
            problem = f"is not the dtype of x, {x.dtype}"
            yield describe(f"{name}.dtype", array.dtype, problem, "cast one")
    if scales is not None:
        if weights.dtype.name not in CODES:
            known = " or ".join(CODES)
            problem, remedy = "is not of codes", f"use {known}"
            yield describe("weights.dtype", weights.dtype, problem, remedy)
        if not jnp.issubdtype(scales.dtype, jnp.floating):
            problem, remedy = "is not of floats", "cast them"
            yield describe("scales.dtype", scales.dtype, problem, remedy)
