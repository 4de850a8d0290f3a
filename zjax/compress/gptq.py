"""GPTQ: rounds inputs in turn, and lets later inputs make up for the error.

Reference: Frantar et al. (arXiv:2210.17323).
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from zjax.compress.grid import Grid, Rounded

BLOCK = 128
"""Inputs whose errors reach later blocks in one product, as in the paper."""
_MAX_DAMP = 1e6
"""Damping that ends the search for a matrix with a Cholesky factor."""


@functools.partial(jax.jit, static_argnames=("grid", "damp", "activation_order"))
def gptq(
    kernel: Float[Array, "K M"],
    hessian: Float[Array, "K K"],
    grid: Grid,
    *,
    damp: float = 0.01,
    activation_order: bool = False,
) -> Rounded:
    """Rounds a matrix so that the outputs for given inputs change little.

    An input that is always 0 is rounded to nearest. Without activation order, the
    scales of a group are taken when the group is reached, with all errors of earlier
    inputs added; with it, from the matrix as it was.

    Args:
        kernel: Matrix [K, M] from K inputs to M outputs.
        hessian: Mean of 2 x x^T over the inputs, float32[K, K]; may be singular.
        grid: Values that a weight may have.
        damp: Multiple of the mean diagonal that is added to the diagonal, above 0; ten
            times more, as often as needed, where the factorisation fails.
        activation_order: Whether the largest inputs are rounded first.

    Returns:
        Matrix on the grid and scales, float32.

    Example:
        >>> from zjax.compress.grid import Grid
        >>> kernel, x = jnp.array([[1.0], [0.4]]), jnp.array([[1.0, 1.0]])
        >>> gptq(kernel, 2 * x.T @ x, Grid("int3", 0)).values.tolist()
        [[1.0], [0.3333333432674408]]

    Reference:
        Frantar et al. (arXiv:2210.17323), with the scales of fixed groups under
        activation order.
    """
    kernel = kernel.astype(jnp.float32)
    num_inputs, _ = kernel.shape
    diagonal = jnp.diagonal(hessian)
    is_dead = diagonal <= 0
    order = jnp.arange(num_inputs)
    if activation_order:
        order = jnp.argsort(-diagonal, stable=True)
    # An input that is always 0 gets the mean diagonal, which keeps the matrix regular
    # and the damping as it is; the input's error reaches no weight.
    mean = diagonal.sum() / jnp.maximum((~is_dead).sum(), 1)
    usual = jnp.where(mean > 0, mean, 1.0)
    hessian = hessian + jnp.diag(jnp.where(is_dead, usual, 0.0))
    factor = inverse_factor(hessian[order][:, order], damp)
    size = grid.group_of(num_inputs)
    fixed = grid.scales(kernel)  # [groups, M]
    follows = not activation_order and size <= BLOCK
    width = size * (BLOCK // size) if follows else BLOCK
    plan = _Plan(grid, order // size, fixed, size if follows else 0, width)
    values, scales = _round_blocks(kernel[order], factor, plan)
    inverse = jnp.argsort(order)
    return Rounded(values[inverse], scales if follows else fixed)


class _Plan(NamedTuple):
    """How the inputs of a matrix share scales."""

    grid: Grid
    groups: Int[Array, " K"]
    """Group of each input, in the order of rounding."""
    fixed: Float[Array, "groups M"]
    """Scales of the matrix as it was."""
    follows: int
    """Size of groups whose scales are taken on the way; 0 for fixed scales."""
    width: int
    """Inputs of a block."""


def inverse_factor(hessian: Float[Array, "K K"], damp: float) -> Float[Array, "K K"]:
    """Returns the upper U with U^T U the inverse of the damped matrix."""
    size = len(hessian)
    mean = jnp.diagonal(hessian).mean()

    def factor(damp: jax.Array) -> jax.Array:
        damped = hessian + damp * mean * jnp.eye(size)
        # Reversed rows and columns: H = R R^T with an upper R, whose inverse is U.
        return jnp.linalg.cholesky(damped[::-1, ::-1])

    def is_wrong(state: tuple[jax.Array, jax.Array]) -> jax.Array:
        damp, found = state
        return ~jnp.isfinite(found).all() & (damp < _MAX_DAMP)

    def more(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        damp = state[0] * 10
        return damp, factor(damp)

    first = jnp.float32(damp)
    _, lower = jax.lax.while_loop(is_wrong, more, (first, factor(first)))
    inverse = jax.scipy.linalg.solve_triangular(lower, jnp.eye(size), lower=True)
    return inverse[::-1, ::-1]


def _round_blocks(
    kernel: Float[Array, "K M"], factor: Float[Array, "K K"], plan: _Plan
) -> tuple[jax.Array, jax.Array]:
    """Rounds blocks of inputs in turn; returns values and scales."""
    num_inputs = len(kernel)
    width = min(plan.width, num_inputs)
    padding = -num_inputs % width
    # Padded inputs are 0 and reach nothing: a row of the identity.
    kernel = jnp.pad(kernel, ((0, padding), (0, 0)))
    factor = jnp.pad(factor, ((0, padding), (0, padding)))
    places = jnp.arange(num_inputs, num_inputs + padding)
    factor = factor.at[places, places].set(1.0)
    groups = jnp.pad(plan.groups, (0, padding))
    columns = jnp.arange(num_inputs + padding)

    def block(number: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        kernel, scales = state
        start = number * width
        rows = jax.lax.dynamic_slice_in_dim(kernel, start, width)
        upper = jax.lax.dynamic_slice_in_dim(factor, start, width)
        within = jax.lax.dynamic_slice_in_dim(upper, start, width, axis=1)
        shared = jax.lax.dynamic_slice_in_dim(groups, start, width)
        rows, errors, scales = _round_rows(rows, within, shared, scales, plan)
        later = jnp.where((columns >= start + width)[None], upper, 0.0)
        spread = jnp.matmul(later.T, errors, precision=jax.lax.Precision.HIGHEST)
        kernel = jax.lax.dynamic_update_slice_in_dim(kernel - spread, rows, start, 0)
        return kernel, scales

    count = (num_inputs + padding) // width
    state = kernel, plan.fixed
    kernel, scales = jax.lax.fori_loop(0, count, block, state)
    return kernel[:num_inputs], scales


def _round_rows(
    rows: Float[Array, "W M"],
    factor: Float[Array, "W W"],
    groups: Int[Array, " W"],
    scales: Float[Array, "groups M"],
    plan: _Plan,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rounds the inputs of a block; returns values, scaled errors and all scales."""
    later = jnp.arange(len(rows))

    def one(row: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        rows, errors, scales = state
        group = groups[row]
        if plan.follows:
            start = row // plan.follows * plan.follows
            members = jax.lax.dynamic_slice_in_dim(rows, start, plan.follows)
            # The first input of a group sees all errors of earlier groups.
            new = jnp.where(row == start, plan.grid.scales(members)[0], scales[group])
            scales = scales.at[group].set(new)
        value = plan.grid.nearest(rows[row][None], scales[group][None])[0]
        error = (rows[row] - value) / factor[row, row]
        weights = jnp.where(later > row, factor[row], 0.0)
        rows = (rows - jnp.outer(weights, error)).at[row].set(value)
        return rows, errors.at[row].set(error), scales

    state = rows, jnp.zeros_like(rows), scales
    return jax.lax.fori_loop(0, len(rows), one, state)
