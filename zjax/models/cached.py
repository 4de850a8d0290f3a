"""Blocks with a KV cache, and sampling of tokens."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from zjax.models.block import Block, BlockGroup, layers_of
from zjax.models.embedding import Context, Embedding
from zjax.models.heads import Head
from zjax.models.layers import Stored
from zjax.ops import attention, sparse
from zjax.sharding import mesh as meshes
from zjax.sharding.activations import head_axes, pin_rows
from zjax.typing import Columns


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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values of one layer, with a column for each token of the text.

    No other code knows the layout, the dtype or the sharding: [B, S, heads, channels]
    each in the dtype of the keys; rows split over the batch axes of the mesh in use,
    heads over the tensor and sequence axes.

    Args:
        stored: Keys and values; one array of latents serves as both.
    """

    stored: tuple[Any, ...]

    @classmethod
    def empty(cls, like: Stored, num_columns: int) -> "Cache":
        """Makes a cache of zeros with room for all columns of a text."""
        # All columns at once: shapes stay equal for every token.
        shapes = [(x.shape[0], num_columns, *x.shape[2:]) for x in like]
        pairs = zip(shapes, like, strict=True)
        return cls(tuple(jnp.zeros(shape, x.dtype) for shape, x in pairs))

    def append(self, new: Stored, first: Any) -> "Cache":
        """Returns the cache with new columns from column `first` on."""
        pairs = zip(self.stored, new, strict=True)
        return Cache(
            tuple(
                # Pinned, as the compiler may replicate what a loop carries.
                pin_rows(
                    jax.lax.dynamic_update_slice_in_dim(old, x, first, axis=1),
                    None,
                    meshes.entry(head_axes(x.shape[2])),
                )
                for old, x in pairs
            )
        )

    def read(self) -> tuple[jax.Array, jax.Array]:
        """Returns keys and values of all columns, [B, S, heads, channels]."""
        return self.stored[0], self.stored[-1]


RunLayer = Callable[..., Any]
"""`run(layer, attend, x, context) -> (stream, results of attend)`."""


def embed(
    embedding: Embedding, tokens: Int[Array, "B L"], columns: Columns
) -> tuple[Float[Array, "B L M"], Context]:
    """Embeds the tokens of a pass; returns the stream and the blocks' context.

    Rotations that depend on the length of a row take the length of the whole text, so
    that all keys of a cache rotate alike.
    """
    starts = columns.starts_of(tokens.shape[0])
    numbers = columns.first + jnp.arange(tokens.shape[1], dtype=jnp.int32)
    # Padding before a prompt would have positions below 0; no token sees it.
    positions = jnp.maximum(numbers[None, :] - starts[:, None], 0)
    batch = {"tokens": pin_rows(tokens), "positions": positions}
    # In order, as a cache attends by columns: rings of training permute the tokens.
    config = dataclasses.replace(embedding.config, sequence_attention="ulysses")
    embedding.config = config
    return embedding({**batch, "num_tokens": columns.num_columns - starts})


def run_cached(
    block: Block | BlockGroup,
    x: Float[Array, "B L M"],
    context: Context,
    columns: Columns,
    caches: tuple[Cache, ...] | None,
    *,
    run: RunLayer = Block.continue_with,
) -> tuple[Any, tuple[Cache, ...]]:
    """Runs the columns of a pass through one block; returns stream and new caches.

    `caches` has one cache per layer of the block, None in the pass of the prompts.
    `run` is `Block.continue_with`, or `Block.trunk_with` if tiles run separately.
    """
    updated = []
    for number, layer in enumerate(layers_of(block)):
        if caches is None:
            attend = functools.partial(_attend_to_prompt, layer, columns)
        else:
            attend = functools.partial(_attend_to_cache, layer, columns, caches[number])
        x, cache = run(layer, attend, x, context)
        updated.append(cache)
    return x, tuple(updated)


def _attend_to_prompt(
    layer: Block, columns: Columns, q: Any, k: Any, v: Any, stored: Stored
) -> tuple[jax.Array, Cache]:
    """Attends within prompts, by the kernels of training; returns outputs and cache."""
    cache = Cache.empty(stored, columns.num_columns).append(stored, 0)
    if layer.sparse is not None:
        return _attend_to_blocks(q, k, v, layer.sparse, columns.starts), cache
    visible = None
    if columns.starts is not None:
        numbers = jnp.arange(q.shape[1], dtype=jnp.int32)[None, None, :]
        visible = numbers >= columns.starts[:, None, None]
        visible = jnp.broadcast_to(visible, (*q.shape[:2], q.shape[1]))
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
    return outputs, cache


def _attend_to_cache(
    layer: Block, columns: Columns, cache: Cache, q: Any, k: Any, v: Any, stored: Stored
) -> tuple[jax.Array, Cache]:
    """Attends from one column to the cache; returns outputs and the updated cache."""
    column, starts = columns.first, columns.starts_of(q.shape[0])
    cache = cache.append(stored, column)
    window = layer.bounds.window or columns.num_columns
    mask = _visible_columns(starts, column, columns.num_columns, window)[:, None]
    if layer.sparse is not None:
        mask &= _visible_in_blocks(layer.sparse, starts, column, columns.num_columns)
    # A fused kernel gains nothing for one query, and the mask has the window.
    outputs = attention.call_jax(
        q,
        *cache.read(),
        layer.bounds._replace(window=0),
        mask=mask,
        sinks=layer.attention.laid_sinks(),
        implementation="xla",
    )
    return outputs, cache


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


def _attend_to_blocks(q, k, v, pattern, starts):
    """Runs sparse attention with padding rolled behind the prompts."""
    if starts is None:
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
