"""Public functions of grouped products: checks, choice of implementation, gradients."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from zjax_kernels.device import (
    DTYPES,
    choose_implementation,
    describe,
    load_implementation,
    refuse,
)
from zjax_kernels.grouped.reference import ACTIVATIONS, Activation, activate, num_parts

_SIDE = 128
"""Side of a matrix: the kernels take multiples."""


def grouped_matmul(
    x: Array,
    weights: Array,
    sizes: Array,
    *,
    bias: Array | None = None,
    activation: Activation | None = None,
    transpose: bool = False,
    implementation: str = "auto",
) -> Array:
    """Multiplies each row by the matrix of the group: `activation(x @ weights + bias)`.

    Rows of a group are adjacent, and groups follow one another: rows `[0, sizes[0])`
    belong to group 0. Memory is proportional to the operands; each row is multiplied by
    one matrix alone. The kernels add the bias and apply the activation before a result
    is stored.

    Args:
        x: [M, K], floats.
        weights: [G, K, N], or [G, N, K] if `transpose`, in the dtype of `x`.
        sizes: int32[G], rows of each group, 0 or more, at most M in all.
        bias: [G, N] in the dtype of `x`, or None.
        activation: `gelu` (tanh approximation), `relu`, `swiglu` (SiLU of the first
            half of the columns times the second half), `clamped_swiglu` (the variant of
            gpt-oss), or None.
        transpose: Whether the matrices are stored transposed.
        implementation: `mosaic_gpu` (one Hopper GPU, 16-bit arrays, K and N multiples
            of 128), `reference` (anywhere), or `auto`: `mosaic_gpu` where possible.

    Returns:
        [M, N], or [M, N / 2] for both kinds of SwiGLU, in the dtype of `x`, summed in
        float32. Rows beyond the last group are 0, and so is the gradient of the matrix
        of an empty group.

    Raises:
        ValueError: Shapes or dtypes that do not match, an unknown activation or
            implementation, or arrays that the kernels do not support.
        NotImplementedError: This device cannot run `mosaic_gpu`.

    Example:
        >>> weights = jnp.array([[[1.0]], [[10.0]]])
        >>> grouped_matmul(jnp.ones((3, 1)), weights, jnp.array([1, 2])).tolist()
        [[1.0], [10.0], [10.0]]

    Reference:
        Gale et al., MegaBlocks (arXiv:2211.15841), section 5.
    """
    _check(x, weights, sizes, bias, activation, transpose)
    module = _choose(implementation, len(x), weights.shape[1:], x.dtype)
    product = _Product(module, transpose, activation)
    return _grouped_matmul(product, x, weights, bias, sizes)


def grouped_activation(
    x: Array,
    weights: Array,
    sizes: Array,
    *,
    activation: Activation,
    bias: Array | None = None,
    implementation: str = "auto",
) -> tuple[Array, Array]:
    """Returns the pre-activations and the activations of `grouped_matmul`.

    Defines no gradient rule: callers with a rule save the pre-activations for
    `grouped_activation_backward`.

    Args:
        x: [M, K], floats.
        weights: [G, K, N], in the dtype of `x`.
        sizes: int32[G], as for `grouped_matmul`.
        activation: As for `grouped_matmul`.
        bias: [G, N]; None for none.
        implementation: As for `grouped_matmul`.

    Returns:
        The pre-activations, [M, N], and the activations, [M, N] or [M, N / 2].

    Raises:
        ValueError: As `grouped_matmul`.
        NotImplementedError: As `grouped_matmul`.

    Example:
        >>> x, weights, sizes = jnp.ones((1, 1)), -jnp.ones((1, 1, 1)), jnp.array([1])
        >>> found = grouped_activation(x, weights, sizes, activation="relu")
        >>> [each.item() for each in found]
        [-1.0, 0.0]
    """
    _check(x, weights, sizes, bias, activation, transpose=False)
    module = _choose(implementation, len(x), weights.shape[1:], x.dtype)
    return module.grouped_activation(x, weights, sizes, bias, activation=activation)


def grouped_activation_backward(
    cotangent: Array,
    weights: Array,
    sizes: Array,
    inputs: Array,
    scale: Array,
    *,
    activation: Activation,
    implementation: str = "auto",
) -> tuple[Array, Array, Array]:
    """Differentiates `scale * grouped_matmul(activate(inputs), weights, sizes)`.

    The kernel recomputes `activate(inputs)` while the gradient of the product is in
    registers.

    Args:
        cotangent: [M, K] cotangent of the scaled product.
        weights: [G, F, K], in the dtype of `cotangent`.
        sizes: int32[G], as for `grouped_matmul`.
        inputs: [M, F] pre-activations, or [M, 2 F] for both kinds of SwiGLU; finite in
            rows without a group.
        scale: float32[M], a factor per row.
        activation: As for `grouped_matmul`.
        implementation: As for `grouped_matmul`.

    Returns:
        The cotangent of `inputs`; `scale * activate(inputs)`, which `grouped_outer`
        multiplies by `cotangent` for the gradient of `weights`; and the cotangent of
        `scale`, float32[M].

    Raises:
        ValueError: An unknown implementation, or arrays that the kernels do not
            support.
        NotImplementedError: This device cannot run `mosaic_gpu`.

    Example:
        >>> x, weights, sizes = jnp.ones((1, 1)), jnp.full((1, 1, 1), 3.0), jnp.ones(1)
        >>> found = grouped_activation_backward(
        ...     x, weights, sizes.astype(int), x, jnp.full(1, 2.0), activation="relu"
        ... )
        >>> [each.item() for each in found]
        [6.0, 2.0, 3.0]
    """
    module = _choose(implementation, len(inputs), weights.shape[1:], inputs.dtype)
    return module.grouped_activation_backward(
        cotangent, weights, sizes, inputs, scale, activation=activation
    )


def grouped_outer(
    x: Array, y: Array, sizes: Array, *, implementation: str = "auto"
) -> Array:
    """Multiplies `x` transposed by `y` within each group: the gradient of the matrices.

    Args:
        x: [M, K], floats.
        y: [M, N], in the dtype of `x`.
        sizes: int32[G], as for `grouped_matmul`.
        implementation: As for `grouped_matmul`. With `mosaic_gpu`, a number in `y` that
            is not finite may reach the neighbouring groups.

    Returns:
        [G, K, N] in the dtype of `x`, summed in float32; 0 for an empty group. There is
        no gradient rule.

    Example:
        >>> x = jnp.array([[1.0], [2.0], [3.0]])
        >>> grouped_outer(x, x, jnp.array([1, 2])).tolist()
        [[[1.0]], [[13.0]]]
    """
    module = _choose(implementation, len(x), (x.shape[1], y.shape[1]), x.dtype)
    return module.grouped_outer(x, y, sizes)


def grouped_sum(
    x: Array,
    sizes: Array,
    *,
    scale: Array | None = None,
    implementation: str = "auto",
) -> Array:
    """Sums the rows of each group in a fixed order: the gradient of biases.

    Args:
        x: [M, N], floats.
        sizes: int32[G], as for `grouped_matmul`.
        scale: [M], a factor per row; 1 by default. The kernel rounds the factors to the
            dtype of `x`.
        implementation: As for `grouped_outer`.

    Returns:
        [G, N] in the dtype of `x`, summed in float32; 0 for an empty group. There is no
        gradient rule.

    Example:
        >>> grouped_sum(jnp.array([[1.0], [2.0], [3.0]]), jnp.array([1, 2])).tolist()
        [[1.0], [5.0]]
    """
    module = _choose(implementation, len(x), x.shape[1:], x.dtype)
    return module.grouped_sum(x, sizes, scale)


class _Product(NamedTuple):
    """Static arguments of a product: module of the implementation and settings."""

    module: Any
    transpose: bool
    activation: Activation | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped_matmul(
    product: _Product, x: Array, weights: Array, bias: Array | None, sizes: Array
) -> Array:
    return _run(product, x, weights, bias, sizes, saves=False)[-1]


def _run(
    product: _Product,
    x: Array,
    weights: Array,
    bias: Array | None,
    sizes: Array,
    *,
    saves: bool,
) -> tuple[Array, ...]:
    """Returns the residuals of the activation, if `saves`, and the result."""
    module, transpose, activation = product
    operands, settings = (x, weights, sizes, bias), {"transpose": transpose}
    if activation is None:
        return (module.grouped_matmul(*operands, **settings),)
    settings |= {"activation": activation, "saves": saves}
    return module.grouped_activation(*operands, **settings)


def _forward(
    product: _Product, x: Array, weights: Array, bias: Array | None, sizes: Array
) -> tuple[Array, tuple]:
    """Returns the result and the residuals."""
    *inputs, out = _run(product, x, weights, bias, sizes, saves=True)
    return out, (inputs, x, weights, bias, sizes)


def _backward(
    product: _Product, saved: tuple, cotangent: Array
) -> tuple[Array, Array, Array | None, None]:
    """Returns the cotangents of rows, matrices and bias; None for the sizes."""
    inputs, x, weights, bias, sizes = saved
    module, transpose, activation = product
    if activation is not None:
        activated, pull = jax.vjp(functools.partial(activate, activation), *inputs)
        # Activations are float32, even of 16-bit arrays; so must be the cotangent.
        (cotangent,) = pull(cotangent.astype(activated.dtype))
    # The kernel reads the weights as stored: no transposed copy is made.
    of_x = module.grouped_matmul(cotangent, weights, sizes, transpose=not transpose)
    pair = (cotangent, x) if transpose else (x, cotangent)
    of_bias = None if bias is None else module.grouped_sum(cotangent, sizes)
    return of_x, module.grouped_outer(*pair, sizes), of_bias, None


_grouped_matmul.defvjp(_forward, _backward)


def check_kernels(num_rows: int, sides: tuple[int, ...], dtype: Any) -> None:
    """Raises `NotImplementedError` or `ValueError` where the kernels cannot run."""
    _choose("mosaic_gpu", num_rows, sides, dtype)


def _choose(
    implementation: str, num_rows: int, sides: tuple[int, ...], dtype: Any
) -> Any:
    """Returns the module of an implementation for rows, matrices and a dtype."""
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
    return load_implementation("grouped", chosen)


def _check(
    x: Array,
    weights: Array,
    sizes: Array,
    bias: Array | None,
    activation: Activation | None,
    transpose: bool,
) -> None:
    """Refuses arrays of wrong shapes or dtypes, and unknown activations."""
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
    columns = weights.shape[3 - contracted] if is_matrices else 0
    refuse(
        problems
        + _bias_problems(bias, (len(weights), columns), x.dtype)
        + _activation_problems(activation, columns)
    )


def _bias_problems(bias: Array | None, shape: tuple[int, int], dtype: Any) -> list[str]:
    """Reports a bias that is not one row per group in the dtype of the products."""
    if bias is None or (bias.shape, bias.dtype) == (shape, dtype):
        return []
    found = f"{bias.dtype.name}{list(bias.shape)}"
    remedy = f"give {dtype.name}{list(shape)}, a row for each group"
    return [describe("bias", found, "does not fit the products", remedy)]


def _activation_problems(activation: str | None, columns: int) -> list[str]:
    """Reports an unknown activation, or columns that SwiGLU cannot halve."""
    if activation is None:
        return []
    if activation not in ACTIVATIONS:
        remedy = f"use one of {', '.join(ACTIVATIONS)}"
        return [describe("activation", activation, "is not an activation", remedy)]
    if columns % num_parts(activation):
        problem = f"does not halve {columns} columns"
        remedy = "give matrices with the columns of gates and values"
        return [describe("activation", activation, problem, remedy)]
    return []


_LANES = 128
_MOST = 32768
"""Most numbers of a row: a copy takes 256 elements per dim, [256, 128]."""
_MOST_PLACES = 16
"""Most copies of a row, each of which is unrolled code."""


def copy_rows(
    x: Array, sources: Array, targets: Array, *, implementation: str = "auto"
) -> Array:
    """Returns `x[sources]`, given the inverse too: where each row of `x` goes.

    The kernel reads each row once and writes every copy of the row.

    Args:
        x: [T, M] rows.
        sources: int32[R], row of `x` for each row of the result.
        targets: int32[T, K], rows of the result that copy each row of `x`; R or more
            for none. Each row of the result is listed once.
        implementation: `mosaic_gpu` (one Hopper GPU, 16-bit arrays, K up to 16, M a
            multiple of 128 up to 32768), `reference` (anywhere), or `auto`:
            `mosaic_gpu` where possible.

    Returns:
        [R, M]. There is no gradient rule.

    Raises:
        ValueError: An unknown implementation, or arrays that the kernel does not
            support.
        NotImplementedError: This device cannot run `mosaic_gpu`.

    Example:
        >>> import jax.numpy as jnp
        >>> x, sources = jnp.array([[1.0], [2.0]]), jnp.array([1, 0, 1])
        >>> copy_rows(x, sources, jnp.array([[1, 3], [0, 2]])).tolist()
        [[2.0], [1.0], [2.0]]
    """
    problem = remedy = ""
    if x.dtype.name not in DTYPES:
        problem = f"it needs {' or '.join(DTYPES)} and the rows are {x.dtype.name}"
        remedy = "cast them"
    elif x.shape[1] % _LANES or x.shape[1] > _MOST or not len(x):
        problem = f"it needs rows of 128, 256, ... {_MOST} numbers, not {x.shape}"
        remedy = "pad or split them"
    elif targets.shape[1] > _MOST_PLACES:
        problem = f"it needs at most {_MOST_PLACES} places of a row, not "
        problem += str(targets.shape[1])
        remedy = "gather them"
    chosen = choose_implementation(
        implementation,
        "copies of rows",
        f"{x.dtype.name}, rows of {x.shape[1]}",
        problem=problem,
        remedy=remedy,
    )
    return load_implementation("grouped", chosen).copy_rows(x, sources, targets)
