"""Functions of tokens, applied to some tokens of each device at a time."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from zjax.parallel import tensor
from zjax.sharding import mesh as meshes
from zjax.sharding.activations import row_axes


def by_chunks(
    run: Callable[[jax.Array], jax.Array],
    x: Float[Array, "B L M"],
    chunk_tokens: int,
) -> Float[Array, "B L M"]:
    """Applies a function of each token chunk by chunk, recomputed in the backward pass.

    Residuals of the function then exist for one chunk alone. Each chunk takes part of
    the tokens of every device, at most `chunk_tokens`; 0 takes all tokens.

    Example:
        >>> x = jnp.arange(6.0).reshape(1, 3, 2)
        >>> by_chunks(lambda part: 2 * part, x, 2).tolist()
        [[[0.0, 2.0], [4.0, 6.0], [8.0, 10.0]]]

    Reference:
        Arctic Long Sequence Training (arXiv:2506.13996, section 3.1).
    """
    num_rows, length, size = x.shape
    mesh = jax.sharding.get_abstract_mesh()
    rows = num_rows // meshes.num_shares(mesh, row_axes(num_rows))
    shards = meshes.num_shares(mesh, tensor.axes_of_length(x))
    columns = length // shards
    num_chunks = count_chunks(rows, columns, chunk_tokens)
    if num_chunks == 1:
        return run(x)
    width = math.ceil(columns / num_chunks)
    padding = num_chunks * width - columns
    # Chunks cut the local tokens of each device, or tokens would move between devices.
    x = x.reshape(num_rows, shards, columns, size)
    x = jnp.pad(x, [(0, 0), (0, 0), (0, padding), (0, 0)])
    x = x.reshape(num_rows, shards, num_chunks, width, size)
    chunks = jnp.moveaxis(x, 2, 0).reshape(num_chunks, num_rows, -1, size)
    # Else the map would stack the residuals of all chunks.
    y: Any = jax.lax.map(jax.checkpoint(run), chunks)
    y = y.reshape(num_chunks, num_rows, shards, width, size)
    y = jnp.moveaxis(y, 0, 2).reshape(num_rows, shards, -1, size)
    return y[:, :, :columns].reshape(num_rows, length, size)


def count_chunks(rows: int, columns: int, chunk_tokens: int) -> int:
    """Number of chunks of the tokens of a device; `columns` are tokens per row.

    Example:
        >>> [count_chunks(2, 8, n) for n in (0, 16, 8, 1)]
        [1, 1, 2, 8]
    """
    return -(-columns // max(1, chunk_tokens // rows)) if chunk_tokens else 1
