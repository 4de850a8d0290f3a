"""Application: the paths of the API, and the gate before them."""

import asyncio
import contextlib
import hmac
import time
from typing import Any

from absl import logging

from zjax.errors import check_installed
from zjax.serve.answer import Answer
from zjax.serve.exchange import JSON, ClientLeft, Exchange, Receive, Send
from zjax.serve.metrics import CONTENT_TYPE
from zjax.serve.refusals import CLIENT_LEFT, Refusal
from zjax.serve.service import ENDPOINTS, Active, Endpoint, Service
from zjax.serve.settings import Settings, is_loopback

HEALTH = "/health"
Scope = dict[str, Any]


def make_app(service: Service) -> "Gate":
    """Makes the application of a service, for any server of ASGI."""
    check_installed("starlette")
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    async def tell_health(request: Request) -> Response:
        is_well = not service.is_draining and service.failure is None
        state = "draining" if service.is_draining else "failed"
        status = {"status": "ok" if is_well else state}
        return JSONResponse(status, 200 if is_well else 503)

    async def tell_metrics(request: Request) -> Response:
        return Response(service.metrics.write(), media_type=CONTENT_TYPE)

    model = {
        "id": service.settings.served_name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "zjax",
        "max_model_len": service.generator.max_length,
    }

    async def list_models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [model]})

    async def show_model(request: Request) -> Response:
        if request.path_params["name"] != model["id"]:
            raise HTTPException(404)
        return JSONResponse(model)

    async def refuse_path(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)  # as the table below says
        path = request.url.path[:100]
        message = f"{request.method} {path} is not served; see docs/serving.md"
        body = Refusal(error.status_code, message).body
        return JSONResponse(body, error.status_code, error.headers)

    gets = {HEALTH: tell_health, "/metrics": tell_metrics, "/v1/models": list_models}
    gets["/v1/models/{name:path}"] = show_model
    posts = {each.path: Answering(service, each) for each in ENDPOINTS}
    routes = [Route(path, tell, methods=["GET"]) for path, tell in gets.items()]
    routes += [Route(path, each, methods=["POST"]) for path, each in posts.items()]
    paths = Starlette(routes=routes, exception_handlers={HTTPException: refuse_path})
    return Gate(paths, service.settings)


class Gate:
    """Lets requests pass that show the key, and that no web page has sent.

    A page in a local browser reaches a server without a key, too: under a name that
    leads here, or by a request that is not JSON.

    Args:
        app: Application of ASGI behind the gate.
        settings: Key and address of the server.
    """

    def __init__(self, app: Any, settings: Settings):
        self._app, self._key = app, settings.api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, or refuses it."""
        if scope["type"] == "http" and scope["path"] != HEALTH:
            exchange = Exchange(scope, receive, send)
            try:
                self._check(scope, exchange.headers)
            except Refusal as refusal:
                await exchange.refuse(refusal)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope, headers: dict[str, str]) -> None:
        """Refuses a request without the key, or by a web page."""
        if self._key:
            kind, _, key = headers.get("authorization", "").partition(" ")
            is_known = hmac.compare_digest(key.strip().encode(), self._key)
            if kind.lower() != "bearer" or not is_known:
                message = "the API key is missing or wrong; send 'Authorization: Bearer"
                code, asks = "invalid_api_key", {"www-authenticate": "Bearer"}
                raise Refusal(401, f"{message} KEY'", code=code, headers=asks)
        elif not is_loopback(_name_of(headers.get("host", "").lower())):
            message = "the Host is not of this machine; ask 127.0.0.1, or set a key"
            raise Refusal(403, message, code="host_not_allowed")
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if scope["method"] == "POST" and kind != JSON:
            message = f"Content-Type is {kind[:50]!r}; send {JSON}"
            raise Refusal(415, message, code="unsupported_media_type")


def _name_of(host: str) -> str:
    """Returns the address in a `Host` header, without the port.

    Example:
        >>> _name_of("[::1]:8000"), _name_of("localhost:80"), _name_of("127.0.0.1")
        ('::1', 'localhost', '127.0.0.1')
    """
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


class Answering:
    """Application of one endpoint that answers by texts.

    Args:
        service: Service that starts and reads the texts.
        endpoint: Endpoint of the path.
    """

    def __init__(self, service: Service, endpoint: Endpoint):
        self._service, self._endpoint = service, endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request, and counts it."""
        exchange, began = Exchange(scope, receive, send), time.perf_counter()
        status = 0
        try:
            status = await self._answer(exchange)
        except Exception as error:  # the client must get a reply whatever happens
            logging.exception("a request to %s failed", self._endpoint.path)
            message = f"the server failed ({type(error).__name__}); see the log there"
            status = await _tell(exchange, Refusal(500, message, code="server_failed"))
        finally:
            metrics = self._service.metrics
            metrics.seconds.observe(time.perf_counter() - began)
            metrics.requests.labels(self._endpoint.path, str(status)).inc()

    async def _answer(self, exchange: Exchange) -> int:
        """Answers within the time of a request; returns the status."""
        seconds = self._service.settings.request_seconds
        try:
            async with asyncio.timeout(seconds):
                with self._service.admit() as active:
                    body = await exchange.read_body(
                        self._service.settings.max_body_bytes
                    )
                    await exchange.unless_left(self._work(exchange, active, body))
            return exchange.status
        except ClientLeft:
            return CLIENT_LEFT
        except TimeoutError:
            message = f"the request took longer than {seconds:g} s; ask for less"
            return await _tell(exchange, Refusal(504, message, code="timeout"))
        except Refusal as refusal:
            return await _tell(exchange, refusal)

    async def _work(self, exchange: Exchange, active: Active, body: bytes) -> None:
        """Starts the texts of a request, and sends them."""
        asked = await self._service.start(active, self._endpoint, body)
        await Answer(self._service, self._endpoint, active, asked).send(exchange)


async def _tell(exchange: Exchange, refusal: Refusal) -> int:
    """Sends a refusal, and returns the status, also where nobody reads."""
    with contextlib.suppress(TimeoutError):
        await exchange.refuse(refusal)
    return refusal.status
