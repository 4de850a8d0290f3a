"""Service: requests of clients as tickets of a generator, within limits."""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from zjax.data.tokenizer import Tokenizer
from zjax.errors import ConfigError, DataError, Problem, ZjaxError
from zjax.generation.generator import Generator
from zjax.generation.lockstep import stream_problems
from zjax.generation.tickets import Delta, Ticket
from zjax.serve.fields import read_object
from zjax.serve.metrics import ServerMetrics
from zjax.serve.refusals import Refusal, refuse_error, refuse_problems
from zjax.serve.replies import CHAT, COMPLETION, Form
from zjax.serve.requests import (
    CHAT_NAMES,
    COMPLETION_NAMES,
    Asked,
    read_chat,
    read_completion,
)
from zjax.serve.settings import Settings


def refuse_late() -> Refusal:
    """Returns the refusal of a request that a drain does not wait for."""
    return Refusal(503, "the server ends; ask again later", code="server_ends")


class Endpoint(NamedTuple):
    """What one path reads and writes."""

    path: str
    read: Callable[[Mapping[str, Any], str, tuple[int, ...]], Asked]
    form: Form
    names: Mapping[str, str]
    """Fields of the path by the names of the generator."""


ENDPOINTS = (
    Endpoint("/v1/completions", read_completion, COMPLETION, COMPLETION_NAMES),
    Endpoint("/v1/chat/completions", read_chat, CHAT, CHAT_NAMES),
)


class Active:
    """A request that is being served by the current task."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.tickets: list[Ticket] = []
        self.refusal: Refusal | None = None
        """Why the request ends early."""
        self.task = asyncio.current_task()

    def stop(self, refusal: Refusal) -> None:
        """Ends the request now, for a reason that the client is told."""
        # The generator may be compiling, and would end the texts too late.
        if self.task is not None and self.refusal is None:
            self.refusal = refusal
            self.task.cancel()


def cancel_all(tickets: list[Ticket]) -> None:
    """Ends all texts of tickets."""
    for ticket in tickets:
        ticket.cancel()


class Service:
    """Admits requests, and reads the texts of each.

    Args:
        generator: Generator; the caller closes it.
        settings: Limits, and the name of the model.

    Raises:
        ConfigError: The generator has no tokenizer, or runs in several processes.
    """

    def __init__(self, generator: Generator, settings: Settings):
        if problems := [*stream_problems()]:
            raise ConfigError(*problems)
        if generator.tokenizer is None:
            problem, remedy = "is missing", "put a tokenizer.json beside the weights"
            raise ConfigError(Problem("tokenizer", None, problem, remedy))
        self.tokenizer: Tokenizer = generator.tokenizer
        self.generator, self.settings = generator, settings
        self.metrics = ServerMetrics(self._read_state)
        self.is_draining = False
        self.failure: Exception | None = None
        """What ended the generator."""
        self._active: set[Active] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        # One thread, as neither tokenizers nor templates are made for several.
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "zjax-requests")

    @contextlib.contextmanager
    def admit(self) -> Iterator[Active]:
        """Counts a request while it is served; ends the texts at an early exit."""
        if self.is_draining:
            raise refuse_late()
        most = self.settings.max_requests
        if len(self._active) >= most:
            message = f"the server has {most} requests already; ask again later"
            headers = {"retry-after": "1"}
            code = "rate_limit_exceeded"
            raise Refusal(429, message, code=code, headers=headers)
        active = Active()
        self._active.add(active)
        self.metrics.active.set(len(self._active))
        self._idle.clear()
        try:
            yield active
        except BaseException:
            cancel_all(active.tickets)
            if active.task is None or active.refusal is None:
                raise
            active.task.uncancel()
            raise active.refusal from None
        finally:
            self._active.discard(active)
            self.metrics.active.set(len(self._active))
            if not self._active:
                self._idle.set()

    async def start(self, active: Active, endpoint: Endpoint, body: bytes) -> Asked:
        """Reads a request, and starts the texts that it asks for."""
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._thread, self._start, endpoint, body)
        try:
            asked, active.tickets = await asyncio.shield(future)
        except asyncio.CancelledError:
            # The thread goes on, and starts texts that nobody wants.
            future.add_done_callback(_cancel_started)
            raise
        return asked

    def _start(self, endpoint: Endpoint, body: bytes) -> tuple[Asked, list[Ticket]]:
        """Reads a request and starts the texts, in the thread for requests."""
        name, end_ids = self.settings.served_name, self.tokenizer.end_ids
        asked = endpoint.read(read_object(body), name, end_ids)
        self._check_rows(asked)
        tickets: list[Ticket] = []
        try:
            for number, prompt in enumerate(asked.prompts):
                # Equal prompts of a request have texts of their own.
                seed = (asked.sampling.seed + number) % (1 << 32)
                sampling = dataclasses.replace(asked.sampling, seed=seed)
                tickets.append(
                    self.generator.submit(
                        prompt,
                        sampling,
                        special_tokens=asked.special_tokens,
                        is_streamed=asked.is_streamed,
                    )
                )
                self._check_length(endpoint, tickets[-1])
        except ZjaxError as error:
            cancel_all(tickets)
            raise refuse_error(error, endpoint.names) from None
        except BaseException:
            cancel_all(tickets)
            raise
        return asked, tickets

    def _check_rows(self, asked: Asked) -> None:
        """Refuses a request for more texts than the limit."""
        most = self.settings.max_request_rows
        number, each = len(asked.prompts), asked.sampling.num_samples
        if number * each > most:
            problem = f"for {number} prompts is more than {most} texts"
            raise refuse_problems(Problem("n", each, problem, "send smaller requests"))

    def _check_length(self, endpoint: Endpoint, ticket: Ticket) -> None:
        """Refuses a prompt that is longer than the limit."""
        most, number = self.settings.max_prompt_tokens, len(ticket.prompt_ids)
        if 0 < most < number:
            field = endpoint.names.get("prompt", "prompt")
            message = f"{field} has {number} tokens, more than {most}; shorten it"
            code = "context_length_exceeded"
            raise Refusal(400, message, param=field, code=code)

    async def read(self, active: Active, take: Callable[[int, Delta], None]) -> None:
        """Hands all news to a function, with the number of the ticket."""
        tasks = [
            asyncio.ensure_future(self._read(active, number, take))
            for number in range(len(active.tickets))
        ]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _read(
        self, active: Active, number: int, take: Callable[[int, Delta], None]
    ) -> None:
        """Hands the news of one ticket to a function, until all texts have ended."""
        news, last = aiter(active.tickets[number]), dict[int, float]()
        while True:
            try:
                delta = await anext(news)
            except StopAsyncIteration:
                return
            except DataError:  # of one text; the generator goes on
                raise
            except Exception as error:
                self.failure = error
                raise
            if delta.finish_reason == "abort":
                raise refuse_late()
            self._observe(delta, active.began, last)
            take(number, delta)

    def _observe(self, delta: Delta, began: float, last: dict[int, float]) -> None:
        """Counts the time of new tokens."""
        if not delta.ids:
            return
        now, before = time.perf_counter(), last.get(delta.sample)
        last[delta.sample] = now
        if before is None:
            self.metrics.first_token.observe(now - began)
        else:
            self.metrics.next_token.observe((now - before) / len(delta.ids))

    async def drain(self, stop: asyncio.Event) -> None:
        """Lets requests finish for some time, or until `stop`; then ends them."""
        self.is_draining = True
        waits = [asyncio.ensure_future(x.wait()) for x in (self._idle, stop)]
        await asyncio.wait(
            waits,
            timeout=self.settings.drain_seconds,
            return_when=asyncio.FIRST_COMPLETED,
        )
        for active in [*self._active]:
            active.stop(refuse_late())
        waits[1].cancel()
        # Time to tell the clients.
        await asyncio.wait(waits[:1], timeout=_TELL_SECONDS)
        waits[0].cancel()

    def close(self) -> None:
        """Ends the thread for requests."""
        self._thread.shutdown()

    def _read_state(self) -> dict[str, int]:
        """Returns the numbers of the generator by name."""
        served = self.generator.metrics
        own = {"num_written": served.num_written, "num_read": served.num_read}
        return served.scheduler._asdict() | own


_TELL_SECONDS = 2.0


def _cancel_started(future: "asyncio.Future[tuple[Asked, list[Ticket]]]") -> None:
    """Ends texts that were started for a client that had left."""
    if not future.cancelled() and future.exception() is None:
        cancel_all(future.result()[1])
