"""Exchange: one request over HTTP and the reply, as ASGI passes both."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, MutableMapping
from typing import Any

from zjax.serve.refusals import Refusal, encode

JSON = "application/json"
EVENTS = "text/event-stream; charset=utf-8"
_LAST_SECONDS = 1.0
"""Seconds that a client has to take the refusal that ends a stream."""

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class ClientLeft(Exception):
    """The client has closed the connection before the reply was complete."""


class Exchange:
    """Reads the body of a request, and writes the reply.

    Args:
        scope: Scope of ASGI.
        receive: Function of ASGI that waits for a message.
        send: Function of ASGI that sends a message.
    """

    def __init__(self, scope: Mapping[str, Any], receive: Receive, send: Send):
        self._receive, self._send = receive, send
        self.headers = {
            name.decode("latin-1").lower(): value.decode("latin-1")
            for name, value in scope["headers"]
        }
        self.status, self._is_complete = 0, False
        """Status of the reply; 0 before the reply begins."""

    async def read_body(self, max_bytes: int) -> bytes:
        """Reads the body, or refuses a longer one as soon as possible."""
        too_large = Refusal(
            413,
            f"the body has more than {max_bytes} bytes; send fewer",
            code="request_too_large",
        )
        told = self.headers.get("content-length", "")
        if told.isdecimal() and int(told) > max_bytes:
            raise too_large
        body, is_more = bytearray(), True
        while is_more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            body += message.get("body", b"")
            if len(body) > max_bytes:
                raise too_large
            is_more = message.get("more_body", False)
        return bytes(body)

    async def unless_left(self, work: Coroutine[Any, Any, None]) -> None:
        """Does some work, and gives it up if the client leaves meanwhile."""
        task = asyncio.ensure_future(work)
        left = asyncio.ensure_future(self._wait_until_left())
        try:
            await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done() and not self._is_complete:
                raise ClientLeft
            await task
        finally:
            for each in (task, left):
                each.cancel()
            await asyncio.gather(task, left, return_exceptions=True)

    async def _wait_until_left(self) -> None:
        """Waits until the client closes the connection."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def begin(
        self, status: int, content_type: str, headers: Mapping[str, str]
    ) -> None:
        """Sends status and headers."""
        self.status = status
        named = {"content-type": content_type, **headers}
        pairs = [(x.encode("latin-1"), y.encode("latin-1")) for x, y in named.items()]
        start = {"type": "http.response.start", "status": status, "headers": pairs}
        await self._send(start)

    async def write(self, data: bytes, *, is_last: bool = False) -> None:
        """Sends a part of the body, as soon as the client takes it."""
        self._is_complete |= is_last
        body = {"type": "http.response.body", "body": data, "more_body": not is_last}
        await self._send(body)

    async def reply(
        self, status: int, value: Any, headers: Mapping[str, str] | None = None
    ) -> None:
        """Sends a whole reply in JSON."""
        body = encode(value)
        sized = {"content-length": str(len(body)), **(headers or {})}
        await self.begin(status, JSON, sized)
        await self.write(body, is_last=True)

    async def refuse(self, refusal: Refusal) -> None:
        """Sends a refusal: as the reply, or as the end of a stream."""
        if not self.status:
            await self.reply(refusal.status, refusal.body, refusal.headers)
            return
        # A client that reads nothing would keep the request for ever.
        async with asyncio.timeout(_LAST_SECONDS):
            await self.write(write_event(refusal.body), is_last=True)


def write_event(value: Any) -> bytes:
    r"""Writes a value as an event of a stream.

    Example:
        >>> write_event({"a": 1})
        b'data: {"a":1}\n\n'
    """
    return b"data: " + encode(value) + b"\n\n"


class TextEvents:
    r"""Writes events of a stream that differ in one text.

    Args:
        make: Function from a text to the value of an event, which has the text last.

    Example:
        >>> events = TextEvents(lambda text: {"index": 0, "text": text})
        >>> events.write('"a"')
        b'data: {"index":0,"text":"\\"a\\""}\n\n'
    """

    def __init__(self, make: Callable[[str], Any]):
        self._start, _, self._end = write_event(make(_TEXT)).rpartition(encode(_TEXT))

    def write(self, text: str) -> bytes:
        """Writes the event of a text; only the text is rendered."""
        return self._start + encode(text) + self._end


_TEXT = "text of an event"
