"""Continues prompts in an array, with one setting for all: `zjax.generate`."""

import collections
import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, UInt32

from zjax.generation.cutting import Unread
from zjax.generation.dtypes import COMPUTE, Dtypes
from zjax.generation.engine import Engine, Request
from zjax.generation.plan import NUM_STEPS, Size
from zjax.generation.pool import Pool
from zjax.generation.programs import CutDecoder, Passes
from zjax.generation.prompts import longest_text, read_prompts, salt_of
from zjax.generation.sampling import Sampling
from zjax.generation.scheduler import Scheduler
from zjax.generation.sequence import Sequence as Sample
from zjax.generation.shards import num_shards
from zjax.generation.sizes import MAX_ROWS, NUM_CHUNKS, PAGE_SIZE, pages_of
from zjax.jaxprs.versions import dtype_promotion
from zjax.models.stack import Decoder
from zjax.settings import schema
from zjax.settings.attention import window_of_layers


@runtime_checkable
class StoredDecoder(Protocol):
    """A decoder whose weights are where passes read them."""

    config: schema.Model
    pending_bytes: int
    """Bytes on a device of weights that passes have yet to read."""

    @property
    def axes(self) -> tuple[str, ...]:
        """Mesh axes that split rows into data shards, under the mesh of the passes."""
        ...

    def passes(self, **shapes: int) -> Passes:
        """Makes passes of the shapes that `Programs` takes."""
        ...

    def page_bytes(self, page_size: int) -> int:
        """Counts the bytes on a device of a page of all layers."""
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
    end_ids: Iterable[int] = (),
) -> Int[Array, "B total"]:
    """Continues prompts.

    Args:
        model: Decoder, with weights in the dtype to compute in.
        tokens: Prompts, padded on the left with any integers to equal length.
        max_new_tokens: Number of tokens to add, 1 to `max_length` of the model minus L,
            or to `max_positions` minus L with rotary positions.
        lengths: Number of tokens of each prompt without padding, 1 to L; None is L.
        key: Random key, needed above temperature 0. The draw of a row depends on the
            key, the row's number and the position, not on devices.
        temperature: Divisor of the logits, 0, or 1e-5 and more; 0 takes the most likely
            token.
        top_k: Number of most likely tokens to draw from; 0 is all.
        top_p: Probability mass of the most likely tokens to draw from, above 0 to 1.
        end_ids: Tokens that end a row, which is then filled with the first end id.

    Returns:
        Prompts and continuations, int32[B, L + max_new_tokens].

    Raises:
        ConfigError: A setting is out of range, the tokens exceed the model's length, or
            the call is traced.
        DataError: The prompts are no integers, or an id is not in the vocabulary.

    Example:
        >>> from flax import nnx
        >>> from zjax.settings import schema
        >>> config = schema.Model(num_layers=1, embed_size=8, mlp_size=16, num_heads=2,
        ...                       num_kv_heads=2, vocab_size=11, max_length=8)
        >>> decoder = Decoder(config, rngs=nnx.Rngs(0))
        >>> generate(decoder, jnp.array([[3, 1]]), max_new_tokens=4).shape
        (1, 6)
    """
    sampling = Sampling(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        end_ids=tuple(int(each) for each in end_ids),
    )
    prompts = read_prompts(model.config, tokens, lengths, sampling, key)
    texts = _write(model, prompts, sampling, _seeds(key, len(prompts)))
    filler = sampling.end_ids[0] if sampling.end_ids else 0
    rows = np.full((len(prompts), max_new_tokens), filler, np.int32)
    for row, text in zip(rows, texts, strict=True):
        row[: len(text)] = text
    given = np.asarray(tokens).astype(np.int32)
    return jnp.asarray(np.concatenate([given, rows], axis=1))


def _write(
    model: Decoder | StoredDecoder,
    prompts: list[np.ndarray],
    sampling: Sampling,
    seeds: UInt32[np.ndarray, " B"],
) -> list[list[int]]:
    """Returns the new tokens of each prompt."""
    longest = longest_text(model.config)[1]
    decoder = stored(model)
    num_rows = -(-len(prompts) // num_shards(decoder.axes))
    num_slots = min(_power(num_rows), MAX_ROWS)
    num_tokens = max(map(len, prompts)) + sampling.max_new_tokens
    num_pages = pages_of(num_slots, num_tokens, window_of_layers(model.config))
    sizes = Size(num_slots, steps=NUM_STEPS), Size(num_slots, NUM_CHUNKS)
    engine = make_engine(decoder, sizes, longest, num_pages)
    sequences = []
    for prompt, seed in zip(prompts, seeds.tolist(), strict=True):
        request = Request(dataclasses.replace(sampling, seed=seed))
        ends = frozenset(sampling.end_ids or ())
        given = prompt.tolist(), sampling.max_new_tokens, ends
        salt = salt_of(model.config, len(prompt), sampling.max_new_tokens)
        sequences.append(Sample(*given, salt=salt, request=request))
        engine.scheduler.add(sequences[-1])
    collections.deque(engine.run(), maxlen=0)
    return [sequence.generated for sequence in sequences]


def make_engine(
    decoder: StoredDecoder,
    sizes: Sequence[Size],
    max_length: int,
    num_pages: int,
    end_ids: tuple[int, ...] = (),
) -> Engine:
    """Makes an engine with a row for each lane of the largest size on each shard."""
    num_slots = max(size.lanes for size in sizes)
    passes = decoder.passes(
        num_slots=num_slots,
        max_length=max_length,
        num_pages=num_pages,
        page_size=PAGE_SIZE,
    )
    limits = num_pages, PAGE_SIZE, window_of_layers(decoder.config)
    pools = [Pool(*limits) for _ in range(num_shards(decoder.axes))]
    scheduler = Scheduler(pools, num_slots, max_length, sizes)
    return Engine(passes, scheduler, end_ids=end_ids, axes=decoder.axes)


def stored(
    model: Decoder | StoredDecoder,
    dtypes: Dtypes = COMPUTE,
    unread: Unread | None = None,
) -> StoredDecoder:
    """Returns a decoder with weights where passes read them; see `CutDecoder`."""
    return CutDecoder(model, dtypes, unread) if isinstance(model, Decoder) else model


def _seeds(key: jax.Array | None, num_rows: int) -> UInt32[np.ndarray, " B"]:
    """Draws a seed for each row, by the row's number alone."""
    if key is None:
        return np.zeros(num_rows, np.uint32)
    keys = jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.arange(num_rows))
    draw = functools.partial(jax.random.bits, dtype=jnp.uint32)
    return np.asarray(jax.vmap(draw)(keys))


def _power(number: int) -> int:
    """Returns the least power of two that is not below a number."""
    return 1 << (number - 1).bit_length()
