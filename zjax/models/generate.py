"""Text from a decoder: the prompt in one pass, then token by token from a cache.

Both passes are one compiled program; a new one is compiled for another shape of the
prompt or other settings, never per token.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from zjax.errors import ConfigError, Problem
from zjax.models.block import run_blocks
from zjax.models.decoder import Decoder
from zjax.models.sampling import sample_tokens
from zjax.ops import attention


class _Settings(NamedTuple):
    num_new: int
    temperature: float
    top_k: int
    top_p: float
    end_id: int


def generate(
    model: Decoder,
    tokens: Int[Array, "B L"],
    *,
    max_new_tokens: int,
    lengths: Int[Array, " B"] | None = None,
    key: jax.Array | None = None,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    end_id: int = -1,
) -> Int[Array, "B total"]:
    """Continues prompts.

    Args:
        model: The decoder, with its weights in the dtype to compute in.
        tokens: Prompts, padded on the left where they differ in length.
        max_new_tokens: Tokens to add, 1 or more.
        lengths: Tokens of each prompt without its padding, 1 to L; L by default.
        key: Random key, needed above temperature 0. The draw of a row depends on the
            key, the row's number and the position, not on devices.
        temperature: 0 takes the most likely token; above 0 divides the scores.
        top_k: Draws among the k most likely tokens; 0 among all.
        top_p: Draws among the fewest tokens whose probabilities reach this sum.
        end_id: Token that ends a row, which is then filled with it; -1 for none.

    Returns:
        Prompts and continuations, int32[B, L + max_new_tokens].

    Raises:
        ConfigError: A setting out of range, or no room for the tokens.

    Example:
        >>> from zjax.config import schema
        >>> config = schema.Model(num_layers=1, embed_size=8, mlp_size=16, num_heads=2,
        ...                       num_kv_heads=2, vocab_size=11, max_length=8)
        >>> decoder = Decoder(config, rngs=nnx.Rngs(0))
        >>> generate(decoder, jnp.array([[3, 1]]), max_new_tokens=4).shape
        (1, 6)
    """
    settings = _Settings(max_new_tokens, temperature, top_k, top_p, end_id)
    _check(model, tokens.shape[1], settings, key)
    key = jax.random.key(0) if key is None else key
    graph, state = nnx.split(model)
    return _generate(state, tokens, lengths, key, graph=graph, settings=settings)


@functools.partial(jax.jit, static_argnames=("graph", "settings"))
def _generate(state, tokens, lengths, key, *, graph, settings: _Settings):
    model = nnx.merge(graph, state)
    num_rows, length = tokens.shape
    starts = jnp.zeros(num_rows, jnp.int32) if lengths is None else length - lengths
    logits, caches = prefill(
        model, tokens, starts, room=settings.num_new, padded=lengths is not None
    )
    filler = jnp.full((num_rows, settings.num_new), max(settings.end_id, 0), jnp.int32)
    output = jnp.concatenate([tokens.astype(jnp.int32), filler], axis=1)
    ended = jnp.zeros(num_rows, bool)

    def choose(logits, column, output, ended):
        new = sample_tokens(
            logits,
            jax.random.fold_in(key, column),
            temperature=settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
        )
        new = jnp.where(ended, settings.end_id, new)
        output = jax.lax.dynamic_update_slice(output, new[:, None], (0, column))
        return new, output, ended | (new == settings.end_id)

    def unfinished(carry):
        column, _, _, ended, _ = carry
        return (column < length + settings.num_new) & ~ended.all()

    def add_token(carry):
        column, new, output, ended, caches = carry
        logits, caches = decode(model, new, starts, column - 1, caches)
        new, output, ended = choose(logits, column, output, ended)
        return column + 1, new, output, ended, caches

    new, output, ended = choose(logits, length, output, ended)
    carry = jnp.int32(length + 1), new, output, ended, caches
    return jax.lax.while_loop(unfinished, add_token, carry)[2]


def prefill(
    model: Decoder,
    tokens: Int[Array, "B L"],
    starts: Int[Array, " B"],
    *,
    room: int,
    padded: bool,
) -> tuple[Float[Array, "B V"], Any]:
    """Reads whole prompts.

    Args:
        model: The decoder.
        tokens: Prompts.
        starts: First column of each prompt.
        room: Columns to keep free in the caches.
        padded: Whether any start is above 0.

    Returns:
        Scores after the last column, and the caches: keys and values per layer, or per
        layer of a turn.
    """
    columns = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    visible = None
    if padded:
        visible = columns[:, None, :] >= starts[:, None, None]
        visible = jnp.broadcast_to(visible, (*tokens.shape, tokens.shape[1]))

    def step(block, x, _):
        def attend(q, k, v):
            averages = attention.dot_product_attention(
                q,
                k,
                v,
                causal=True,
                mask=visible,
                implementation="xla" if model.config.attention == "xla" else "auto",
            )
            free = ((0, 0), (0, room), (0, 0), (0, 0))
            return averages, (jnp.pad(k, free), jnp.pad(v, free))

        return block.attend_with(attend, x, context)

    positions = jnp.maximum(columns - starts[:, None], 0)
    x, context = model.embedding({"tokens": tokens, "positions": positions})
    config = model.config
    inputs = (None,) * (config.layers_per_scan or config.num_layers)
    x, caches = run_blocks(step, model.blocks, x, inputs, config=config)
    return _scores(model, x[:, -1:]), caches


def decode(
    model: Decoder,
    new: Int[Array, " B"],
    starts: Int[Array, " B"],
    column: Int[Array, ""],
    caches: Any,
) -> tuple[Float[Array, "B V"], Any]:
    """Reads one more token per row.

    Args:
        model: The decoder.
        new: The tokens.
        starts: First column of each prompt.
        column: Where the tokens stand.
        caches: Of all columns before.

    Returns:
        Scores of the next tokens, and the caches with this column.
    """

    def step(block, x, cache):
        def attend(q, k, v):
            at = (0, column, 0, 0)
            keys = jax.lax.dynamic_update_slice(cache[0], k, at)
            values = jax.lax.dynamic_update_slice(cache[1], v, at)
            # One query has nothing to gain from a fused kernel.
            mask = _seen(starts, column, keys.shape[1])
            averages = jax.nn.dot_product_attention(
                q, keys, values, mask=mask[:, None], implementation="xla"
            )
            return averages, (keys, values)

        return block.attend_with(attend, x, context)

    batch = {"tokens": new[:, None], "positions": (column - starts)[:, None]}
    x, context = model.embedding(batch)
    x, caches = run_blocks(step, model.blocks, x, caches, config=model.config)
    return _scores(model, x), caches


def _seen(starts, column, num_columns) -> Bool[Array, "B 1 S"]:
    columns = jnp.arange(num_columns, dtype=jnp.int32)[None, None, :]
    return (columns >= starts[:, None, None]) & (columns <= column)


def _scores(model, x):
    table = model.embedding.tokens[...] if model.config.tied_head else None
    return model.head.logits(x, table)[:, 0]


def _check(model, length, settings, key):
    problems = []
    if settings.num_new < 1:
        problem = "is below 1"
        remedy = "ask for 1 or more"
        problems.append(Problem("max_new_tokens", settings.num_new, problem, remedy))
    if settings.temperature < 0:
        remedy = "use 0 for the most likely token, or above 0"
        problem = "is negative"
        problems.append(Problem("temperature", settings.temperature, problem, remedy))
    if settings.temperature > 0 and key is None:
        problem = f"is missing and temperature={settings.temperature} draws tokens"
        problems.append(Problem("key", key, problem, "pass jax.random.key(0)"))
    vocab_size = model.config.vocab_size
    if not 0 <= settings.top_k <= vocab_size:
        problem = f"is not between 0 and model.vocab_size={vocab_size}"
        problems.append(Problem("top_k", settings.top_k, problem, "use 0 for all"))
    if not 0 < settings.top_p <= 1:
        problem = "is not above 0 and up to 1"
        problems.append(Problem("top_p", settings.top_p, problem, "use 1 for all"))
    room = model.config.max_length - length
    if model.config.positions == "learned" and settings.num_new > room:
        problem = f"leaves model.max_length={model.config.max_length} after {length}"
        remedy = f"ask for {max(room, 0)} or fewer, or shorten the prompt"
        problems.append(Problem("max_new_tokens", settings.num_new, problem, remedy))
    if problems:
        raise ConfigError(*problems)
