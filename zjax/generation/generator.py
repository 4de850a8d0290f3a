"""Generator: a model that writes texts for many requests at once."""

import collections
import dataclasses
import gc
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as List
from typing import Any

import jax
import numpy as np
from absl import logging

from zjax.data.prompts import Given, Prompts, describe_prompt, is_ids, read_ids
from zjax.data.tokenizer import Tokenizer
from zjax.errors import ConfigError, Problem
from zjax.generation.dtypes import CacheDtype, Dtypes, dtype_problems
from zjax.generation.engine import Engine, Request
from zjax.generation.generate import StoredDecoder, make_engine, stored
from zjax.generation.loading import LogitsFn, open_decoder
from zjax.generation.lockstep import Lockstep, agreed, stream_problems
from zjax.generation.plan import Size
from zjax.generation.prompts import (
    longest_text,
    model_problems,
    prompt_problems,
    salt_of,
)
from zjax.generation.sampling import GREEDY, Sampling
from zjax.generation.sequence import Sequence as Sample
from zjax.generation.shards import num_shards
from zjax.generation.sizes import PAGE_SIZE, count_pages, size_problems, sizes_of
from zjax.generation.text import TextStream
from zjax.generation.tickets import Delta, Ticket
from zjax.generation.worker import Served, Worker
from zjax.ops.narrow import WeightDtype
from zjax.settings import schema
from zjax.settings.attention import window_of_layers
from zjax.settings.mixture import experts_by_layer
from zjax.sharding.describe import format_bytes

_AHEAD = 4
"""Rows in flight for each row that is written: a long text delays no other."""


@dataclasses.dataclass(frozen=True)
class Text:
    """A text that was written, without the prompt.

    Args:
        prompt: Number of the prompt among the prompts of the call.
        sample: Number of the text among the samples of the prompt.
        text: The text; "" without a tokenizer.
        prompt_ids: Tokens of the prompt.
        ids: Tokens, with the end id if one ended the text.
        finish_reason: `stop` at an end id or a stop string, `length`, or `abort`.
        logprobs: Natural logarithm of each token's probability; None unless asked for.
        best: Most likely tokens at each place, with logarithms of probabilities; None
            unless asked for.
        prompt_logprobs: Natural logarithm of the probability of each token of the
            prompt after the tokens before; None for the first, and unless asked for.
        prompt_best: Most likely tokens at each place of the prompt, as `best`; None for
            the first, and unless asked for.
        experts: Experts that each token of prompt and text but the last chose, uint8 or
            int16 [tokens, layers with experts, experts of a token], the largest weight
            first; None unless asked for, and for a text that was cancelled.
    """

    prompt: int
    sample: int
    text: str
    prompt_ids: list[int]
    ids: list[int]
    finish_reason: str
    logprobs: list[float] | None = None
    best: list[dict[int, float]] | None = None
    prompt_logprobs: list[float | None] | None = None
    prompt_best: list[dict[int, float] | None] | None = None
    experts: np.ndarray | None = None


class Generator:
    """Writes texts with one model, for many requests at once.

    All methods may be called from any thread. Requests join and leave while others are
    written, and no text depends on the requests beside it.

    Threads compile the passes of all sizes, of a directory while the weights are read.
    Passes of other models than the built-in decoder, and of blocks that are gathered or
    stored off the devices, compile when they run.

    In a run of several processes every process makes the generator and calls the same
    methods with the same prompts, in one thread; each gets all texts. Requests as they
    come (`submit`, `stream`) are refused.

    Args:
        source: Directory of a Hugging Face checkpoint, a `zjax.Run`, or a `Decoder`
            with weights in the dtype to compute in. A run of another model than the
            built-in decoder reads the whole text again for each token.
        state: State of the run; not consumed.
        logits_fn: Function `logits_fn(model, tokens) -> logits` of a causal model of
            yours, which `run.bind` binds: from int32[B, L] to [B, L, V], the logits of
            the next token at every place. None calls `model(tokens)`.
        prompts: Tokenizer and chat template of a `Decoder`; None takes and gives ids.
        max_rows: Most texts that a data shard writes at once, 1 to 256. The devices
            along the axes `replica` and `data` of a mesh are one shard for each index:
            `num_shards` times as many texts are written at once.
        max_length: Most tokens of a prompt with a text; 0 is what the model allows,
            which is not known of a model of yours.
        num_pages: Pages of 64 tokens for the keys of the texts of a data shard, 2 or
            more; 0 fills the memory that the devices have left.
        weight_dtype: Codes of the matrices of blocks, made on the devices: `int8`,
            `int4`, or `float8`, which also rounds the inputs of products; `compute`
            makes no codes. Embedding, head and the matrix from latents to keys and
            values stay in the dtype to compute in.
        cache_dtype: Dtype of keys and values: `float8` (e4m3, without a scale), or
            `compute`.
        num_drafts: Most tokens that a text reads ahead in a pass, 0 to 15; 0 is none.
            Drafts are copied from the text, and from earlier texts of the prompt, and
            read where texts have lately repeated, which makes such texts faster. But
            for rounding, a text is the text without drafts.

    Raises:
        ConfigError: A number is out of range, the model writes no text, or it cannot be
            stored in these dtypes.
        CheckpointError: The directory has no weights of a built-in model.

    Example:
        >>> from flax import nnx
        >>> from zjax.models.stack import Decoder
        >>> from zjax.settings import schema
        >>> config = schema.Model(num_layers=1, embed_size=8, mlp_size=16, num_heads=2,
        ...                       num_kv_heads=2, vocab_size=11, max_length=8)
        >>> with Generator(Decoder(config, rngs=nnx.Rngs(0)), max_rows=2) as generator:
        ...     [text] = generator.generate([[3, 1]], Sampling(max_new_tokens=4))
        >>> len(text.ids), text.finish_reason
        (4, 'length')
    """

    def __init__(
        self,
        source: Any,
        state: Any = None,
        *,
        logits_fn: LogitsFn | None = None,
        prompts: Prompts | None = None,
        max_rows: int = 64,
        max_length: int = 0,
        num_pages: int = 0,
        weight_dtype: WeightDtype = "compute",
        cache_dtype: CacheDtype = "compute",
        num_drafts: int = 0,
    ):
        opened = open_decoder(source, state, prompts, logits_fn, max_length)
        self.config, self._prompts = opened.decoder.config, opened.prompts
        problems = [
            *model_problems(self.config),
            *size_problems(self.config, max_rows, max_length, num_drafts, num_pages),
        ]
        dtypes = Dtypes(weight_dtype, cache_dtype)
        with opened.context():
            problems += dtype_problems(opened.decoder, dtypes)
        if problems:
            raise ConfigError(*problems)
        self.max_length = max_length or longest_text(self.config)[1]
        self.max_rows = max_rows
        with opened.context():
            decoder = stored(opened.decoder, dtypes, opened.unread)
            # Pages fill what is free, and the weights are there twice until now:
            # modules refer to themselves.
            opened = opened._replace(decoder=None, unread=None)
            gc.collect()
            sizes = sizes_of(max_rows, num_drafts)
            engine = self._make_engine(decoder, sizes, num_pages)
        self._scheduler = engine.scheduler
        kind = Worker if jax.process_count() == 1 else Lockstep
        # Compiles from here on, while the weights are read.
        self._worker = kind(engine, opened.context)
        try:
            with opened.context():
                engine.load()
        except BaseException:  # Ctrl-C, too
            engine.close()
            self._worker.close()
            raise
        # The thread would hold weights and pages of a generator that nobody closes.
        weakref.finalize(self, self._worker.stop).atexit = False

    def _make_engine(
        self, decoder: StoredDecoder, sizes: tuple[Size, ...], num_pages: int
    ) -> Engine:
        """Makes the engine, with as many pages as fit, and logs the sizes."""
        each = decoder.page_bytes(PAGE_SIZE)
        self.num_shards = num_shards(decoder.axes)
        if not num_pages:
            lengths = self.max_rows, self.max_length
            window = window_of_layers(self.config)
            num_pages = count_pages(each, *lengths, decoder.pending_bytes, window)
        self.num_pages = num_pages
        shards = f"{self.num_shards} data shards of " if self.num_shards > 1 else ""
        text = "text: %s%d rows at once, of up to %d tokens; %d pages of %d tokens, %s "
        text += "on each device; %d sizes of passes"
        size = format_bytes(num_pages * each)
        rows = shards, self.max_rows, self.max_length
        logging.info(text, *rows, num_pages, PAGE_SIZE, size, len(sizes))
        return make_engine(decoder, sizes, self.max_length, num_pages, self._end_ids)

    @property
    def has_experts(self) -> bool:
        """Whether the model has experts, which `Sampling.experts` asks for."""
        return any(experts_by_layer(self.config))

    @property
    def metrics(self) -> Served:
        """State of the requests, and totals since the start."""
        return self._worker.served

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Tokenizer of texts; None where ids are taken and given."""
        return self._prompts.tokenizer if self._prompts else None

    @property
    def _end_ids(self) -> tuple[int, ...]:
        return self.tokenizer.end_ids if self.tokenizer else ()

    def generate(
        self,
        prompts: Iterable[Given],
        sampling: Sampling = GREEDY,
        *,
        seeds: List[int] | None = None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> list[Text]:
        """Writes texts, and returns them when all are complete.

        Args:
            prompts: Texts, token ids, or conversations (lists of messages).
            sampling: How tokens are chosen, and where texts end.
            seeds: Seed of the draws of each prompt, in place of `sampling.seed`.
            stopped: Function that is asked between passes; once it returns True, all
                texts end, by `abort`. Several processes do not ask.

        Returns:
            `num_samples` texts of each prompt, in order.

        Raises:
            ConfigError: A setting or prompt that cannot be served; nothing is written.
            DataError: A chat template refuses a conversation.
        """
        # One prompt that cannot be served refuses all.
        tickets = [*self._tickets(prompts, sampling, seeds=seeds)]
        try:
            for ticket in tickets:
                self._worker.add(ticket)
            return [
                text
                for number, ticket in enumerate(tickets)
                for text in self._collect(number, ticket, stopped)
            ]
        except BaseException:  # Ctrl-C in a notebook, whose generator lives on
            for ticket in tickets:
                ticket.cancel()
            raise

    def generate_each(
        self,
        prompts: Iterable[Given],
        sampling: Sampling = GREEDY,
        *,
        special_tokens: bool = False,
    ) -> Iterator[list[Text]]:
        """Writes texts, and yields the texts of each prompt in order.

        Prompts are read while texts are written, 4 rows ahead for each row of a data
        shard, so that any number of prompts fits the memory. Leaving the loop ends
        the texts in flight.

        Args:
            prompts: Texts, token ids, or conversations (lists of messages).
            sampling: How tokens are chosen, and where texts end.
            special_tokens: Whether names of special tokens in a text are these tokens.

        Yields:
            `num_samples` texts of a prompt.

        Raises:
            ConfigError: A prompt cannot be served; `check` tells before.
            DataError: A chat template refuses a conversation.
        """
        num_rows = _AHEAD * self.num_shards * self.max_rows
        most = max(num_rows // max(sampling.num_samples, 1), 1)
        flying = collections.deque[tuple[int, Ticket]]()
        given = self._encoded(prompts, sampling, special_tokens=special_tokens)
        try:
            for number, (prompt, ids) in enumerate(given):
                ticket = self._ticket(prompt, ids, sampling, is_streamed=False)
                self._worker.add(ticket)
                flying.append((number, ticket))
                if len(flying) == most:
                    yield self._collect_first(flying)
            while flying:
                yield self._collect_first(flying)
        finally:
            for _, ticket in flying:
                ticket.cancel()

    def check(
        self,
        prompts: Iterable[Given],
        sampling: Sampling = GREEDY,
        *,
        special_tokens: bool = False,
    ) -> None:
        """Refuses prompts that cannot be served, in one error, and writes nothing.

        Args:
            prompts: Texts, token ids, or conversations (lists of messages).
            sampling: How tokens are chosen, and where texts end.
            special_tokens: Whether names of special tokens in a text are these tokens.

        Raises:
            ConfigError: Prompts or settings that cannot be served.
            DataError: A chat template refuses a conversation.
        """
        for _ in self._tickets(prompts, sampling, special_tokens=special_tokens):
            pass

    def submit(
        self,
        prompt: Given,
        sampling: Sampling = GREEDY,
        *,
        special_tokens: bool = False,
        is_streamed: bool = True,
    ) -> Ticket:
        """Starts a request, and returns at once.

        Args:
            prompt: Text, token ids, or a conversation (a list of messages).
            sampling: How tokens are chosen, and where texts end.
            special_tokens: Whether names of special tokens in a text are these tokens.
            is_streamed: Whether tokens are wanted one by one; else a few come at once,
                and the text with the last, which is faster.

        Returns:
            Ticket, whose news are read by `for` or `async for`.

        Raises:
            ConfigError: The request cannot be served.
            DataError: A chat template refuses the conversation.
        """
        if problems := [*stream_problems()]:
            raise ConfigError(*problems)
        ids = self._encode(prompt, special_tokens=special_tokens)
        ticket = self._ticket(prompt, ids, sampling, is_streamed=is_streamed)
        self._worker.add(ticket)
        return ticket

    def stream(self, prompt: Given, sampling: Sampling = GREEDY) -> Iterator[Delta]:
        """Yields news of the texts of one prompt; leaving the loop ends them."""
        ticket = self.submit(prompt, sampling)
        try:
            yield from ticket
        finally:
            ticket.cancel()

    async def stream_async(
        self, prompt: Given, sampling: Sampling = GREEDY
    ) -> AsyncIterator[Delta]:
        """Yields news as `stream` does, without blocking the event loop."""
        ticket = self.submit(prompt, sampling)
        try:
            async for delta in ticket:
                yield delta
        finally:
            ticket.cancel()

    def close(self) -> None:
        """Ends all texts, and frees the thread."""
        self._worker.close()

    def __enter__(self) -> "Generator":
        """Returns the generator, which is closed at the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes the generator."""
        self.close()

    def _tickets(
        self,
        prompts: Iterable[Given],
        sampling: Sampling,
        *,
        special_tokens: bool = False,
        seeds: List[int] | None = None,
    ) -> Iterator[Ticket]:
        """Yields tickets of prompts; one error at the end names all refused prompts."""
        problems = dict[str, Problem]()
        given = self._encoded(prompts, sampling, special_tokens=special_tokens)
        for number, (prompt, ids) in enumerate(given):
            if seeds is not None:
                sampling = dataclasses.replace(sampling, seed=seeds[number])
            try:
                yield self._ticket(prompt, ids, sampling, is_streamed=False)
            except ConfigError as error:
                # The same setting would be named for each prompt.
                problems |= {str(x): x for x in error.problems}
        if problems:
            raise ConfigError(*problems.values())

    def _encoded(
        self, prompts: Iterable[Given], sampling: Sampling, *, special_tokens: bool
    ) -> Iterator[tuple[Given, list[int]]]:
        """Yields each prompt with the token ids of the prompt."""
        if isinstance(prompts, str | Mapping):  # letters or names would be prompts
            problem, remedy = "is one prompt", "give a list of prompts"
            shown = describe_prompt(prompts)
            raise ConfigError(Problem("prompts", shown, problem, remedy))
        form = {"special_tokens": special_tokens}
        pairs = ((prompt, self._encode(prompt, **form)) for prompt in prompts)
        return agreed(pairs, sampling)

    def _encode(self, prompt: Given, *, special_tokens: bool = False) -> list[int]:
        """Returns the tokens of a prompt."""
        if self._prompts is not None:
            return self._prompts.encode(prompt, special_tokens=special_tokens).tolist()
        if is_ids(prompt):
            return read_ids(prompt).tolist()
        problem, remedy = "is text, and the model has no tokenizer", "give ids"
        raise ConfigError(Problem("prompt", describe_prompt(prompt), problem, remedy))

    def _ticket(
        self, prompt: Given, ids: list[int], sampling: Sampling, *, is_streamed: bool
    ) -> Ticket:
        """Makes the ticket of a request, or refuses the request."""
        scores_alone = sampling.scores_alone
        if not sampling.max_new_tokens and not scores_alone:
            room = max(self.max_length - len(ids), 0)
            sampling = dataclasses.replace(sampling, max_new_tokens=room)
        # Of the caller: a tokenizer may have more end ids than a request may name.
        problems = [
            *_id_problems(prompt, ids, self.config.vocab_size),
            *sampling.problems(self.config.vocab_size),
        ]
        if sampling.end_ids is None:
            sampling = dataclasses.replace(sampling, end_ids=self._end_ids)
        samples = [
            Sample(
                ids,
                sampling.max_new_tokens,
                frozenset(sampling.end_ids or ()),
                is_streamed=is_streamed,
                salt=_salt_of(self.config, len(ids), sampling),
                # Samples have one prompt.
                prompt_logprobs=None if number else sampling.prompt_logprobs,
                records=sampling.experts,
                request=Request(sampling, number),
            )
            for number in range(max(sampling.num_samples, 1))
        ]
        least = 0 if scores_alone else 1
        size_problems = [*prompt_problems(prompt, ids, self.max_length, num_new=least)]
        problems += size_problems or self._scheduler.find_problems(samples[0])
        if sampling.stop and self._prompts is None:
            remedy = "give end_ids"
            problem = "is text, and the model has no tokenizer"
            problems.append(Problem("stop", sampling.stop, problem, remedy))
        if sampling.experts and not self.has_experts:
            problem, remedy = "asks a model that has none", "leave it False"
            problems.append(Problem("experts", True, problem, remedy))
        if problems:
            raise ConfigError(*problems)
        streams = []
        if self._prompts is not None:
            form = self._prompts.tokenizer, sampling.stop, ids
            streams = [TextStream(*form) for _ in samples]
        return Ticket(sampling, ids, samples, streams, self._cancel)

    def _collect(
        self, number: int, ticket: Ticket, stopped: Callable[[], bool] = lambda: False
    ) -> list[Text]:
        """Waits for the texts of a ticket, or until a function says to stop."""
        self._worker.wait(ticket)
        news: list[list[Delta]] = [[] for _ in ticket.sequences]
        for delta in ticket.news(stopped):
            news[delta.sample].append(delta)
        scores = _join_prompt(ticket, news[0])
        return [_join(number, ticket, deltas, scores) for deltas in news]

    def _collect_first(
        self, flying: collections.deque[tuple[int, Ticket]]
    ) -> list[Text]:
        """Waits for the texts of the first ticket, which stays until they are there."""
        texts = self._collect(*flying[0])
        flying.popleft()
        return texts

    def _cancel(self, ticket: Ticket) -> None:
        self._worker.cancel(ticket)


def _salt_of(config: schema.Model, num_given: int, sampling: Sampling) -> bytes:
    """Names what pages depend on besides the tokens: experts have to be there, too."""
    salt = salt_of(config, num_given, sampling.max_new_tokens)
    return salt + b" experts" if sampling.experts else salt


def _id_problems(prompt: Given, ids: list[int], size: int) -> Iterator[Problem]:
    """Yields the problem of a prompt with tokens that the model does not have."""
    wrong = [token for token in ids if not 0 <= token < size]
    if wrong:
        problem, remedy = f"has {wrong[0]}, which is no id of {size}", "check the ids"
        yield Problem("prompt", describe_prompt(prompt), problem, remedy)


def _join(
    number: int, ticket: Ticket, deltas: list[Delta], scores: dict[str, Any]
) -> Text:
    """Joins all news of one text with the scores of the prompt."""
    sampling, logprobs, best = ticket.sampling, None, None
    if sampling.num_logprobs is not None:
        logprobs = [float(x) for delta in deltas for x in delta.logprobs]
    if sampling.num_logprobs:
        best = [
            each
            for delta in deltas
            for each in _pair(delta.best_ids, delta.best_logprobs)
        ]
    return Text(
        prompt=number,
        sample=deltas[-1].sample,
        text="".join(delta.text for delta in deltas),
        prompt_ids=ticket.prompt_ids,
        ids=[token for delta in deltas for token in delta.ids],
        finish_reason=deltas[-1].finish_reason or "abort",
        logprobs=logprobs,
        best=best,
        experts=deltas[-1].experts,
        **scores,
    )


def _join_prompt(ticket: Ticket, deltas: list[Delta]) -> dict[str, Any]:
    """Joins the scores of the prompt, which come with sample 0, as fields of `Text`."""
    num_best = ticket.sampling.prompt_logprobs
    if num_best is None:
        return {}
    found = [delta.prompt for delta in deltas if delta.prompt is not None]
    # Nothing predicts the first token.
    logprobs, best = [None], [None]
    for scores in found:
        logprobs += scores.logprobs.tolist()
        best += _pair(scores.best_ids, scores.best_logprobs)
    return {
        "prompt_logprobs": logprobs,
        "prompt_best": best if num_best else None,
    }


def _pair(ids: np.ndarray, logprobs: np.ndarray) -> list[dict[int, float]]:
    """Returns the most likely tokens of each place, with log-probabilities."""
    places = zip(ids.tolist(), logprobs.tolist(), strict=True)
    return [dict(zip(*place, strict=True)) for place in places]
