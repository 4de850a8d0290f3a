"""A pass: reads tokens of many rows through the model, and chooses what follows."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Integer

from zjax.generation.chunks import Chunks, batch_of, split_tokens
from zjax.generation.dtypes import COMPUTE, CacheDtype, Dtypes
from zjax.generation.pages import Pages, attend
from zjax.generation.plan import Given, Pieces
from zjax.generation.sampling import (
    MAX_LOGPROBS,
    Chosen,
    Logprobs,
    SamplingRows,
    choose_tokens,
    find_logprobs,
    or_zeros,
)
from zjax.generation.speculation import verify
from zjax.jaxprs.versions import dtype_promotion
from zjax.models.continuation import AttendTo, decoder_stack, form_of
from zjax.models.projections import finish
from zjax.models.stack import Decoder
from zjax.sharding.activations import pin_everywhere
from zjax.sharding.layers import layers_of
from zjax.typing import (
    Continuation,
    LogPartition,
    Params,
    Segment,
    Stack,
    logsumexp,
)


class Head(NamedTuple):
    """What a stream says of the next tokens.

    Args:
        score: Function from a stream [N, 1, M] to the logits [N, V] of the token behind
            each token.
        log_partition: Function from logits to the logarithms of the sums of
            exponentials.
    """

    score: Callable[[Any], Float[Array, "N V"]]
    log_partition: LogPartition = logsumexp

    @classmethod
    def of(cls, continuation: Continuation, params: Params) -> "Head":
        """Returns the head of a model with parameters."""
        score = functools.partial(continuation.score, params)
        return cls(score, continuation.log_partition)


DIMS_OF_ROWS = Chosen._make([1, 1, 1, 1, 0, 1])
"""Dim of rows or chunks of each array of `Chosen`, and of all arrays of `prompt` and of
`experts`."""


class Rows(NamedTuple):
    """What the devices know of each slot; the last slot belongs to padding."""

    table: Int[Given, "slots P"]
    """Pages of the row, in order."""
    num_given: Int[Given, " slots"]
    """Tokens of the prompt."""
    num_tokens: Int[Given, " slots"]
    """Tokens of the row with all tokens to come."""
    sampling: SamplingRows
    """How tokens are chosen."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Weights:
    """Parameters of a decoder, as separate arrays for each block.

    A loop over tokens that slices stacked arrays copies them for every token.
    """

    embed: Params
    blocks: tuple[Params, ...]
    head: Params


class Reader:
    """Reads passes through a stack that continues text.

    Args:
        stack: Model as a sequence of blocks, with a continuation.
        form: Hashable; readers of equal forms share compiled programs. None is the
            stack itself.
        cache_dtype: Dtype of keys and values in pages; `compute` is as they come.
    """

    def __init__(
        self, stack: Stack, form: Any = None, cache_dtype: CacheDtype = "compute"
    ):
        assert stack.continuation is not None
        self._cache_dtype: CacheDtype = cache_dtype
        self._form = id(stack) if form is None else form
        self._hash = hash(self._form)  # a form of many arrays takes long, for each call
        self.stack: Stack = stack
        self.continuation: Continuation = stack.continuation
        # Made once: a function traced for one block serves all blocks of the segment.
        self._runs = [
            jax.jit(functools.partial(_run_block, *each), static_argnums=(0, 1))
            for each in zip(stack.segments, stack.continuation.blocks, strict=True)
        ]

    @classmethod
    def of(cls, model: Decoder, dtypes: Dtypes = COMPUTE) -> "Reader":
        """Makes the reader of a decoder with concrete or abstract values."""
        # The mesh decides which matrices are joined.
        form = form_of(model), jax.sharding.get_abstract_mesh(), dtypes
        stack = decoder_stack(model, joins=True, weight_dtype=dtypes.weights)
        return cls(stack, form, dtypes.cache)

    def __eq__(self, other: object) -> bool:
        """Whether another reader reads models of the same form."""
        return isinstance(other, Reader) and self._form == other._form

    def __hash__(self) -> int:
        """Returns the hash of the form of the model."""
        return self._hash

    def cut(self, params: Params) -> Weights:
        """Cuts stacked parameters into separate arrays or codes for each block."""
        embed, segments, head = self.stack.split(params)
        blocks = [
            self.cut_block(number, block)
            for number, stacked in enumerate(segments)
            for block in layers_of(stacked, self.stack.segments[number].num_blocks)
        ]
        return Weights(embed, tuple(blocks), head)

    def cut_block(self, segment: int, params: Params, index: Any = None) -> Params:
        """Lays the parameters of a block, which is at `index` of a stack if given."""
        if index is not None:
            params = jax.tree.map(lambda x: x[index], params)
        return self.continuation.lay[segment](params)

    def read(
        self,
        weights: Weights,
        caches: Any,
        parts: Sequence[Chunks],
        attend: AttendTo = attend,
        *,
        records: bool = False,
    ) -> tuple[Float[Array, "N 1 M"], Any, list[Integer[Array, "N 1 K"]]]:
        """Runs all tokens of a pass; returns the stream and the caches of blocks.

        With `records` also the experts of all tokens, for each layer with experts.
        """
        carry, context = self.continuation.embed(weights.embed, batch_of(parts))
        updated, chosen = [], []
        blocks = zip(self.segments(), weights.blocks, caches, strict=True)
        for number, *inputs in blocks:
            run = self._runs[number]
            inputs = carry, context, tuple(parts), *inputs
            carry, cache, found = run(attend, records, *inputs)
            updated.append(cache)
            chosen += found
        return carry, tuple(updated), chosen

    def segments(self) -> list[int]:
        """Returns the number of the segment of each block."""
        segments = enumerate(self.stack.segments)
        return [number for number, x in segments for _ in range(x.num_blocks)]

    def empty_caches(self, weights: Weights, num_pages: int, page_size: int) -> Any:
        """Makes the pages of all layers, for concrete or abstract weights."""
        num_layers = self.continuation.num_layers

        def record(parts, cache, how, q, k, v, new):
            del parts, cache, how
            q, _, v, new = finish(q, k, v, new)
            return jnp.zeros((*q.shape[:3], v.shape[-1]), q.dtype), Pages(new)

        def shapes(weights):
            one = jnp.zeros(1, jnp.int32)
            parts = (Chunks(one[:, None], one, one, one[:, None], one, one),)
            nothing = tuple((None,) * num_layers[x] for x in self.segments())
            return self.read(weights, nothing, parts, record)[1]

        return jax.tree.map(
            lambda pages: Pages.empty(
                pages.stored, num_pages, page_size, self._cache_dtype
            ),
            jax.eval_shape(shapes, weights),
            is_leaf=lambda x: isinstance(x, Pages),
        )


def _run_block(
    segment: Segment, block, attend, records, carry, context, parts, params, caches
):
    """Runs one block; returns the stream, the caches and the experts of the layers."""
    attend, chosen = functools.partial(attend, parts), []
    if segment.tiles is None:
        record = chosen.append if records else None
        (carry, _), caches = block(params, carry, context, attend, caches, record)
        return carry, caches, chosen
    trunk, tiles = segment.tiles.split(params)
    (carry, entering), caches = block(trunk, carry, context, attend, caches)
    for tile in tiles:
        carry = segment.tiles.add(carry, segment.tiles.tile(tile, entering, None))
    return carry, caches, chosen  # a layer of tiles has no experts


@dtype_promotion()
def run_pass(
    reader: Reader,
    sizes: Sequence[int],
    weights: Weights,
    caches: Any,
    history: Int[Array, "slots S"],
    rows: Rows,
    pieces: Sequence[Pieces],
) -> tuple[Any, Int[Array, "slots S"], Chosen]:
    """Reads pieces of up to `sizes` tokens; returns caches, history and new tokens.

    `history` has the tokens of each slot. New tokens are [T, pieces], in the order of
    the pieces, and follow in the history where a piece ends a row; T is 1 without
    drafts. A pass with drafts has lanes alone.
    """
    parts = lay_chunks(history, rows, pieces, sizes)
    records = pieces[0].records is not None
    stream, caches, experts = reader.read(weights, caches, parts, records=records)
    head = Head.of(reader.continuation, weights.head)
    history, chosen = score_and_choose(head, parts, stream, history, rows, pieces)
    if records:
        chosen = chosen._replace(experts=lay_experts(parts, experts))
    return caches, history, chosen


def lay_experts(
    parts: Sequence[Chunks], experts: Sequence[Integer[Array, "N 1 K"]]
) -> tuple[Integer[Array, "1 C T layers K"], ...]:
    """Joins the experts of layers, and splits tokens into chunks; see `Chosen`."""
    dtype = max((x.dtype for x in experts), key=lambda dtype: dtype.itemsize)
    joined = jnp.stack([x.astype(dtype) for x in experts], axis=2)
    return tuple(pin_everywhere(x[None]) for x in split_tokens(parts, joined))


def score_and_choose(
    head: Head,
    parts: Sequence[Chunks],
    stream: Float[Array, "N 1 M"],
    history: Int[Array, "slots S"],
    rows: Rows,
    pieces: Sequence[Pieces],
) -> tuple[Int[Array, "slots S"], Chosen]:
    """Chooses new tokens as `choose`, and scores the prompts of pieces that ask."""
    # Experts leave rows split over devices. Inside a data shard XLA cannot partition
    # the lookup of a token of each chunk then.
    stream = pin_everywhere(stream)
    logits = head.score(chosen_from(parts, pieces, stream))
    updated, chosen = choose(logits, history, rows, pieces, head.log_partition)
    if pieces[-1].num_best is None:
        return updated, chosen
    chunks = split_tokens(parts, stream[:, None])[-1]
    prompt = score_prompts(head, chunks, history, pieces[-1])
    return updated, chosen._replace(prompt=prompt)


def score_prompts(
    head: Head,
    chunks: Any,
    history: Int[Array, "slots S"],
    pieces: Pieces,
) -> Logprobs:
    """Finds log-probabilities of the tokens that follow the T tokens of each chunk.

    `head.score` maps an entry of `chunks`, arrays of which the first is [C, T, ...], to
    the logits behind each token. A chunk that asks for nothing is not scored.
    """
    assert pieces.num_best is not None
    size = jax.tree.leaves(chunks)[0].shape[1]
    places = pieces.starts[:, None] + 1 + jnp.arange(size, dtype=jnp.int32)[None]
    places = jnp.minimum(places, history.shape[1] - 1)
    tokens = history[pieces.slots[:, None], places]

    def find(chunk: Any, tokens: jax.Array, number: jax.Array) -> Logprobs:
        logits = head.score(chunk).astype(jnp.float32)
        most = min(MAX_LOGPROBS, logits.shape[1])
        numbers = jnp.full(size, number, jnp.int32)
        how = {"num_best": most, "log_partition": head.log_partition}
        return find_logprobs(logits, tokens, numbers, **how)

    def find_if_asked(inputs: tuple[Any, jax.Array, jax.Array]) -> Logprobs:
        return or_zeros(inputs[-1] >= 0, find, *inputs)

    # One chunk at a time: pages leave no memory for the logits of all chunks.
    inputs = chunks, tokens, jnp.asarray(pieces.num_best)
    found = jax.lax.map(find_if_asked, inputs)
    return jax.tree.map(pin_everywhere, found)


def run_steps(
    reader: Reader,
    num_steps: int,
    weights: Weights,
    caches: Any,
    history: Int[Array, "slots S"],
    rows: Rows,
    piece: Pieces,
) -> tuple[Any, Int[Array, "slots S"], Chosen]:
    """Reads the tokens of lanes one after another; see `run_pass`.

    A lane reads the token that the last step chose. The number of steps is static: a
    host that launches a loop of unknown length waits for the end. New tokens are
    [`num_steps`, pieces].
    """

    def step(carry, number):
        caches, history = carry
        inputs = weights, caches, history, rows, (piece.at(number),)
        caches, history, chosen = run_pass(reader, (1,), *inputs)
        return (caches, history), jax.tree.map(lambda x: x[0], chosen)

    numbers = jnp.arange(num_steps, dtype=jnp.int32)
    (caches, history), found = jax.lax.scan(step, (caches, history), numbers)
    return caches, history, found


def lay_chunks(
    history: Int[Array, "slots S"],
    rows: Rows,
    pieces: Sequence[Pieces],
    sizes: Sequence[int],
) -> tuple[Chunks, ...]:
    """Looks up tokens and pages of pieces of up to `sizes` tokens."""

    def lay(piece: Pieces, size: int) -> Chunks:
        places = piece.starts[:, None] + jnp.arange(size, dtype=jnp.int32)[None]
        places = jnp.minimum(places, history.shape[1] - 1)
        tokens = history[piece.slots[:, None], places]
        return Chunks(
            tokens=tokens.at[:, 1 : 1 + piece.num_drafts].set(piece.drafts),
            starts=jnp.asarray(piece.starts),
            counts=jnp.asarray(piece.counts),
            pages=rows.table[piece.slots],
            num_given=rows.num_given[piece.slots],
            num_tokens=rows.num_tokens[piece.slots],
        )

    return tuple(map(lay, pieces, sizes))


def chosen_from(
    parts: Sequence[Chunks], pieces: Sequence[Pieces], stream: Float[Array, "N 1 M"]
) -> Float[Array, "N2 1 M"]:
    """Selects the tokens of a pass behind which a token is chosen.

    With drafts all tokens [T, lanes], else the last of each chunk.
    """
    if not pieces[0].num_drafts:
        return last_of_chunks(parts, stream)
    (chunks,) = parts
    return jnp.swapaxes(chunks.cut(stream), 0, 1).reshape(stream.shape)


def last_of_chunks(
    parts: Sequence[Chunks], stream: Float[Array, "N 1 M"]
) -> Float[Array, "C 1 M"]:
    """Selects the last token of each chunk, in the order of all chunks of a pass."""
    pairs = zip(parts, split_tokens(parts, stream), strict=True)
    return jnp.concatenate(
        [
            x[jnp.arange(x.shape[0]), jnp.maximum(chunks.counts - 1, 0)]
            for chunks, x in pairs
        ]
    )[:, None]


def choose(
    scores: Float[Array, "N V"],
    history: Int[Array, "slots S"],
    rows: Rows,
    pieces: Sequence[Pieces],
    log_partition: LogPartition = logsumexp,
) -> tuple[Int[Array, "slots S"], Chosen]:
    """Chooses tokens [T, pieces]; adds tokens to the history where a row ends."""
    num_best = min(MAX_LOGPROBS, scores.shape[1])
    how = {"num_best": num_best, "log_partition": log_partition}
    num_drafts = pieces[0].num_drafts
    numbers = zip(*(piece[:4] for piece in pieces), strict=True)
    slots, starts, counts, ends = map(jnp.concatenate, numbers)
    # Drafts are no known tokens.
    known = starts + (1 if num_drafts else counts)
    settings = jax.tree.map(lambda x: x[slots], rows.sampling)
    row = settings, history[slots], rows.num_given[slots], known
    if num_drafts:
        scores = scores.reshape(-1, len(slots), scores.shape[1])
        drafts = jnp.asarray(pieces[0].drafts), counts - 1
        chosen = verify(scores, *drafts, *row, **how)
    else:
        chosen = choose_tokens(scores, *row, **how)
        chosen = jax.tree.map(lambda x: x[None], chosen)
    history = _append(history, chosen.tokens, slots, known, ends)
    # Every device, and so every process, has all text.
    return jax.tree.map(pin_everywhere, (history, chosen))


def _append(
    history: Int[Array, "slots S"],
    tokens: Int[Array, "T C"],
    slots: Int[Array, " C"],
    known: Int[Array, " C"],
    ends: Bool[Array, " C"],
) -> Int[Array, "slots S"]:
    """Adds chosen tokens, which are not -1, to the history where a row ends."""
    padding = history.shape[0] - 1
    numbers = jnp.arange(tokens.shape[0], dtype=jnp.int32)[:, None]
    columns = jnp.minimum(known[None] + numbers, history.shape[1] - 1)
    is_new = ends[None] & (tokens >= 0)
    return history.at[jnp.where(is_new, slots[None], padding), columns].set(tokens)
