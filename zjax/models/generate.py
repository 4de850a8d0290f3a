"""Text generation: the prompt in one pass, then token by token, or block by block."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.core as jax_core
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from zjax.data.entries import check_batch
from zjax.errors import ConfigError, Problem
from zjax.jaxprs.versions import dtype_promotion
from zjax.models import cached
from zjax.models.block import Block, segments_of
from zjax.models.cached import sample_tokens
from zjax.models.nnx import nest, values_of
from zjax.models.stack import (
    Decoder,
    execution_of,
    head_table,
    make_stack,
    without_tiles,
)
from zjax.settings import schema
from zjax.settings.mixture import sees_future
from zjax.settings.ranges import MAX_TOKENS
from zjax.sharding.activations import pin_everywhere
from zjax.sharding.layers import read_layer
from zjax.stack.forward import Execution, run_blocks
from zjax.typing import Columns, Continuation, Entry, Params, Stack


class Settings(NamedTuple):
    """Arguments of `generate` that are static in a compiled program."""

    max_new_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    end_ids: tuple[int, ...] = ()

    @property
    def filler(self) -> int:
        """Token in the columns behind the end of a row."""
        return self.end_ids[0] if self.end_ids else 0


def make_settings(*, end_ids: Sequence[int] = (), **others: Any) -> Settings:
    """Makes settings that can be hashed, as static arguments must.

    Example:
        >>> make_settings(max_new_tokens=3, end_ids=[2, 7]).end_ids
        (2, 7)
    """
    return Settings(end_ids=tuple(int(each) for each in end_ids), **others)


class Text(NamedTuple):
    """Text being generated."""

    tokens: Int[Array, "B total"]
    """Prompts and continuations so far; the filler in columns to come."""
    new: Int[Array, " B"]
    """Last token of each row."""
    ended: Bool[Array, " B"]
    """Whether a row has ended."""
    goes_on: Bool[Array, ""] | None = None
    """Whether a row has not ended; None where no token ends rows."""


@runtime_checkable
class StoredDecoder(Protocol):
    """A decoder whose blocks are stored off the devices."""

    config: schema.Model

    def write(
        self, tokens: jax.Array, lengths: Any, key: jax.Array, settings: Settings
    ) -> Int[Array, "B total"]:
        """Continues prompts that have been checked, as `generate` describes it."""
        ...


@dtype_promotion()
def generate(
    model: Decoder | StoredDecoder,
    tokens: Int[Array | np.ndarray, "B L"],
    *,
    max_new_tokens: int,
    lengths: Int[Array | np.ndarray, " B"] | None = None,
    key: jax.Array | None = None,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    end_ids: Sequence[int] = (),
) -> Int[Array, "B total"]:
    """Continues prompts.

    Ids are not checked where `tokens` or `lengths` are traced, or spread over several
    processes.

    Args:
        model: Decoder, with weights in the dtype to compute in.
        tokens: Prompts, padded on the left with any integers to equal length.
        max_new_tokens: Number of tokens to add, 1 to `max_length` of the model minus L,
            or to `max_positions` minus L with rotary positions.
        lengths: Number of tokens of each prompt without padding, 1 to L; None is L.
        key: Random key, needed above temperature 0. The draw of a row depends on the
            key, the row's number and the position, not on devices.
        temperature: Divisor of the logits, 0 or more; 0 takes the most likely token.
        top_k: Number of most likely tokens to draw from; 0 is all.
        top_p: Probability mass of the most likely tokens to draw from, above 0 to 1.
        end_ids: Tokens that end a row, which is then filled with the first end id.

    Returns:
        Prompts and continuations, int32[B, L + max_new_tokens].

    Raises:
        ConfigError: A setting is out of range, or the tokens exceed the model's length.
        DataError: The prompts are no integers, or an id is not in the vocabulary.

    Example:
        >>> from zjax.settings import schema
        >>> config = schema.Model(num_layers=1, embed_size=8, mlp_size=16, num_heads=2,
        ...                       num_kv_heads=2, vocab_size=11, max_length=8)
        >>> decoder = Decoder(config, rngs=nnx.Rngs(0))
        >>> generate(decoder, jnp.array([[3, 1]]), max_new_tokens=4).shape
        (1, 6)
    """
    settings = make_settings(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        end_ids=end_ids,
    )
    check(model.config, tokens, lengths, settings, key)
    tokens = jnp.asarray(tokens, jnp.int32)
    # Unused: `check` has refused temperatures above 0 without a key.
    key = jax.random.key(0) if key is None else key
    if not isinstance(model, Decoder):
        return model.write(tokens, lengths, key, settings)
    graph, state = nnx.split(model)
    return _generate(state, tokens, lengths, key, graph=graph, settings=settings)


# The module's structure is static: the weights of another step reuse the program.
@functools.partial(jax.jit, static_argnames=("graph", "settings"))
def _generate(state, tokens, lengths, key, *, graph, settings: Settings):
    """Generates in one program, which stops early where all rows have ended."""
    read = make_reader(nnx.merge(graph, state))
    choose = functools.partial(add_token, key=key, settings=settings)
    start = start_text(tokens, lengths, settings)
    return write_text(read, choose, *start, tokens, jax.lax.while_loop)


def write_text(
    read: Callable[..., Any],
    choose: Callable[..., Text],
    columns: Columns,
    text: Text,
    prompts: Int[Array, "B L"],
    loop: Callable[..., Any],
) -> Int[Array, "B total"]:
    """Writes tokens column by column, until every row has ended.

    `read(tokens, columns, caches) -> (scores, caches)` is a pass of `columns` through
    the model, and `choose(text, scores, column)` adds the next token of each row.
    `loop` is `jax.lax.while_loop`, or a loop of the host.
    """

    def write(carry):
        column, tokens, text, caches = carry
        # The tokens to read end one column earlier.
        passed = dataclasses.replace(columns, first=column - tokens.shape[1])
        scores, caches = read(tokens, passed, caches)
        text = choose(text, scores, column)
        return column + 1, text.new[:, None], text, caches

    def is_unfinished(carry):
        column, _, text, _ = carry
        is_short = column < columns.num_columns
        # The host need not wait for a token that cannot end the text.
        return is_short if text.goes_on is None else is_short & text.goes_on

    # NumPy's int32 is one in programs, too, and known to the host.
    carry = write((np.int32(prompts.shape[1]), prompts, text, None))
    return loop(is_unfinished, write, carry)[2].tokens


def make_reader(model: Decoder) -> Callable[..., Any]:
    """Returns `read(tokens, columns, caches)`, a pass through a decoder."""
    continuation = make_continuation(model, in_tiles=False)
    stack = dataclasses.replace(make_stack(model), continuation=continuation)
    params = nest(values_of(nnx.state(model, nnx.Param)))
    return functools.partial(_read_columns, stack, execution_of(model.config), params)


def _read_columns(
    stack: Stack,
    execution: Execution,
    params: Params,
    tokens: Int[Array, "B L"],
    columns: Columns,
    caches: Any,
) -> tuple[Float[Array, "B V"], tuple[Any, ...]]:
    """Runs a pass; returns the logits of the next token, and the caches by segment.

    A segment has caches in the form of the inputs of `run_blocks`.
    """
    continuation = stack.continuation
    assert continuation is not None
    embed, blocks, head = stack.split(params)
    carry, context = continuation.embed(embed, tokens, columns)
    updated = []
    for number, segment in enumerate(stack.segments):
        size = execution.scan_size(segment.num_blocks)

        def step(params, carry, cache, run=continuation.blocks[number]):
            inputs = read_layer(params), carry, context, columns, cache
            (carry, _), cache = run(*inputs)
            return carry, cache

        empty = (None,) * (size or segment.num_blocks)
        given = empty if caches is None else caches[number]
        carry, cache = run_blocks(step, blocks[number], carry, given, scan_size=size)
        updated.append(cache)
    return continuation.score(head, carry[:, -1:]), tuple(updated)


def start_text(
    tokens: Int[Array, "B L"], lengths: Int[Array, " B"] | None, settings: Settings
) -> tuple[Columns, Text]:
    """Allocates the text; returns the columns of the prompts, and the text.

    Prompts are padded on the left; `lengths` counts prompt tokens without padding.
    """
    num_rows, length = tokens.shape
    starts = None if lengths is None else length - lengths
    shape = (num_rows, settings.max_new_tokens)
    filler = jnp.full(shape, settings.filler, jnp.int32)
    padded_tokens = jnp.concatenate([tokens.astype(jnp.int32), filler], axis=1)
    ended = jnp.zeros(num_rows, bool)
    goes_on = jnp.array(True) if settings.end_ids else None
    text = Text(padded_tokens, padded_tokens[:, length - 1], ended, goes_on)
    columns = Columns(starts, 0, padded_tokens.shape[1])
    return columns, jax.tree.map(pin_everywhere, text)


def add_token(
    text: Text,
    logits: Float[Array, "B V"],
    column: Any,
    *,
    key: jax.Array,
    settings: Settings,
) -> Text:
    """Chooses the next token of each row from the logits, and writes `column`.

    `key` belongs to the whole text.
    """
    new = sample_tokens(
        logits,
        jax.random.fold_in(key, column),
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
    )
    new = jnp.where(text.ended, settings.filler, new).astype(jnp.int32)
    tokens = jax.lax.dynamic_update_slice_in_dim(
        text.tokens, new[:, None], column, axis=1
    )
    ended = text.ended | jnp.isin(new, jnp.array(settings.end_ids, jnp.int32))
    goes_on = ~ended.all() if settings.end_ids else None
    # Every device, and so every process, has all text.
    return jax.tree.map(pin_everywhere, Text(tokens, new, ended, goes_on))


def check(
    config: schema.Model,
    tokens: Any,
    lengths: Any,
    settings: Settings,
    key: jax.Array | None,
) -> None:
    """Refuses prompts and settings that cannot work, before compilation."""
    problems = [
        *_length_problems(config, tokens, lengths, settings.max_new_tokens),
        *_choice_problems(config, settings, key),
    ]
    if problems:
        raise ConfigError(*problems)
    entry = Entry(("B", "L"), np.integer, num_ids=config.vocab_size)
    # Padding may be any integer, which must not count as an id.
    prompts = _without_padding(tokens, lengths)
    check_batch({"tokens": prompts}, {"tokens": entry}, name="prompt")


def _length_problems(
    config: schema.Model, tokens: Any, lengths: Any, num_new: int
) -> Iterator[Problem]:
    """Yields problems of the numbers of prompt tokens and new tokens."""
    shape = tuple(tokens.shape)
    if len(shape) != 2 or 0 in shape:
        remedy = "give int[B, L], each row one token or more"
        yield Problem("tokens", str([*shape]), "are no prompts", remedy)
        return
    num_rows, length = shape
    if num_new < 1:
        yield Problem("max_new_tokens", num_new, "is below 1", "ask for 1 or more")
    if num_new > MAX_TOKENS:
        problem, remedy = "is more than any run holds", f"use at most {MAX_TOKENS}"
        yield Problem("max_new_tokens", num_new, problem, remedy)
    field, longest = longest_text(config)
    free = longest - length
    if num_new > free:
        problem = f"leaves model.{field}={longest} after {length}"
        remedy = f"ask for {max(free, 0)} or fewer, or shorten the prompt"
        yield Problem("max_new_tokens", num_new, problem, remedy)
    if lengths is None:
        return
    if not np.issubdtype(lengths.dtype, np.integer):
        yield Problem("lengths", str(lengths.dtype), "are no integers", "give int[B]")
    elif tuple(lengths.shape) != (num_rows,):
        problem = f"are not the lengths of {num_rows} prompts"
        yield Problem("lengths", str([*lengths.shape]), problem, "give one to each")
    elif _is_on_host(lengths):
        found = np.asarray(lengths).tolist()
        wrong = [each for each in found if not 1 <= each <= length]
        if wrong:
            problem = f"is not between 1 and the {length} columns of tokens"
            remedy = "count the tokens of each prompt, without its padding"
            yield Problem("lengths", wrong[0], problem, remedy)


def longest_text(config: schema.Model) -> tuple[str, int]:
    """Returns name and value of the setting that bounds prompt and continuation.

    Rotary positions go on beyond the rows of training, up to the positions that the
    model is made for, which `dynamic` scaling multiplies; tables of learned positions
    and of sparse blocks end with the rows.
    """
    row = "max_length", config.max_length
    positions = config.positions
    is_sparse = isinstance(config.attention, schema.Sparse)
    if is_sparse or not isinstance(positions, schema.Rotary):
        return row
    scaling, longest = positions.scaling, positions.max_positions
    name = "positions.max_positions"
    if isinstance(scaling, schema.DynamicRope):
        name += " * model.positions.scaling.factor"
        longest = int(longest * scaling.factor)
    return (name, longest) if longest > config.max_length else row


def _choice_problems(
    config: schema.Model, settings: Settings, key: jax.Array | None
) -> Iterator[Problem]:
    """Yields problems of sampling settings, and of ids that end a row."""
    if not 0 <= settings.temperature < math.inf:
        remedy = "use 0 for the most likely token, or above 0"
        problem = "is negative" if settings.temperature < 0 else "is not finite"
        yield Problem("temperature", settings.temperature, problem, remedy)
    if settings.temperature > 0 and key is None:
        problem = f"is missing and temperature={settings.temperature} draws tokens"
        yield Problem("key", key, problem, "pass jax.random.key(0)")
    vocab_size = config.vocab_size
    if not 0 <= settings.top_k <= vocab_size:
        problem = f"is not between 0 and model.vocab_size={vocab_size}"
        yield Problem("top_k", settings.top_k, problem, "use 0 for all")
    if not 0 < settings.top_p <= 1:
        problem = "is not above 0 and up to 1"
        yield Problem("top_p", settings.top_p, problem, "use 1 for all")
    wrong = [each for each in settings.end_ids if not 0 <= each < vocab_size]
    if wrong:
        problem = f"has {wrong[0]}, which is no id of {vocab_size}"
        remedy = f"use 0 to {vocab_size - 1}, or () for none"
        yield Problem("end_ids", settings.end_ids, problem, remedy)
    if sees_future(config):
        problem = "chooses tokens by comparison with later ones, which are not written"
        remedy = "generate with a model of moe='token_choice'"
        yield Problem("model.moe", "expert_choice", problem, remedy)


def _without_padding(tokens: Any, lengths: Any) -> Any:
    """Returns prompts with 0 as padding, on the host if this process has the values."""
    if not _is_on_host(tokens):
        return tokens
    tokens = np.asarray(tokens)
    if lengths is None or not _is_on_host(lengths):
        return tokens
    num_padded = tokens.shape[1] - np.asarray(lengths)[:, None]
    return np.where(np.arange(tokens.shape[1]) < num_padded, 0, tokens)


def _is_on_host(x: Any) -> bool:
    """Whether this process can read the values: neither traced nor partly remote."""
    is_traced = isinstance(x, jax_core.Tracer)
    return not is_traced and getattr(x, "is_fully_addressable", True)


def make_continuation(model: Decoder, *, in_tiles: bool) -> Continuation:
    """Makes the steps of generation from a decoder with concrete or abstract values.

    `in_tiles` leaves the tiles of a tiled feed-forward to the caller, who loads and
    runs each.
    """
    config = model.config
    is_tiled = in_tiles and config.mlp_tiles > 1
    embedding_graph, _ = nnx.split(model.embedding)
    head_graph, _ = nnx.split(model.head)

    def embed(params, *args):
        return cached.embed(nnx.merge(embedding_graph, params["embedding"]), *args)

    def cached_block(blocks):
        graph, _ = nnx.split(without_tiles(blocks) if is_tiled else blocks)

        def read(params, *args):
            if is_tiled:
                block = nnx.merge(graph, params)
                return cached.run_cached(block, *args, run=Block.trunk_with)
            x, cache = cached.run_cached(nnx.merge(graph, params), *args)
            return (x, ()), cache

        return read

    def score(params, carry):
        head = nnx.merge(head_graph, params["head"])
        return cached.score(head, carry, head_table(params, config))

    return Continuation(
        embed=embed,
        blocks=tuple(map(cached_block, segments_of(model.blocks).values())),
        score=score,
    )
