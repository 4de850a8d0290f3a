"""AWQ: scales inputs of large activations up before weights are rounded.

Reference: Lin et al. (arXiv:2306.00978).
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from zjax.compress.grid import Grid, round_to_nearest
from zjax.compress.statistics import Statistics, output_error

NUM_EXPONENTS = 20
"""Exponents of the search, as in the paper."""
_LEAST = 1e-4
"""Least factor of an input, so that no weight vanishes."""


@functools.partial(jax.jit, static_argnames="grid")
def awq_factors(
    kernel: Float[Array, "K M"], found: Statistics, grid: Grid
) -> Float[Array, " K"]:
    """Finds factors of the inputs with which rounding changes outputs least.

    Row k of the matrix is to be multiplied by factor k before the matrix is rounded,
    and input k divided by the factor. An exponent of 0 takes part: the outputs change
    no more than without factors.

    Args:
        kernel: Matrix [K, M], the columns of all matrices that read the inputs.
        found: Statistics of the inputs.
        grid: Values that a weight may have.

    Returns:
        Factors float32[K], powers of the mean magnitudes of the inputs.

    Example:
        >>> from zjax.compress.statistics import add_tokens, empty
        >>> found = add_tokens(empty(2), jnp.array([[1.0, 1.0], [1.0, -1.0]]))
        >>> awq_factors(jnp.array([[1.0], [0.4]]), found, Grid("int4", 0)).tolist()
        [1.0, 1.0]

    Reference:
        Lin et al. (arXiv:2306.00978, section 3.2).
    """
    kernel = kernel.astype(jnp.float32)

    def factors(exponent: jax.Array) -> jax.Array:
        powers = jnp.maximum(found.mean**exponent, _LEAST)
        return powers / jnp.sqrt(powers.max() * powers.min())

    def error(exponent: jax.Array) -> jax.Array:
        scaled = factors(exponent)[:, None]
        rounded = round_to_nearest(kernel * scaled, grid).values / scaled
        return output_error(rounded - kernel, found.hessian)

    exponents = jnp.arange(NUM_EXPONENTS) / NUM_EXPONENTS
    # One by one: all at once would need a matrix for each exponent.
    errors = jax.lax.map(error, exponents)
    return factors(exponents[jnp.nanargmin(errors)])
