"""Products of groups of rows with a matrix for each, differentiable."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from zjax_kernels.device import DTYPES, choose_implementation
from zjax_kernels.errors import describe, refuse
from zjax_kernels.grouped import mosaic_gpu, reference

_SIDE = 128
"""The kernels take matrices whose sides are multiples of it."""


def grouped_matmul(
    x: Array,
    weights: Array,
    sizes: Array,
    *,
    transpose: bool = False,
    implementation: str = "auto",
) -> Array:
    """Multiplies rows by the matrix of their group.

    Rows of a group are adjacent, and groups follow one another: rows `[0, sizes[0])`
    are of group 0. Memory is of the order of the operands; no row is multiplied by
    matrices of other groups.

    Args:
        x: [M, K], floats.
        weights: [G, K, N], or [G, N, K] if `transpose`, of the same dtype.
        sizes: int32[G], rows of each group, 0 or more; their sum is at most M.
        transpose: Whether to multiply by transposed matrices.
        implementation: `mosaic_gpu` (one Hopper GPU, 16-bit arrays, K and N multiples
            of 128), `reference` (anywhere), or `auto`, which takes the former where it
            can run.

    Returns:
        [M, N] in the dtype of `x`, summed in float32. Rows beyond the last group are 0,
        and so is the gradient of a matrix whose group is empty.

    Raises:
        ValueError: Shapes or dtypes that do not match, an unknown implementation, or
            arrays that it does not support.
        NotImplementedError: This device cannot run `mosaic_gpu`.

    Example:
        >>> weights = jnp.array([[[1.0]], [[10.0]]])
        >>> grouped_matmul(jnp.ones((3, 1)), weights, jnp.array([1, 2])).tolist()
        [[1.0], [10.0], [10.0]]

    Reference:
        Gale et al., MegaBlocks (arXiv:2211.15841), section 5.
    """
    _check(x, weights, sizes, transpose)
    module = _choose(implementation, len(x), weights.shape[1:], x.dtype)
    return _grouped_matmul(module, transpose, x, weights, sizes)


def grouped_outer(
    x: Array, y: Array, sizes: Array, *, implementation: str = "auto"
) -> Array:
    """Multiplies transposed rows by rows of the same group: a gradient of weights.

    Args:
        x: [M, K], floats.
        y: [M, N], of the same dtype.
        sizes: int32[G], as for `grouped_matmul`.
        implementation: As for `grouped_matmul`. With `mosaic_gpu`, a number in `y` that
            is not finite may reach the neighbouring groups.

    Returns:
        [G, K, N] in the dtype of `x`, summed in float32; 0 for an empty group. It has
        no gradient of its own.

    Example:
        >>> x = jnp.array([[1.0], [2.0], [3.0]])
        >>> grouped_outer(x, x, jnp.array([1, 2])).tolist()
        [[[1.0]], [[13.0]]]
    """
    module = _choose(implementation, len(x), (x.shape[1], y.shape[1]), x.dtype)
    return module.grouped_outer(x, y, sizes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _grouped_matmul(
    module: Any, transpose: bool, x: Array, weights: Array, sizes: Array
) -> Array:
    return module.grouped_matmul(x, weights, sizes, transpose=transpose)


def _forward(
    module: Any, transpose: bool, x: Array, weights: Array, sizes: Array
) -> tuple[Array, tuple]:
    out = module.grouped_matmul(x, weights, sizes, transpose=transpose)
    return out, (x, weights, sizes)


def _backward(
    module: Any, transpose: bool, saved: tuple, cotangent: Array
) -> tuple[Array, Array, None]:
    x, weights, sizes = saved
    of_x = module.grouped_matmul(cotangent, weights, sizes, transpose=not transpose)
    pair = (cotangent, x) if transpose else (x, cotangent)
    return of_x, module.grouped_outer(*pair, sizes), None


_grouped_matmul.defvjp(_forward, _backward)


def check_kernels(num_rows: int, sides: tuple[int, ...], dtype: Any) -> None:
    """Raises `NotImplementedError` or `ValueError` where the kernels cannot run."""
    _choose("mosaic_gpu", num_rows, sides, dtype)


def _choose(
    implementation: str, num_rows: int, sides: tuple[int, ...], dtype: Any
) -> Any:
    problem = remedy = ""
    if dtype.name not in DTYPES:
        problem = f"it needs {' or '.join(DTYPES)} and the arrays are {dtype.name}"
        remedy = "cast them"
    elif any(side % _SIDE for side in sides) or not num_rows:
        problem = (
            f"it needs rows, and matrices with sides of 128, 256, ..., not {sides}"
        )
        remedy = "pad them"
    chosen = choose_implementation(
        implementation,
        "grouped products",
        f"{dtype.name}, matrices of {sides}",
        problem=problem,
        remedy=remedy,
    )
    return {"mosaic_gpu": mosaic_gpu, "reference": reference}[chosen]


def _check(x: Array, weights: Array, sizes: Array, transpose: bool) -> None:
    problems, contracted = [], 2 if transpose else 1
    is_matrices = x.ndim == 2 and weights.ndim == 3
    if not is_matrices or x.shape[1] != weights.shape[contracted]:
        problem = f"does not fit x of shape {x.shape}"
        sides = "N, K" if transpose else "K, N"
        remedy = f"give [M, K] and [groups, {sides}]"
        problems.append(describe("weights.shape", weights.shape, problem, remedy))
    elif sizes.shape != weights.shape[:1]:
        problem = f"does not fit {weights.shape[0]} matrices"
        problems.append(
            describe("sizes.shape", sizes.shape, problem, "give one for each")
        )
    if not jnp.issubdtype(sizes.dtype, jnp.integer):
        problem, remedy = "is not of integers", "count rows in int32"
        problems.append(describe("sizes.dtype", sizes.dtype, problem, remedy))
    if x.dtype != weights.dtype or not jnp.issubdtype(x.dtype, jnp.floating):
        problem = f"does not fit x of {x.dtype}"
        remedy = "cast both to one floating-point dtype"
        problems.append(describe("weights.dtype", weights.dtype, problem, remedy))
    refuse(problems)
