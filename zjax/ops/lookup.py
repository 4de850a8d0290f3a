"""Embedding lookup with a gradient accumulated in float32."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

ROWS_AT_ONCE = 4096
"""Rows of the table per one-hot product of the deterministic gradient."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def look_up(
    table: Float[Array, "V M"], indices: Int[Array, "..."], deterministic: bool = False
) -> Float[Array, "... M"]:
    """Gathers rows of a table; indices other than 0 to V - 1 give zeros.

    The gradient is a float32 sum: a frequent token adds thousands of rows to one row,
    which would stall in bfloat16, and GPUs serialize 16-bit atomic adds. A
    `deterministic` gradient is summed in a fixed order, by one-hot products, which take
    2 V M operations per index.
    """
    rows = table[indices]
    return jnp.where(_are_rows(table, indices)[..., None], rows, jnp.zeros_like(rows))


def _are_rows(table, indices):
    return (indices >= 0) & (indices < table.shape[0])


def _forward(table, indices, deterministic):
    return look_up(table, indices, deterministic), (table, indices)


def _backward(deterministic, residuals, grads):
    """Adds cotangents to the rows of the table, in any order or by products."""
    table, indices = residuals
    if deterministic:
        return _sum_by_products(table, indices, grads), None
    total = jnp.zeros(table.shape, jnp.float32)
    # JAX wraps negative indices, but drops indices beyond the end.
    indices = jnp.where(_are_rows(table, indices), indices, table.shape[0])
    total = total.at[indices].add(grads.astype(jnp.float32), mode="drop")
    return total.astype(table.dtype), None


def _sum_by_products(table, indices, grads):
    """Sums cotangents by row in a fixed order, as products with one-hot matrices."""
    num_rows, width = table.shape
    indices, grads = indices.reshape(-1), grads.reshape(-1, width)

    def sum_rows(first):
        is_row = indices[None] == first + jnp.arange(ROWS_AT_ONCE)[:, None]
        return jnp.matmul(
            is_row.astype(grads.dtype), grads, preferred_element_type=jnp.float32
        ).astype(table.dtype)

    # In chunks: one one-hot matrix of the table would be V by all tokens.
    sums = jax.lax.map(sum_rows, jnp.arange(0, num_rows, ROWS_AT_ONCE))
    return sums.reshape(-1, width)[:num_rows]


look_up.defvjp(_forward, _backward)
