"""Measures which tuning of the kernels is fastest on this GPU."""

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
from zjax_kernels.tunings import rank

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
    """Measures which tuning runs grouped products fastest; all later ones use it.

    It is stored in the user's cache folder, for this kind of GPU and these matrices.

    Args:
        sizes: int32[G], rows of each group, as they will be.
        k: Rows of each matrix, a multiple of 128.
        n: Columns of each matrix, a multiple of 128.
        dtype: bfloat16 or float16.
        activation: As for `grouped_matmul`: `grouped_activation` of these matrices and
            its backward pass from the next ones are measured, too. None for none.

    Returns:
        Tunings and their seconds, fastest first, of the product, the product with
        transposed matrices, and the gradient of the matrices. Those that need more
        shared memory than there is are left out.

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

        def compile_with(tuning, kernel=kernel, arrays=arrays):
            run = jax.jit(functools.partial(kernel, tuning=tuning))
            return functools.partial(run.lower(*arrays).compile(), *arrays)

        results[name] = rank(_candidates(name), compile_with)
        best[name, *matrices] = results[name][0][0]
    MEASURED.save(best)
    return results


def _products(x: Array, weights: Array, y: Array, sizes: Array) -> dict[Kernel, _Case]:
    from zjax_kernels.grouped import mosaic_gpu  # imports a compiler of kernels

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
    """Both passes of an activation; the next matrices lead back to rows of x."""
    from zjax_kernels.grouped import mosaic_gpu

    forward, backward = (
        functools.partial(kernel, activation=activation)
        for kernel in (
            mosaic_gpu.grouped_activation,
            mosaic_gpu.grouped_activation_backward,
        )
    )
    groups, k, n = weights.shape
    down = weights.reshape(groups, n, k)[:, : n // num_parts(activation)]
    arrays = x, down, sizes, y, jnp.ones(len(x), jnp.float32)
    return {
        "activation": (forward, (x, weights, sizes), weights.shape),
        "activation_backward": (backward, arrays, down.shape),
    }


def _candidates(kernel: str) -> list[Tuning]:
    bands = (8,) if kernel == "outer" else (4, 8, 16, 32)
    return [
        Tuning(tile_columns=width, stages=stages, band=band)
        for (width, stages), band in itertools.product(
            ((256, 3), (256, 4), (128, 4), (128, 6)), bands
        )
    ]
