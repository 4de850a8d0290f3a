"""Prefill and decode passes of a decoder with a KV cache, and sampling of tokens."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from zjax.models.block import Block
from zjax.models.embedding import Context, Embedding
from zjax.models.heads import Head
from zjax.models.layers import Stored
from zjax.models.segments import BlockGroup, layers_of, segments_of
from zjax.models.stack import Decoder, execution_of
from zjax.ops import attention, sparse
from zjax.settings.mixture import segment_shapes
from zjax.sharding.layers import read_layer
from zjax.stack.forward import run_blocks


def sample_tokens(
    logits: Float[Array, "B V"],
    key: jax.Array,
    *,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
) -> Int[Array, " B"]:
    """Chooses one token per row.

    Row b draws with `fold_in(key, b)`. Temperature 0 takes the most likely token and
    reads no key; `top_k` of 0 and `top_p` of 1 draw from all tokens.

    Example:
        >>> sample_tokens(jnp.array([[0.0, 2.0, 1.0]]), jax.random.key(0),
        ...               temperature=0.0).tolist()
        [1]

    Reference:
        top-p: Holtzman et al. (arXiv:1904.09751).
    """
    if temperature == 0.0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    scores = logits.astype(jnp.float32) / temperature
    if top_k > 0:
        scores = _trim(scores, jax.lax.top_k(scores, top_k)[0][:, -1:])
    if top_p < 1.0:
        ranked = jnp.flip(jnp.sort(scores, axis=-1), axis=-1)
        likelihoods = jax.nn.softmax(ranked, axis=-1)
        # The mass before a token: the most likely token stays even if it exceeds
        # `top_p`.
        mass_above = jnp.cumsum(likelihoods, axis=-1) - likelihoods
        candidates = jnp.where(mass_above < top_p, ranked, jnp.inf)
        scores = _trim(scores, candidates.min(axis=-1, keepdims=True))
    rows = jnp.arange(scores.shape[0])
    # By row, so that a draw does not depend on the other rows or on devices.
    keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(rows)
    return jax.vmap(jax.random.categorical)(keys, scores).astype(jnp.int32)


def _trim(scores, minimum):
    """Sets scores below a minimum to -inf."""
    return jnp.where(scores >= minimum, scores, -jnp.inf)


Cache = tuple[Stored, ...]
"""Keys and values of each layer of a block, with columns for all tokens to come."""
RunLayer = Callable[..., Any]
"""`run(layer, attend, x, context) -> (stream, keys and values)`."""


def prefill(
    model: Decoder,
    tokens: Int[Array, "B L"],
    starts: Int[Array, " B"],
    *,
    num_new: int,
    padded: bool,
) -> tuple[Float[Array, "B V"], Any]:
    """Runs the prompts through the decoder; returns next logits and caches.

    Prompts begin at columns `starts`, above 0 for some row if `padded`. The caches have
    room for `num_new` more columns.
    """

    def step(block, x, _):
        return read_prompt(block, x, context, starts, num_new, padded)

    num_columns = tokens.shape[1] + num_new
    x, context = embed(model.embedding, tokens, starts, 0, num_columns)
    x, caches = _run_blocks(step, model, x)
    return score(model.head, x[:, -1:], _table(model)), caches


def decode(
    model: Decoder,
    new: Int[Array, " B"],
    starts: Int[Array, " B"],
    column: Int[Array, ""],
    caches: Any,
    *,
    num_columns: int,
) -> tuple[Float[Array, "B V"], Any]:
    """Runs token `new` of each row at `column`; returns next logits and new caches.

    `num_columns` counts prompts and all tokens to come.
    """

    def step(block, x, cache):
        return read_token(block, x, context, starts, column, cache)

    x, context = embed(model.embedding, new[:, None], starts, column, num_columns)
    x, caches = _run_blocks(step, model, x, caches)
    return score(model.head, x, _table(model)), caches


def embed(
    embedding: Embedding,
    tokens: Int[Array, "B L"],
    starts: Int[Array, " B"],
    column: Any,
    num_columns: Any,
) -> tuple[Float[Array, "B L M"], Context]:
    """Embeds tokens from `column` on; returns the stream and the blocks' context.

    Rotations that depend on the length of a row take the length of the whole text of
    `num_columns`, so that all keys of a cache rotate alike.
    """
    columns = column + jnp.arange(tokens.shape[1], dtype=jnp.int32)
    # Padding before a prompt would have positions below 0; no token sees it.
    positions = jnp.maximum(columns[None, :] - starts[:, None], 0)
    batch = {"tokens": tokens, "positions": positions}
    return embedding({**batch, "num_tokens": num_columns - starts})


def read_prompt(
    block: Block | BlockGroup,
    x: Float[Array, "B L M"],
    context: Context,
    starts: Int[Array, " B"],
    num_new: int,
    padded: bool,
    *,
    run: RunLayer = Block.continue_with,
) -> tuple[Any, Cache]:
    """Runs prompts through one block; returns the stream and the block's cache.

    `run` is `Block.continue_with`, or `Block.trunk_with` if tiles run separately.
    """
    visible = None
    if padded:
        columns = jnp.arange(x.shape[1], dtype=jnp.int32)[None, None, :]
        visible = columns >= starts[:, None, None]
        visible = jnp.broadcast_to(visible, (*x.shape[:2], x.shape[1]))

    def attend(layer, q, k, v, stored):
        if layer.sparse is not None:
            outputs = _attend_to_blocks(q, k, v, layer.sparse, starts, padded)
        else:
            outputs = attention.dot_product_attention(
                q,
                k,
                v,
                causal=True,
                mask=visible,
                bounds=layer.bounds,
                sinks=layer.attention.laid_sinks(),
                implementation="xla" if layer.implementation == "xla" else "auto",
            )
        # Room for all columns at once: shapes stay equal for every token.
        padding = ((0, 0), (0, num_new), (0, 0), (0, 0))
        return outputs, tuple(jnp.pad(x, padding) for x in stored)

    cache = []
    for layer in layers_of(block):
        x, stored = run(layer, functools.partial(attend, layer), x, context)
        cache.append(stored)
    return x, tuple(cache)


def read_token(
    block: Block | BlockGroup,
    x: Float[Array, "B 1 M"],
    context: Context,
    starts: Int[Array, " B"],
    column: Any,
    cache: Cache,
    *,
    run: RunLayer = Block.continue_with,
) -> tuple[Any, Cache]:
    """Runs one token per row through one block; returns stream and updated cache.

    Arguments are as of `read_prompt`, with the tokens' `column` and the `cache` of all
    earlier columns.
    """

    def attend(layer, earlier, q, k, v, stored):
        stored = tuple(
            jax.lax.dynamic_update_slice_in_dim(old, new, column, axis=1)
            for old, new in zip(earlier, stored, strict=True)
        )
        # A latent cache is one array, which serves as keys and values.
        keys, values = stored[0], stored[-1]
        # A fused kernel gains nothing for one query.
        window = layer.bounds.window or keys.shape[1]
        mask = _visible_columns(starts, column, keys.shape[1], window)[:, None]
        if layer.sparse is not None:
            mask &= _visible_in_blocks(layer.sparse, starts, column, keys.shape[1])
        bounds = layer.bounds._replace(window=0)  # the mask has it
        options = {"sinks": layer.attention.laid_sinks(), "implementation": "xla"}
        outputs = attention.call_jax(q, keys, values, bounds, mask=mask, **options)
        return outputs, stored

    updated = []
    for layer, stored in zip(layers_of(block), cache, strict=True):
        x, stored = run(layer, functools.partial(attend, layer, stored), x, context)
        updated.append(stored)
    return x, tuple(updated)


def score(
    head: Head, x: Float[Array, "B 1 M"], table: Float[Array, "V M"] | None
) -> Float[Array, "B V"]:
    """Returns logits of the next token; `table` is the token table of tied models."""
    return head.logits(x, table)[:, 0]


def _visible_columns(starts, column, num_columns, window) -> Bool[Array, "B 1 S"]:
    """Mask of the columns that the token at `column` sees."""
    columns = jnp.arange(num_columns, dtype=jnp.int32)[None, None, :]
    first = jnp.maximum(starts, column + 1 - window)
    return (columns >= first[:, None, None]) & (columns <= column)


def _attend_to_blocks(q, k, v, pattern, starts, padded):
    """Runs sparse attention with padding rolled behind the prompts."""
    if not padded:
        return sparse.sparse_attention(q, k, v, pattern)
    # Blocks of the layout count from the start of a row.
    roll = jax.vmap(functools.partial(jnp.roll, axis=0))
    q, k, v = (roll(x, -starts) for x in (q, k, v))
    return roll(sparse.sparse_attention(q, k, v, pattern), starts)


def _visible_in_blocks(pattern, starts, column, num_columns) -> Bool[Array, "B H 1 S"]:
    """Mask of the columns in live blocks of the token at `column`."""
    columns = jnp.arange(num_columns, dtype=jnp.int32)[None]
    starts = starts[:, None]
    return sparse.visible_keys(pattern, column - starts, columns - starts)


def _run_blocks(step, model, x, caches=None):
    """Runs all blocks; each segment has caches in the form of `run_blocks`."""
    execution, results = execution_of(model.config), []
    shapes = segment_shapes(model.config)
    for number, blocks in enumerate(segments_of(model.blocks).values()):
        graph, params = nnx.split(blocks)
        size = execution.scan_size(shapes[number].num_blocks)
        empty = (None,) * (size or shapes[number].num_blocks)

        def one(params, x, given, graph=graph):
            return step(nnx.merge(graph, read_layer(params)), x, given)

        inputs = empty if caches is None else caches[number]
        x, outputs = run_blocks(one, params, x, inputs, scan_size=size)
        results.append(outputs)
    return x, tuple(results)


def _table(model):
    return model.embedding.tokens[...] if model.config.tied_head else None
