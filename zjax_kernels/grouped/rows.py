"""Rows copied into the order of their groups."""

from jax import Array

from zjax_kernels.device import DTYPES, choose_implementation
from zjax_kernels.grouped import reference

_LANES = 128
_MOST = 32768
"""Numbers of a row, of which shared memory holds a few."""
_MOST_PLACES = 16
"""Places of a row, each of which is code of its own."""


def copy_rows(
    x: Array, sources: Array, targets: Array, *, implementation: str = "auto"
) -> Array:
    """Returns `x[sources]`, where it is known where each row of `x` goes.

    The kernel reads each row once, and writes it to all of its places.

    Args:
        x: [T, M].
        sources: int32[R], the row of `x` that each row of the result is.
        targets: int32[T, K], the rows of the result that each row of `x` is; R or more
            for none. Each row of the result is there once.
        implementation: `mosaic_gpu` (one Hopper GPU, 16-bit arrays, K up to
            16, M a multiple of 128 up to 32768), `reference` (anywhere), or `auto`,
            which takes the former where it can run.

    Returns:
        [R, M]. It has no gradient of its own.

    Raises:
        ValueError: An unknown implementation, or arrays that it does not support.
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
    if chosen == "reference":
        return reference.copy_rows(x, sources, targets)
    from zjax_kernels.grouped import mosaic_gpu  # imports a compiler of kernels

    return mosaic_gpu.copy_rows(x, sources, targets)
