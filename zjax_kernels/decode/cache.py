"""Writes of keys or values to the pages of a cache."""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax


def write_pages(
    pool: Array, new: Array, pages: Array, starts: Array, counts: Array
) -> Array:
    """Writes the keys or values of tokens to the pages of rows.

    The pool is updated in place where a jitted function donates the pool. No chunk
    writes where another does.

    Args:
        pool: [N, KV, page size, D] keys or values of all rows.
        new: [C, T, KV, D] keys or values of chunks, cast to the dtype of the pool. In
            float8_e4m3fn, magnitudes beyond 448, the largest, become 448.
        pages: int32[C, P], pages of the row of each chunk, in order. Page 0 belongs to
            no row.
        starts: int32[C], position of the first token of each chunk in the row.
        counts: int32[C], tokens of each chunk that are written, 0 to T.

    Returns:
        [N, KV, page size, D] in the dtype of `pool`.

    Example:
        >>> pool, new = jnp.zeros((3, 1, 2, 1)), jnp.ones((1, 2, 1, 1))
        >>> pages, starts, counts = jnp.array([[2, 1]]), jnp.array([1]), jnp.array([2])
        >>> write_pages(pool, new, pages, starts, counts).reshape(3, 2).tolist()
        [[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]]

    Reference:
        Kwon et al., PagedAttention (arXiv:2309.06180), section 4.3.
    """
    num_pages, _, page_size, _ = pool.shape
    tokens = jnp.arange(new.shape[1])[None]
    positions = starts[:, None] + tokens
    found = jnp.take_along_axis(pages, positions // page_size, axis=1, mode="clip")
    # Places beyond the pool are dropped; each is another, as the hint promises.
    beyond = num_pages + jnp.arange(positions.size).reshape(positions.shape)
    found = jnp.where(tokens < counts[:, None], found, beyond)
    places = jnp.stack([found, positions % page_size], axis=-1)[:, :, None]
    return lax.scatter(
        pool,
        jnp.broadcast_to(places, (*new.shape[:3], 2)),
        _cast(new, pool.dtype),
        _PER_HEAD,
        unique_indices=True,
        mode="drop",
    )


def _cast(new: Array, dtype: Any) -> Array:
    """Casts numbers to the dtype of a pool; without infinities, large ones saturate."""
    limits = jnp.finfo(dtype)
    if limits.bits == 8:
        largest = limits.max.astype(new.dtype)
        new = jnp.clip(new, -largest, largest)
    return new.astype(dtype)


_PER_HEAD = lax.ScatterDimensionNumbers(
    update_window_dims=(3,),
    inserted_window_dims=(0, 2),
    scatter_dims_to_operand_dims=(0, 2),
    # A batch of heads, which the compiler splits over devices where indices of heads
    # would be gathered; and a slice of heads would transpose the pool.
    operand_batching_dims=(1,),
    scatter_indices_batching_dims=(2,),
)
