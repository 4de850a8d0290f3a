"""Copies of rows into the order of groups, as of tokens to experts."""

from jax import Array

from zjax_kernels.device import DTYPES, choose_implementation, load_implementation

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
