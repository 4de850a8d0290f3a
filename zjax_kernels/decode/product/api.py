"""Products of few rows: checks and choice of implementation."""

from typing import Literal

import jax.numpy as jnp
from jax import Array

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
    x: Array, weights: Array, *, implementation: Implementation = "auto"
) -> Array:
    """Multiplies few rows by a matrix, which is read once, as in decoding.

    Results repeat bit by bit. A row does not depend on the other rows, nor on their
    number up to the next multiple of 8.

    Args:
        x: [N, K] rows.
        weights: [K, M] matrix in the dtype of `x`.
        implementation: `mosaic_gpu` (one Hopper GPU, 16-bit arrays, 1 to 64 rows, K and
            M multiples of 64), `reference` (anywhere, any sharding), or `auto`:
            `mosaic_gpu` where possible, logged once.

    Returns:
        [N, M] in the dtype of `x`, summed in float32. There is no gradient rule.

    Raises:
        ValueError: Shapes or dtypes do not fit, an unknown implementation, or arrays
            that the kernel does not support.
        NotImplementedError: This device cannot run `mosaic_gpu`.

    Example:
        >>> few_rows_matmul(jnp.ones((1, 4)), jnp.ones((4, 2))).tolist()
        [[4.0, 4.0]]

    Reference:
        Osama et al., Stream-K (arXiv:2301.03598), on splits of the summed dim.
    """
    _check(x, weights)
    problem, remedy = _obstacle(x, weights)
    rows, (depth, columns) = len(x), weights.shape
    chosen = choose_implementation(
        implementation,
        "product of few rows",
        f"{x.dtype.name}, {rows} x {depth} x {columns}",
        problem=problem,
        remedy=remedy,
    )
    run = load_implementation("decode.product", chosen).few_rows_matmul
    return run(x, weights)


def _obstacle(x: Array, weights: Array) -> tuple[str, str]:
    """Returns problem and remedy of arrays without a kernel, or empty strings."""
    if x.dtype.name not in DTYPES:
        problem = f"it needs {' or '.join(DTYPES)} and the arrays are {x.dtype.name}"
        return problem, "cast them"
    if not 1 <= len(x) <= MAX_ROWS:
        problem = f"it needs 1 to {MAX_ROWS} rows and x has {len(x)}"
        return problem, "use x @ weights"
    if any(size % DEPTH or not size for size in weights.shape):
        problem = f"it needs weights of multiples of {DEPTH}, not {weights.shape}"
        return problem, "pad them"
    return "", ""


def _check(x: Array, weights: Array) -> None:
    """Refuses arrays that do not fit one another."""
    problems = []
    for name, array, form in (("x", x, "[N, K]"), ("weights", weights, "[K, M]")):
        if array.ndim != 2:
            problem, remedy = "does not have 2 dims", f"give {form}"
            problems.append(describe(f"{name}.shape", array.shape, problem, remedy))
    refuse(problems)
    if len(weights) != x.shape[1]:
        problem = f"does not fit x of shape {x.shape}"
        remedy = f"give {x.shape[1]} inputs"
        problems.append(describe("weights.shape", weights.shape, problem, remedy))
    if weights.dtype != x.dtype:
        problem, remedy = f"is not the dtype of x, {x.dtype}", "cast one"
        problems.append(describe("weights.dtype", weights.dtype, problem, remedy))
    if not jnp.issubdtype(x.dtype, jnp.floating):
        problem, remedy = "is not of floats", "cast both"
        problems.append(describe("x.dtype", x.dtype, problem, remedy))
    refuse(problems)
