"""Measures which tuning of the grouped kernels is fastest on this GPU."""

import functools
import itertools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array

from zjax_kernels.grouped.api import check_kernels
from zjax_kernels.grouped.reference import Activation, num_parts
from zjax_kernels.grouped.tuning import MEASURED, Kernel, Tuning
from zjax_kernels.tunings import compiles, rank

_Case: TypeAlias = tuple[Callable[..., Any], tuple[Array, ...], tuple[int, ...]]
"""A kernel, its arrays, and the shape of the matrices that its tuning is for."""


def tune_grouped_matmul(
    sizes: Array,
    k: int,
    n: int,
    *,
    dtype: Any = jnp.bfloat16,
    activation: Activation | None = None,
) -> dict[Kernel, list[tuple[Tuning, float]]]:
    """Measures which tuning runs grouped products fastest, for all later calls.

    The fastest tuning is stored in the user's cache folder, for this kind of GPU and
    matrices of this shape.

    Args:
        sizes: int32[G], rows of each group, as in later calls.
        k: Rows of each matrix, a multiple of 128.
        n: Columns of each matrix, a multiple of 128.
        dtype: bfloat16 or float16.
        activation: As for `grouped_matmul`. With an activation, `grouped_activation` is
            measured too, and `grouped_activation_backward` with matrices back to K
            columns.

    Returns:
        Tunings and seconds, fastest first, of the product, the product with transposed
        matrices, the gradient of the matrices, and both passes of an activation.
        Tunings that need more shared memory than the GPU has are left out.

    Raises:
        NotImplementedError: This GPU cannot run the kernels.
        ValueError: The kernels do not support the dtype or matrices.

    Example:
        >>> sizes = jnp.full(128, 1024)
        >>> found = tune_grouped_matmul(sizes, 2048, 1536)  # doctest: +SKIP
        >>> fastest, seconds = found["matmul"][0]  # doctest: +SKIP
    """
    rows = int(sizes.sum())
    check_kernels(rows, (k, n), jnp.dtype(dtype))
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (rows, k), (len(sizes), k, n), (rows, n)
    x, weights, y = (
        jax.random.normal(key, shape, dtype)
        for key, shape in zip(keys, shapes, strict=True)
    )
    kernels = _products(x, weights, y, sizes)
    if activation is not None:
        kernels |= _passes(activation, x, weights, y, sizes)
    results, best = {}, {}
    for name, (kernel, arrays, matrices) in kernels.items():
        results[name] = rank(_candidates(name), compiles(kernel, arrays))
        best[name, *matrices] = results[name][0][0]
    MEASURED.save(best)
    return results


def _products(x: Array, weights: Array, y: Array, sizes: Array) -> dict[Kernel, _Case]:
    """Returns the kernels without an activation, and arrays to measure with."""
    from zjax_kernels.grouped import mosaic_gpu  # slow: imports the kernel compiler

    transposed = functools.partial(mosaic_gpu.grouped_matmul, transpose=True)
    cases: dict[Kernel, tuple[Callable[..., Any], tuple[Array, ...]]] = {
        "matmul": (mosaic_gpu.grouped_matmul, (x, weights, sizes)),
        "transposed": (transposed, (y, weights, sizes)),
        "outer": (mosaic_gpu.grouped_outer, (x, y, sizes)),
    }
    return {name: (*case, weights.shape) for name, case in cases.items()}


def _passes(
    activation: Activation, x: Array, weights: Array, y: Array, sizes: Array
) -> dict[Kernel, _Case]:
    """Returns both passes of an activation, as of an MLP from K columns back to K."""
    from zjax_kernels.grouped import mosaic_gpu

    forward, backward = (
        functools.partial(kernel, activation=activation)
        for kernel in (
            mosaic_gpu.grouped_activation,
            mosaic_gpu.grouped_activation_backward,
        )
    )
    groups, k, n = weights.shape
    # Numbers do not matter: the weights in another shape take no more memory.
    down = weights.reshape(groups, n, k)[:, : n // num_parts(activation)]
    arrays = x, down, sizes, y, jnp.ones(len(x), jnp.float32)
    return {
        "activation": (forward, (x, weights, sizes), weights.shape),
        "activation_backward": (backward, arrays, down.shape),
    }


def _candidates(kernel: str) -> list[Tuning]:
    """Returns the tunings to measure."""
    # `grouped_outer` ignores bands.
    bands = (8,) if kernel == "outer" else (4, 8, 16, 32)
    return [
        Tuning(tile_columns=width, stages=stages, band=band)
        for (width, stages), band in itertools.product(
            ((256, 3), (256, 4), (128, 4), (128, 6)), bands
        )
    ]
