"""Products of groups of rows with a matrix for each, differentiable."""

import jax
import jax.numpy as jnp
from jax import Array

from zjax_kernels.errors import describe, refuse
from zjax_kernels.grouped import reference


def grouped_matmul(x: Array, weights: Array, sizes: Array) -> Array:
    """Multiplies rows by the matrix of their group.

    Rows of a group are adjacent, and groups follow one another: rows `[0, sizes[0])`
    are of group 0. Memory is of the order of the operands; no row is multiplied by
    matrices of other groups.

    Args:
        x: [M, K], floats.
        weights: [G, K, N], of the same dtype.
        sizes: int32[G], rows of each group, 0 or more; their sum is at most M.

    Returns:
        [M, N] in the dtype of `x`, summed in float32. Rows beyond the last group are 0,
        and so is the gradient of a matrix whose group is empty.

    Raises:
        ValueError: Shapes or dtypes that do not match.

    Example:
        >>> weights = jnp.array([[[1.0]], [[10.0]]])
        >>> grouped_matmul(jnp.ones((3, 1)), weights, jnp.array([1, 2])).tolist()
        [[1.0], [10.0], [10.0]]

    Reference:
        Gale et al., MegaBlocks (arXiv:2211.15841), section 5.
    """
    _check(x, weights, sizes)
    return _grouped_matmul(x, weights, sizes)


def grouped_outer(x: Array, y: Array, sizes: Array) -> Array:
    """Multiplies transposed rows by rows of the same group: a gradient of weights.

    Args:
        x: [M, K], floats.
        y: [M, N], of the same dtype.
        sizes: int32[G], as for `grouped_matmul`.

    Returns:
        [G, K, N] in the dtype of `x`, summed in float32; 0 for an empty group. It has
        no gradient of its own.

    Example:
        >>> x = jnp.array([[1.0], [2.0], [3.0]])
        >>> grouped_outer(x, x, jnp.array([1, 2])).tolist()
        [[[1.0]], [[13.0]]]
    """
    return reference.grouped_outer(x, y, sizes)


@jax.custom_vjp
def _grouped_matmul(x: Array, weights: Array, sizes: Array) -> Array:
    return reference.grouped_matmul(x, weights, sizes)


def _forward(x: Array, weights: Array, sizes: Array) -> tuple[Array, tuple]:
    return _grouped_matmul(x, weights, sizes), (x, weights, sizes)


def _backward(saved: tuple, cotangent: Array) -> tuple[Array, Array, None]:
    x, weights, sizes = saved
    of_x = reference.grouped_matmul(cotangent, weights.swapaxes(1, 2), sizes)
    return of_x, grouped_outer(x, cotangent, sizes), None


_grouped_matmul.defvjp(_forward, _backward)


def _check(x: Array, weights: Array, sizes: Array) -> None:
    problems = []
    if x.ndim != 2 or weights.ndim != 3 or x.shape[1] != weights.shape[1]:
        problem = f"does not fit x of shape {x.shape}"
        remedy = "give [M, K] and [groups, K, N]"
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
