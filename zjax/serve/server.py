"""Server: an address, an event loop, and a drain at the end."""

import asyncio
import concurrent.futures
import contextlib
import importlib.util
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

from absl import logging

from zjax.errors import ConfigError, Problem, check_installed
from zjax.generation.generator import Generator
from zjax.serve.app import make_app
from zjax.serve.service import Service
from zjax.serve.settings import Settings

_SEND_BYTES = 1 << 17
"""Bytes that the system holds for a client, beside the bound of the settings."""
_KEEP_SECONDS = 60
"""Seconds that a connection stays open between requests."""
_PATIENCE = 120_000
"""Milliseconds after which the system closes a connection that takes nothing."""
_BACKLOG = 1024
LOCAL = Settings()
_CLOSE_SECONDS = 2
"""Seconds that connections have to close behind the drain."""


def check_packages() -> None:
    """Refuses to serve without the packages of the extra `serve`."""
    for name in ("starlette", "uvicorn", "prometheus_client"):
        check_installed(name)


class Server:
    """A server of one generator, from a bound address on.

    Args:
        generator: Generator; the caller closes it.
        settings: Address, key and limits.

    Raises:
        ConfigError: The address cannot be listened at.
        PackageError: starlette, uvicorn or prometheus_client is not installed.
    """

    def __init__(self, generator: Generator, settings: Settings):
        check_installed("uvicorn")
        self._service = Service(generator, settings)
        self._app, self._settings = make_app(self._service), settings
        self._listener = listen(settings)
        self._begin_drain: Callable[[], object] = lambda: None

    @property
    def address(self) -> str:
        """URL of the server."""
        host, port = self._listener.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def run(self, ready: Callable[[], Any] = lambda: None) -> None:
        """Serves until `stop`, SIGTERM or Ctrl-C, and drains.

        `ready` is called once requests are taken.
        """
        try:
            with asyncio.Runner(loop_factory=_loop_factory()) as runner:
                runner.run(self._run(ready))
        finally:
            self._listener.close()
            self._service.close()

    def stop(self) -> None:
        """Begins to drain, from any thread; a second call ends requests at once."""
        self._begin_drain()

    async def _run(self, ready: Callable[[], Any]) -> None:
        """Serves until it is stopped."""
        import uvicorn

        http = "httptools" if _is_installed("httptools") else "h11"
        loop, asks = asyncio.get_running_loop(), [asyncio.Event(), asyncio.Event()]

        logging.info("server: events by %s, HTTP by %s", type(loop).__module__, http)

        def ask() -> None:
            # The first asks for a drain, the second for the end of the drain.
            next((x for x in asks if not x.is_set()), asks[-1]).set()

        self._begin_drain = lambda: loop.call_soon_threadsafe(ask)
        server = uvicorn.Server(
            uvicorn.Config(
                self._app,
                http=http,
                lifespan="off",
                ws="none",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=_KEEP_SECONDS,
                timeout_graceful_shutdown=_CLOSE_SECONDS,
                backlog=_BACKLOG,
            )
        )
        # The default raises the signal again, which the exit status would show.
        server.handle_exit = lambda sig, frame: self.stop()
        serving = asyncio.ensure_future(server.serve([self._listener]))
        asked = asyncio.ensure_future(asks[0].wait())
        loop.call_soon(ready)
        await asyncio.wait({serving, asked}, return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        if not serving.done():
            await self._service.drain(asks[1])
        server.should_exit = True
        await serving


def _is_installed(name: str) -> bool:
    """Tells whether a package that makes a server faster is installed."""
    return importlib.util.find_spec(name) is not None


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Returns what makes the event loop: uvloop where it is installed."""
    if not _is_installed("uvloop"):
        return None
    import uvloop

    return uvloop.new_event_loop


def listen(settings: Settings) -> socket.socket:
    """Binds the address of a server.

    Raises:
        ConfigError: The address cannot be bound.
    """
    host, port = settings.host, settings.port
    try:
        family, kind, number, _, place = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, number)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _PATIENCE)
            listener.bind(place)
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        reason = error.strerror or error
        problem = f"cannot be listened at ({reason})"
        remedy = "use another port or host, or 0 for a free port"
        address = f"{host}:{port}"
        raise ConfigError(Problem("host:port", address, problem, remedy)) from error
    return listener


def serve(
    generator: Generator,
    settings: Settings = LOCAL,
    *,
    ready: Callable[[str], Any] = lambda address: None,
) -> None:
    """Serves OpenAI's API until SIGTERM or Ctrl-C, and drains.

    Args:
        generator: Generator; the caller closes it.
        settings: Address, key and limits.
        ready: Function of the URL, called once requests are taken.

    Raises:
        ConfigError: The address cannot be listened at.
        PackageError: starlette, uvicorn or prometheus_client is not installed.
    """
    server = Server(generator, settings)
    server.run(lambda: ready(server.address))


@contextlib.contextmanager
def serving(generator: Generator, settings: Settings = LOCAL) -> Iterator[str]:
    """Serves in a thread while a block runs; yields the URL.

    Args:
        generator: Generator; the caller closes it.
        settings: Address, key and limits.

    Raises:
        ConfigError: The address cannot be listened at.
        PackageError: starlette, uvicorn or prometheus_client is not installed.
        Exception: What ended the server, before the block or behind it.
    """
    server, is_ready = Server(generator, settings), threading.Event()
    with concurrent.futures.ThreadPoolExecutor(1, "zjax-server") as threads:
        running = threads.submit(server.run, is_ready.set)
        # A server that fails before it takes requests must not be waited for.
        running.add_done_callback(lambda _: is_ready.set())
        is_ready.wait()
        if running.done():
            running.result()
        try:
            yield server.address
        finally:
            if not running.done():
                server.stop()
        running.result()
