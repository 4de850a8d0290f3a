"""Passes through a decoder that store keys and values, all blocks or one at a time."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from zjax.forward import run_blocks
from zjax.models.block import Block
from zjax.models.decoder import Decoder
from zjax.models.embedding import Context, Embedding
from zjax.models.heads import Head
from zjax.ops import attention, sparse

Cache = tuple[Float[Array, "B S K D"], Float[Array, "B S K D"]]
"""Keys and values of one block, for all columns to come."""
RunBlock = Callable[..., Any]
"""`run(block, attend, x, context) -> (stream, cache)`."""


def prefill(
    model: Decoder,
    tokens: Int[Array, "B L"],
    starts: Int[Array, " B"],
    *,
    num_new: int,
    padded: bool,
) -> tuple[Float[Array, "B V"], Any]:
    """Reads the prompts; returns logits after the last column, and the caches.

    Args:
        model: The decoder.
        tokens: Prompts.
        starts: First column of each prompt.
        num_new: Columns to reserve in the caches.
        padded: Whether any start is above 0.
    """

    def step(block, x, _):
        return read_prompt(block, x, context, starts, num_new, padded)

    x, context = embed(model.embedding, tokens, starts, 0)
    config = model.config
    inputs = (None,) * (config.layers_per_scan or config.num_layers)
    x, caches = _run_blocks(step, model, x, inputs)
    return score(model.head, x[:, -1:], _table(model)), caches


def decode(
    model: Decoder,
    new: Int[Array, " B"],
    starts: Int[Array, " B"],
    column: Int[Array, ""],
    caches: Any,
) -> tuple[Float[Array, "B V"], Any]:
    """Reads one more token per row; returns the next logits, and the updated caches.

    Args:
        model: The decoder.
        new: The tokens.
        starts: First column of each prompt.
        column: Column of the tokens.
        caches: Keys and values of all earlier columns.
    """

    def step(block, x, cache):
        return read_token(block, x, context, starts, column, cache)

    x, context = embed(model.embedding, new[:, None], starts, column)
    x, caches = _run_blocks(step, model, x, caches)
    return score(model.head, x, _table(model)), caches


def embed(
    embedding: Embedding,
    tokens: Int[Array, "B L"],
    starts: Int[Array, " B"],
    column: Any,
) -> tuple[Float[Array, "B L M"], Context]:
    """Embeds tokens from `column` on: the stream, and the context of the blocks."""
    columns = column + jnp.arange(tokens.shape[1], dtype=jnp.int32)
    positions = jnp.maximum(columns[None, :] - starts[:, None], 0)
    return embedding({"tokens": tokens, "positions": positions})


def read_prompt(
    block: Block,
    x: Float[Array, "B L M"],
    context: Context,
    starts: Int[Array, " B"],
    num_new: int,
    padded: bool,
    *,
    run: RunBlock = Block.attend_with,
) -> tuple[Any, Cache]:
    """Runs prompts through one block; returns the stream and the block's cache.

    Args:
        block: Block with its weights.
        x: Residual stream.
        context: Context of the blocks.
        starts: First column of each prompt.
        num_new: Columns to reserve in the cache.
        padded: Whether any start is above 0.
        run: `Block.attend_with`, or `Block.trunk_with` if tiles run separately.
    """
    visible = None
    if padded:
        columns = jnp.arange(x.shape[1], dtype=jnp.int32)[None, None, :]
        visible = columns >= starts[:, None, None]
        visible = jnp.broadcast_to(visible, (*x.shape[:2], x.shape[1]))

    def attend(q, k, v):
        if block.sparse is not None:
            outputs = _attend_to_blocks(q, k, v, block.sparse, starts, padded)
        else:
            outputs = attention.dot_product_attention(
                q,
                k,
                v,
                causal=True,
                mask=visible,
                implementation="xla" if block.implementation == "xla" else "auto",
            )
        padding = ((0, 0), (0, num_new), (0, 0), (0, 0))
        return outputs, (jnp.pad(k, padding), jnp.pad(v, padding))

    return run(block, attend, x, context)


def read_token(
    block: Block,
    x: Float[Array, "B 1 M"],
    context: Context,
    starts: Int[Array, " B"],
    column: Any,
    cache: Cache,
    *,
    run: RunBlock = Block.attend_with,
) -> tuple[Any, Cache]:
    """Runs one token per row through one block; returns stream and updated cache.

    The arguments are those of `read_prompt`, with the `column` of the tokens and the
    `cache` of all earlier ones.
    """

    def attend(q, k, v):
        keys, values = (
            jax.lax.dynamic_update_slice_in_dim(old, new, column, axis=1)
            for old, new in zip(cache, (k, v), strict=True)
        )
        # A fused kernel gains nothing for one query.
        mask = _visible_columns(starts, column, keys.shape[1])[:, None]
        if block.sparse is not None:
            mask &= _visible_in_blocks(block.sparse, starts, column, keys.shape[1])
        outputs = attention.call_jax(q, keys, values, mask=mask, implementation="xla")
        return outputs, (keys, values)

    return run(block, attend, x, context)


def score(
    head: Head, x: Float[Array, "B 1 M"], table: Float[Array, "V M"] | None
) -> Float[Array, "B V"]:
    """Logits of the next token; `table` is the token table of tied models."""
    return head.logits(x, table)[:, 0]


def _visible_columns(starts, column, num_columns) -> Bool[Array, "B 1 S"]:
    columns = jnp.arange(num_columns, dtype=jnp.int32)[None, None, :]
    return (columns >= starts[:, None, None]) & (columns <= column)


def _attend_to_blocks(q, k, v, pattern, starts, padded):
    """Rolls padding behind the prompts, as blocks count from the start of a row."""
    if not padded:
        return sparse.sparse_attention(q, k, v, pattern)
    roll = jax.vmap(functools.partial(jnp.roll, axis=0))
    q, k, v = (roll(x, -starts) for x in (q, k, v))
    return roll(sparse.sparse_attention(q, k, v, pattern), starts)


def _visible_in_blocks(pattern, starts, column, num_columns) -> Bool[Array, "B H 1 S"]:
    columns = jnp.arange(num_columns, dtype=jnp.int32)[None]
    starts = starts[:, None]
    return sparse.visible_keys(pattern, column - starts, columns - starts)


def _run_blocks(step, model, x, inputs):
    graph, blocks = nnx.split(model.blocks)

    def one(params, x, given):
        return step(nnx.merge(graph, params), x, given)

    scan_size = model.config.layers_per_scan
    return run_blocks(one, blocks, x, inputs, scan_size=scan_size)


def _table(model):
    return model.embedding.tokens[...] if model.config.tied_head else None
