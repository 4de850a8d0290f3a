"""Answers: texts of one request as one reply, or as a stream of chunks."""

import asyncio
import functools
from collections.abc import Iterator
from typing import Any

from zjax.generation.tickets import Delta
from zjax.serve.exchange import EVENTS, Exchange, TextEvents, write_event
from zjax.serve.outbox import Outbox
from zjax.serve.refusals import Refusal
from zjax.serve.replies import Choice, Piece, Reply, count_usage, join
from zjax.serve.requests import Asked
from zjax.serve.service import Active, Endpoint, Service, cancel_all

_DONE = b"data: [DONE]\n\n"
_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class Answer:
    """The answer to one request, with texts on the way.

    Args:
        service: Service that reads the texts.
        endpoint: Endpoint of the request.
        active: The request.
        asked: The request, as it was read.
    """

    def __init__(
        self, service: Service, endpoint: Endpoint, active: Active, asked: Asked
    ):
        self._service, self._active, self._asked = service, active, asked
        has_logprobs = asked.sampling.num_logprobs is not None
        name = service.settings.served_name
        self._reply = Reply(endpoint.form, name, has_logprobs=has_logprobs)
        self._num_samples = asked.sampling.num_samples
        self._held: list[list[Delta]] = [[] for _ in asked.prompts]
        """News of the texts of each prompt that wait for the scores of the prompt."""
        self._choices = [
            Choice(
                index,
                service.tokenizer,
                active.tickets[index // self._num_samples].prompt_ids,
                has_logprobs=has_logprobs,
                echo=self._echo_of(index),
            )
            for index in range(len(asked.prompts) * self._num_samples)
        ]

    async def send(self, exchange: Exchange) -> None:
        """Sends the answer."""
        if self._asked.is_streamed:
            await self._stream(exchange)
            return
        pieces: list[list[Piece]] = [[] for _ in self._choices]
        for piece in self._first_pieces():
            pieces[piece.choice].append(piece)

        def take(number: int, delta: Delta) -> None:
            for piece in self._pieces(number, delta):
                pieces[piece.choice].append(piece)

        await self._service.read(self._active, take)
        texts = [*map(join, pieces)]
        await exchange.reply(200, self._reply.whole(texts, self._usage()))

    async def _stream(self, exchange: Exchange) -> None:
        """Sends news as they come; ends the request if too much is not read."""
        # News of a prompt go to all of its texts at once.
        most = self._service.settings.max_unread_bytes * len(self._choices)
        outbox = Outbox(most)
        filling = asyncio.ensure_future(self._fill(outbox))
        try:
            await exchange.begin(200, EVENTS, _STREAM_HEADERS)
            while data := await outbox.take():
                await exchange.write(data)
            await filling
        finally:
            filling.cancel()
        await exchange.write(_DONE, is_last=True)

    async def _fill(self, outbox: Outbox) -> None:
        """Writes all chunks into an outbox."""

        def put(event: bytes) -> None:
            if not outbox.put(event):
                message = "the stream was not read fast enough; read it as it comes"
                # The client is told when it reads on; the texts end now.
                cancel_all(self._active.tickets)
                raise Refusal(429, message, code="slow_reader")

        def take(number: int, delta: Delta) -> None:
            for piece in self._pieces(number, delta):
                if piece.text or piece.tokens or piece.finish_reason:
                    put(self._write(piece))

        try:
            for choice in self._choices:
                if (chunk := self._reply.first(choice.index)) is not None:
                    put(write_event(self._usage_open(chunk)))
            for piece in self._first_pieces():
                put(self._write(piece))
            await self._service.read(self._active, take)
            if self._asked.has_usage:
                put(write_event(self._reply.last(self._usage())))
        finally:
            outbox.close()

    @functools.cached_property
    def _events(self) -> list[TextEvents]:
        """Events of each text that have nothing new besides text."""

        def events_of(index: int) -> TextEvents:
            def make(text: str) -> dict[str, Any]:
                return self._usage_open(self._reply.chunk(Piece(index, text, [])))

            return TextEvents(make)

        return [events_of(choice.index) for choice in self._choices]

    def _write(self, piece: Piece) -> bytes:
        """Writes news of a text as an event."""
        if piece.tokens or piece.finish_reason or not piece.text:
            return write_event(self._usage_open(self._reply.chunk(piece)))
        return self._events[piece.choice].write(piece.text)

    def _usage_open(self, chunk: dict[str, Any]) -> dict[str, Any]:
        """Adds the usage, which only the last chunk knows, where a client wants it."""
        return chunk | {"usage": None} if self._asked.has_usage else chunk

    def _first_pieces(self) -> Iterator[Piece]:
        """Yields the prompts with which texts begin."""
        for choice in self._choices:
            if (piece := choice.begin()) is not None:
                yield piece

    def _pieces(self, number: int, delta: Delta) -> Iterator[Piece]:
        """Yields the news of one text of a ticket, and of the prompt for all.

        A data shard may write a sample before another has scored the prompt.
        """
        first, held = number * self._num_samples, self._held[number]
        choices = self._choices[first : first + self._num_samples]
        if delta.prompt is not None:
            for choice in choices:
                yield choice.read_prompt(delta.prompt)
        held.append(delta)
        if choices[0].is_begun:
            yield from [choices[each.sample].read(each) for each in held]
            held.clear()

    def _echo_of(self, index: int) -> str | None:
        """Returns the prompt with which a text of the reply begins, if it does."""
        if not self._asked.echoes:
            return None
        number = index // self._num_samples
        prompt = self._asked.prompts[number]
        if isinstance(prompt, str):
            return prompt
        return self._service.tokenizer.decode(self._active.tickets[number].prompt_ids)

    def _usage(self) -> dict[str, int]:
        """Counts the tokens of prompts and texts."""
        num_read = sum(len(ticket.prompt_ids) for ticket in self._active.tickets)
        return count_usage(num_read, sum(x.num_tokens for x in self._choices))
