"""Rows of a table by number, with a gradient that is added up in float32."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

ROWS_AT_ONCE = 4096
"""Of the table, in a product with the rows that were looked up."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def look_up(
    table: Float[Array, "V M"], indices: Int[Array, "..."], deterministic: bool = False
) -> Float[Array, "... M"]:
    """Rows of a table.

    A frequent token adds thousands of rows to one. In bfloat16 the sum would stop to
    grow, and GPUs add 16-bit numbers one after another.

    Args:
        table: Rows, in any floating dtype.
        indices: Which of them, 0 to V - 1; others find zeros, whatever devices hold the
            table.
        deterministic: Whether gradients are added in the same order each time, by
            products of matrices: two operations for each number of the table and each
            index.

    Returns:
        One row for each index.

    Example:
        >>> look_up(jnp.arange(6.0).reshape(3, 2), jnp.array([2, 0])).tolist()
        [[4.0, 5.0], [0.0, 1.0]]
    """
    found = table[indices]
    return jnp.where(_are_rows(table, indices)[..., None], found, jnp.zeros_like(found))


def _are_rows(table, indices):
    return (indices >= 0) & (indices < table.shape[0])


def _forward(table, indices, deterministic):
    return look_up(table, indices, deterministic), (table, indices)


def _backward(deterministic, residuals, grads):
    table, indices = residuals
    if deterministic:
        return _sum_by_products(table, indices, grads), None
    total = jnp.zeros(table.shape, jnp.float32)
    # JAX counts numbers below 0 from the end, and drops those beyond it.
    indices = jnp.where(_are_rows(table, indices), indices, table.shape[0])
    total = total.at[indices].add(grads.astype(jnp.float32), mode="drop")
    return total.astype(table.dtype), None


def _sum_by_products(table, indices, grads):
    num_rows, width = table.shape
    indices, grads = indices.reshape(-1), grads.reshape(-1, width)

    def some(first):
        is_row = indices[None] == first + jnp.arange(ROWS_AT_ONCE)[:, None]
        return jnp.matmul(
            is_row.astype(grads.dtype), grads, preferred_element_type=jnp.float32
        ).astype(table.dtype)

    sums = jax.lax.map(some, jnp.arange(0, num_rows, ROWS_AT_ONCE))
    return sums.reshape(-1, width)[:num_rows]


look_up.defvjp(_forward, _backward)
