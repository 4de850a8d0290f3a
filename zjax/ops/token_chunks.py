"""Chunks of the tokens of each device, to bound the logits in memory."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from zjax.ops import invariant_layers

FROM_LOGITS = "from_logits"
"""`checkpoint_name` of what a forward pass computes from logits. All policies of
`zjax.ops.remat` save it: else the products with the vocabulary would run twice."""


def split_chunks(
    tokens: Shaped[Array, "B L *dims"],
    *,
    num_shards: tuple[int, int],
    chunk_tokens: int,
) -> Shaped[Array, "C P R K *dims"]:
    """Reshapes [B, L, ...] to [chunks, shards, rows, columns, ...], padded with zeros.

    Each chunk takes part of the tokens of every device; chunks of the batch or of the
    global sequence would leave most devices idle.
    """
    num_rows, length, *rest = tokens.shape
    rows, length = num_rows // num_shards[0], length // num_shards[1]
    tokens = tokens.reshape(num_shards[0], rows, num_shards[1], length, *rest)
    tokens = tokens.swapaxes(1, 2).reshape(-1, rows, length, *rest)
    num_chunks = -(-length // max(1, chunk_tokens // rows)) if chunk_tokens else 1
    columns = -(-length // num_chunks)
    num_padding = num_chunks * columns - length
    padding = [(0, 0), (0, 0), (0, num_padding)] + [(0, 0)] * len(rest)
    shape = (*tokens.shape[:2], num_chunks, columns, *rest)
    return jnp.moveaxis(jnp.pad(tokens, padding).reshape(shape), 2, 0)


def join_chunks(
    chunks: Shaped[Array, "C P R K *dims"],
    shape: tuple[int, int],
    *,
    num_shards: tuple[int, int],
) -> Shaped[Array, "B L *dims"]:
    """Undoes `split_chunks`, for tokens of `shape` [B, L].

    Example:
        >>> x = jnp.arange(10).reshape(2, 5)
        >>> chunks = split_chunks(x, num_shards=(2, 1), chunk_tokens=2)
        >>> chunks.shape, join_chunks(chunks, (2, 5), num_shards=(2, 1)).tolist()
        ((3, 2, 1, 2), [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]])
    """
    num_rows, length = shape[0] // num_shards[0], shape[1] // num_shards[1]
    dims = chunks.shape[4:]
    tokens = jnp.moveaxis(chunks, 0, 2).reshape(
        -1, num_rows, chunks.shape[0] * chunks.shape[3], *dims
    )
    tokens = tokens[:, :, :length].reshape(*num_shards, num_rows, length, *dims)
    return tokens.swapaxes(1, 2).reshape(*shape, *dims)


def over_chunks(
    add_chunk: Callable[[Any, Any], tuple[Any, Any]], sums: Any, chunks: Any
) -> tuple[Any, Any]:
    """Adds up the sums of all chunks, and stacks the outputs of the chunks."""
    outputs = []
    for number in range(jax.tree.leaves(chunks)[0].shape[0]):
        chunk = jax.tree.map(lambda x, row=number: x[row], chunks)
        # Unrolled and ordered by barriers: out of a loop XLA would hoist constants as
        # large as the logits.
        before = sums, outputs[-1:]
        (sums, outputs[-1:]), chunk = jax.lax.optimization_barrier((before, chunk))
        sums, output = add_chunk(sums, chunk)
        outputs.append(output)
    return sums, jax.tree.map(lambda *rows: jnp.stack(rows), *outputs)


def logits_of(
    hidden: Float[Array, "*S M"], head: Float[Array, "V M"], *, invariant: bool = False
) -> Float[Array, "*S V"]:
    """Multiplies states by the rows of a head, in float32.

    With `invariant`, the logits of a state are the same bits beside any states.

    Example:
        >>> logits_of(jnp.ones((1, 2)), jnp.ones((3, 2))).tolist()
        [[2.0, 2.0, 2.0]]
    """
    if invariant:
        return invariant_layers.logits(hidden, head)
    # Products of bfloat16 are summed in float32: the softmax needs the digits.
    return float32_einsum("...m,vm->...v", hidden, head)


def float32_einsum(
    equation: str, *operands: Float[Array, "..."]
) -> Float[Array, "..."]:
    """Computes an einsum whose sums are float32."""
    return jnp.einsum(equation, *operands, preferred_element_type=jnp.float32)
