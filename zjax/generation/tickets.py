"""Tickets: what somebody who asked for texts holds while they are written."""

import asyncio
import collections
import contextlib
import itertools
import queue
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Int32

from zjax.errors import DataError, Problem
from zjax.generation.engine import News, Request
from zjax.generation.sampling import Logprobs, Sampling
from zjax.generation.sequence import Sequence
from zjax.generation.text import TextStream

_ASK_SECONDS = 0.1
"""Most seconds between two questions whether to stop."""


class Delta(NamedTuple):
    """What is new of one of the texts that a request asked for."""

    sample: int
    """Number of the text among the samples of the request."""
    text: str
    """Text that no later token changes; "" without a tokenizer. A text that nobody
    reads token by token comes with the last delta, unless a string may end it."""
    ids: list[int]
    """New tokens. Their text may come later."""
    logprobs: Float32[np.ndarray, " n"]
    """Natural logarithm of each token's probability, if the request asks for it."""
    best_ids: Int32[np.ndarray, "n N"]
    """Most likely tokens at each place, as many as `Sampling.num_logprobs`."""
    best_logprobs: Float32[np.ndarray, "n N"]
    finish_reason: str | None = None
    """`stop`, `length` or `abort` with the last delta of a text; None before."""
    prompt: Logprobs | None = None
    """Log-probabilities of the next tokens of the prompt, from the second token on, as
    `Sampling.prompt_logprobs` asks. They come with sample 0, before the text of the
    sample."""
    experts: np.ndarray | None = None
    """Experts of all tokens of prompt and text but the last, as `Text.experts`; they
    come with the last delta of a text."""


class Ticket:
    """A request that is being served; iterate over it for the news of all texts.

    Args:
        sampling: How tokens are chosen.
        prompt_ids: Tokens of the prompt.
        sequences: A sequence for each sample.
        streams: Text of each sample; empty without a tokenizer.
        cancel: Function that ends a ticket early, from any thread.

    Raises:
        DataError: Iteration raises it where tokens of a text cannot be decoded.
        Exception: Iteration raises what ended the engine.
    """

    def __init__(
        self,
        sampling: Sampling,
        prompt_ids: list[int],
        sequences: list[Sequence],
        streams: list[TextStream],
        cancel: "Callable[[Ticket], None]",
    ):
        self.sampling, self.prompt_ids = sampling, prompt_ids
        self.sequences, self._streams, self._cancel = sequences, streams, cancel
        self._deltas: queue.SimpleQueue[Delta | BaseException] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self.waiter: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        """Event loop that reads the news, and the event for which it waits."""
        self._num_open = len(sequences)

    def __iter__(self) -> Iterator[Delta]:
        """Waits for news until all texts have ended."""
        return self.news(lambda: False)

    def news(self, stopped: Callable[[], bool]) -> Iterator[Delta]:
        """Waits for news as `__iter__`; cancels all texts once a function says so."""
        # Whoever iterates again must not wait for news that nobody writes.
        while self._num_open:
            if stopped():
                self.cancel()
            try:
                delta = self._failure or self._deltas.get(timeout=_ASK_SECONDS)
            except queue.Empty:
                continue
            yield self._take(delta)

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """Waits for news as `__iter__` does, without blocking the event loop."""
        changed = asyncio.Event()
        self.waiter = asyncio.get_running_loop(), changed
        while self._num_open:
            changed.clear()
            try:
                delta = self._failure or self._deltas.get_nowait()
            except queue.Empty:
                await changed.wait()
            else:
                yield self._take(delta)

    def cancel(self) -> None:
        """Ends all texts, with `abort` as the reason."""
        self._cancel(self)

    def _take(self, delta: Delta | BaseException) -> Delta:
        """Returns a delta, or raises what ended the engine."""
        if isinstance(delta, BaseException):
            self._failure = delta
            raise delta
        self._num_open -= delta.finish_reason is not None
        return delta

    def add(self, delta: Delta | BaseException) -> None:
        """Adds news, from the thread of the engine; `wake` follows."""
        self._deltas.put(delta)

    def tell(self, delta: Delta | BaseException) -> None:
        """Adds news and wakes the reader."""
        self.add(delta)
        wake([self])

    def read(self, news: News) -> Delta:
        """Turns what a pass adds to a sample into a delta.

        A stop string cuts the text, and is the reason of the end.
        """
        text, ids, reason = self._read_text(news)
        prompt, num_best = news.prompt, self.sampling.prompt_logprobs or 0
        if prompt is not None:
            pairs = prompt.best_ids[:, :num_best], prompt.best_logprobs[:, :num_best]
            prompt = Logprobs(prompt.logprobs, *pairs)
        size, best = len(ids), self.sampling.num_logprobs or 0
        return Delta(
            news.sequence.request.sample,
            text,
            ids,
            news.logprobs[:size],
            news.best_ids[:size, :best],
            news.best_logprobs[:size, :best],
            reason,
            prompt,
            self._cut_experts(news, size) if reason else None,
        )

    def end(self, sequence: Sequence) -> Delta:
        """Returns the last delta of a text that ends early, with the text so far."""
        request: Request = sequence.request
        text, nothing = "", np.zeros(0, np.float32)
        if self._streams and self._tells_at_end(sequence):
            written = _before(sequence.generated, self.sampling.end_ids)
            text = self._streams[request.sample].write(written)
        best = np.zeros((0, 0), np.int32), np.zeros((0, 0), np.float32)
        return Delta(request.sample, text, [], nothing, *best, "abort")

    def _tells_at_end(self, sequence: Sequence) -> bool:
        """Whether a text is decoded when it is complete.

        Nobody reads it token by token, and no string ends it: one token after another
        would cost the host more time than a small model needs for the tokens.
        """
        return not (sequence.is_streamed or self.sampling.stop)

    def _read_text(self, news: News) -> tuple[str, list[int], str | None]:
        """Returns the new text, the new tokens, and the reason of the end if any."""
        sequence, ids, reason = news.sequence, news.tokens, news.sequence.finish_reason
        if not self._streams:
            return "", ids, reason
        stream, ends = self._streams[sequence.request.sample], self.sampling.end_ids
        is_over = reason is not None and self.sampling.max_new_tokens > 0
        text = ""
        if self._tells_at_end(sequence):
            if is_over:
                text = stream.write(_before(sequence.generated, ends))
            return text, ids, reason
        for number, token in enumerate(_before(ids, ends), start=1):
            piece, is_stopped = stream.push(token)
            text += piece
            if is_stopped:
                return text + stream.flush(), ids[:number], "stop"
        return text + (stream.flush() if is_over else ""), ids, reason

    def _cut_experts(self, news: News, size: int) -> np.ndarray | None:
        """Copies the experts of a text that ends with the first `size` new tokens."""
        if news.experts is None:
            return None
        # Of a longer array, which is freed.
        return news.experts[: len(news.experts) - len(news.tokens) + size].copy()


def _before(ids: list[int], end_ids: Iterable[int] | None) -> list[int]:
    """Returns the ids before an end id, which is no part of the text."""
    ends = frozenset(end_ids or ())
    return [*itertools.takewhile(lambda token: token not in ends, ids)]


def wake(tickets: Iterable[Ticket]) -> None:
    """Wakes the readers of tickets, each event loop once for all of its readers."""
    waiting = collections.defaultdict(list)
    for ticket in tickets:
        if ticket.waiter is not None:
            loop, changed = ticket.waiter
            waiting[loop].append(changed)
    for loop, events in waiting.items():
        # The loop may be closed, with texts on the way that nobody reads.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(_set_all, events)


def _set_all(events: list[asyncio.Event]) -> None:
    """Sets events, in the thread of the event loop."""
    for event in events:
        event.set()


def unreadable(sequence: Sequence, cause: Exception) -> DataError:
    """Returns the error of a text whose tokens cannot be decoded."""
    reason = f"{type(cause).__name__}: {cause}"
    problem = f"has tokens that the tokenizer cannot decode ({reason})"
    remedy = "check the tokenizer"
    error = DataError(Problem("sample", sequence.request.sample, problem, remedy))
    error.__cause__ = cause
    return error
