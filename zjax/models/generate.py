"""Text generation: the prompt in one pass, then token by token from a cache.

Everything is one compiled program per prompt shape and settings. For offloaded blocks,
`zjax.offload.generate` makes the same passes one block at a time.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from zjax.config import schema
from zjax.config.mixture import sees_future
from zjax.config.ranges import MAX_TOKENS
from zjax.errors import ConfigError, Problem
from zjax.models.cached import decode, prefill
from zjax.models.decoder import Decoder
from zjax.models.sampling import sample_tokens
from zjax.promotion import dtype_promotion


class Settings(NamedTuple):
    """Arguments of `generate`."""

    max_new_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    end_id: int = -1


class Text(NamedTuple):
    """Text being generated."""

    tokens: Int[Array, "B total"]
    """Prompts and continuations so far; the end id, or 0, elsewhere."""
    new: Int[Array, " B"]
    """The last token of each row."""
    ended: Bool[Array, " B"]
    """Whether a row has ended."""


@dtype_promotion()
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
        model: Decoder, with its weights in the dtype to compute in.
        tokens: Prompts, padded on the left if they differ in length.
        max_new_tokens: Tokens to add, 1 or more.
        lengths: Tokens of each prompt without its padding, 1 to L; None is L.
        key: Random key, needed above temperature 0. The draw of a row depends on the
            key, the row's number and the position, not on devices.
        temperature: Divisor of the logits; 0 takes the most likely token.
        top_k: Number of most likely tokens to draw from; 0 is all.
        top_p: Probability mass of the most likely tokens to draw from.
        end_id: Token that ends a row, which is then filled with it; -1 is none.

    Returns:
        Prompts and continuations, int32[B, L + max_new_tokens].

    Raises:
        ConfigError: A setting is out of range, or the tokens exceed the model's length.

    Example:
        >>> from zjax.config import schema
        >>> config = schema.Model(num_layers=1, embed_size=8, mlp_size=16, num_heads=2,
        ...                       num_kv_heads=2, vocab_size=11, max_length=8)
        >>> decoder = Decoder(config, rngs=nnx.Rngs(0))
        >>> generate(decoder, jnp.array([[3, 1]]), max_new_tokens=4).shape
        (1, 6)
    """
    settings = Settings(max_new_tokens, temperature, top_k, top_p, end_id)
    check(model.config, tokens.shape[1], settings, key)
    key = jax.random.key(0) if key is None else key
    graph, state = nnx.split(model)
    return _generate(state, tokens, lengths, key, graph=graph, settings=settings)


@functools.partial(jax.jit, static_argnames=("graph", "settings"))
def _generate(state, tokens, lengths, key, *, graph, settings: Settings):
    model = nnx.merge(graph, state)
    length, num_new = tokens.shape[1], settings.max_new_tokens
    starts, text = start_text(tokens, lengths, settings)
    padded = lengths is not None
    logits, caches = prefill(model, tokens, starts, num_new=num_new, padded=padded)
    text = add_token(text, logits, key, length, settings)

    def is_unfinished(carry):
        column, text, _ = carry
        return (column < length + num_new) & ~text.ended.all()

    def write(carry):
        column, text, caches = carry
        given = model, text.new, starts, column - 1, caches
        logits, caches = decode(*given, num_columns=length + num_new)
        return column + 1, add_token(text, logits, key, column, settings), caches

    carry = jnp.int32(length + 1), text, caches
    return jax.lax.while_loop(is_unfinished, write, carry)[1].tokens


def start_text(
    tokens: Int[Array, "B L"], lengths: Int[Array, " B"] | None, settings: Settings
) -> tuple[Int[Array, " B"], Text]:
    """Allocates the text; returns the first column of each prompt, and the text.

    Prompts are padded on the left; `lengths` counts their tokens without padding.
    """
    num_rows, length = tokens.shape
    starts = jnp.zeros(num_rows, jnp.int32) if lengths is None else length - lengths
    shape = (num_rows, settings.max_new_tokens)
    filler = jnp.full(shape, max(settings.end_id, 0), jnp.int32)
    padded_tokens = jnp.concatenate([tokens.astype(jnp.int32), filler], axis=1)
    return starts, Text(
        padded_tokens, padded_tokens[:, length - 1], jnp.zeros(num_rows, bool)
    )


def add_token(
    text: Text,
    logits: Float[Array, "B V"],
    key: jax.Array,
    column: Any,
    settings: Settings,
) -> Text:
    """Chooses the next token of each row from its logits, and writes it to `column`.

    `key` is that of the whole text.
    """
    new = sample_tokens(
        logits,
        jax.random.fold_in(key, column),
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
    )
    new = jnp.where(text.ended, settings.end_id, new).astype(jnp.int32)
    tokens = jax.lax.dynamic_update_slice_in_dim(
        text.tokens, new[:, None], column, axis=1
    )
    return Text(tokens, new, text.ended | (new == settings.end_id))


def check(
    config: schema.Model, length: int, settings: Settings, key: jax.Array | None
) -> None:
    """Refuses settings that cannot work on prompts of `length` tokens.

    Raises:
        ConfigError: A setting is out of range, or the tokens exceed the model's length.
    """
    problems = []
    if length < 1:
        remedy = "give each row one token or more"
        problems.append(Problem("tokens", f"[B, {length}]", "are no prompts", remedy))
    num_new = settings.max_new_tokens
    if num_new < 1:
        problem = "is below 1"
        remedy = "ask for 1 or more"
        problems.append(Problem("max_new_tokens", num_new, problem, remedy))
    if num_new > MAX_TOKENS:
        problem, remedy = "is more than any run holds", f"use at most {MAX_TOKENS}"
        problems.append(Problem("max_new_tokens", num_new, problem, remedy))
    if not 0 <= settings.temperature < math.inf:
        remedy = "use 0 for the most likely token, or above 0"
        problem = "is negative" if settings.temperature < 0 else "is not finite"
        problems.append(Problem("temperature", settings.temperature, problem, remedy))
    if settings.temperature > 0 and key is None:
        problem = f"is missing and temperature={settings.temperature} draws tokens"
        problems.append(Problem("key", key, problem, "pass jax.random.key(0)"))
    vocab_size = config.vocab_size
    if not 0 <= settings.top_k <= vocab_size:
        problem = f"is not between 0 and model.vocab_size={vocab_size}"
        problems.append(Problem("top_k", settings.top_k, problem, "use 0 for all"))
    if not 0 < settings.top_p <= 1:
        problem = "is not above 0 and up to 1"
        problems.append(Problem("top_p", settings.top_p, problem, "use 1 for all"))
    free = config.max_length - length
    is_bounded = config.positions == "learned" or config.attention == "sparse"
    if is_bounded and num_new > free:
        problem = f"leaves model.max_length={config.max_length} after {length}"
        remedy = f"ask for {max(free, 0)} or fewer, or shorten the prompt"
        problems.append(Problem("max_new_tokens", num_new, problem, remedy))
    if sees_future(config):
        problem = "chooses tokens by comparison with later ones, which are not written"
        remedy = "generate with a model of choice='tokens'"
        problems.append(Problem("model.moe.choice", "experts", problem, remedy))
    if problems:
        raise ConfigError(*problems)
