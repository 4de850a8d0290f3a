"""Outbox: bytes for a client that reads slowly, up to a bound."""

import asyncio


class Outbox:
    """Bytes between a writer that never waits and a reader that does.

    Args:
        max_bytes: Most bytes that wait, beyond which nothing more is taken.

    Example:
        >>> async def show():
        ...     outbox = Outbox(4)
        ...     print(outbox.put(b"ab"), outbox.put(b"cd"), outbox.put(b"e"))
        ...     print(await outbox.take())
        ...     outbox.close()
        ...     print(await outbox.take())
        >>> asyncio.run(show())
        True True False
        b'abcd'
        b''
    """

    def __init__(self, max_bytes: int):
        self._pieces, self._num_bytes = list[bytes](), 0
        self._max_bytes, self._is_closed = max_bytes, False
        self._changed = asyncio.Event()

    def put(self, piece: bytes) -> bool:
        """Adds bytes; returns whether there was room."""
        if self._num_bytes + len(piece) > self._max_bytes:
            return False
        self._pieces.append(piece)
        self._num_bytes += len(piece)
        self._changed.set()
        return True

    def close(self) -> None:
        """Ends the bytes that the reader takes."""
        self._is_closed = True
        self._changed.set()

    async def take(self) -> bytes:
        """Waits for bytes, and returns all; none at the end."""
        while not self._pieces and not self._is_closed:
            self._changed.clear()
            await self._changed.wait()
        found = b"".join(self._pieces)
        self._pieces, self._num_bytes = [], 0
        return found
