"""Measures which tuning of the kernels is fastest on this GPU."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from zjax_kernels.grouped import mosaic_gpu
from zjax_kernels.grouped.api import check_kernels
from zjax_kernels.grouped.tuning import MEASURED, Kernel, Tuning
from zjax_kernels.tunings import rank


def tune_grouped_matmul(
    sizes: Array, k: int, n: int, *, dtype: Any = jnp.bfloat16
) -> dict[Kernel, list[tuple[Tuning, float]]]:
    """Measures which tuning runs grouped products fastest; all later ones use it.

    It is stored in the user's cache folder, for this kind of GPU and these matrices.

    Args:
        sizes: int32[G], rows of each group, as they will be.
        k: Rows of each matrix, a multiple of 128.
        n: Columns of each matrix, a multiple of 128.
        dtype: bfloat16 or float16.

    Returns:
        Tunings and their seconds, fastest first, of the product, the product with
        transposed matrices, and the gradient of the matrices.

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
    transposed = functools.partial(mosaic_gpu.grouped_matmul, transpose=True)
    kernels = {
        "matmul": (mosaic_gpu.grouped_matmul, (x, weights, sizes)),
        "transposed": (transposed, (y, weights, sizes)),
        "outer": (mosaic_gpu.grouped_outer, (x, y, sizes)),
    }
    results = {}
    for name, (kernel, arrays) in kernels.items():

        def compile_with(tuning, kernel=kernel, arrays=arrays):
            run = jax.jit(functools.partial(kernel, tuning=tuning))
            return functools.partial(run.lower(*arrays).compile(), *arrays)

        results[name] = rank(_candidates(name), compile_with)
    best = {(name, len(sizes), k, n): each[0][0] for name, each in results.items()}
    MEASURED.save(best)
    return results


def _candidates(kernel: str) -> list[Tuning]:
    bands = (8,) if kernel == "outer" else (4, 8, 16, 32)
    return [
        Tuning(tile_columns=width, stages=stages, band=band)
        for (width, stages), band in itertools.product(
            ((256, 3), (256, 4), (128, 4), (128, 6)), bands
        )
    ]
