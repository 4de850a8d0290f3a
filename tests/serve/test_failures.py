"""A generator that stalls or fails is told to clients, and by the health."""

import http.client
import json
import threading
import urllib.parse

import pytest

from tests.support import programs
from tests.support.serving import JSON, SECONDS, Served
from zjax.data.tokenizer import make_bytes
from zjax.errors import DataError, Problem
from zjax.generation.generator import Generator
from zjax.generation.scheduler import Metrics
from zjax.generation.sequence import Sequence
from zjax.generation.tickets import Ticket
from zjax.generation.worker import Served as State
from zjax.serve import Settings, serving
from zjax.serve.server import Server


class Stalled(Generator):
    """A generator that writes nothing, or fails at once."""

    tokenizer = make_bytes()
    metrics = State(Metrics(*[0] * 8), 0, 0)
    max_length = 100

    def __init__(self, failure=None):
        self.failure, self.cancelled = failure, []

    def submit(self, prompt, sampling, **_):
        ticket = Ticket(sampling, [1], [Sequence([1], 1)], [], self.cancelled.append)
        if self.failure is not None:
            ticket.tell(self.failure)
        return ticket


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_request_ends_after_its_time(is_streamed):
    generator = Stalled()
    with serving(generator, Settings(port=0, request_seconds=0.2)) as address:
        server = Served(None, [], address)
        body = json.dumps({"prompt": "a", "stream": is_streamed}).encode()
        status, _, text = server.request("POST", "/v1/completions", body, JSON)
        programs.wait_until(lambda: not server.metrics()["zjax_requests_active"])
        counted = server.metrics()
    assert status == (200 if is_streamed else 504)
    error = json.loads(text.removeprefix("data: "))["error"]
    wanted = "the request took longer than 0.2 s; ask for less"
    assert (error["message"], error["code"]) == (wanted, "timeout")
    assert len(generator.cancelled) == 1
    path = 'endpoint="/v1/completions"'
    assert counted[f'zjax_requests_total{{{path},status="504"}}'] == 1


class Slow(Stalled):
    """A generator that reads prompts as slowly as a test wants."""

    def __init__(self):
        super().__init__()
        self.is_asked, self.may_read = threading.Event(), threading.Event()

    def submit(self, *given, **settings):
        self.is_asked.set()
        assert self.may_read.wait(SECONDS)
        return super().submit(*given, **settings)


def test_a_client_that_leaves_before_its_prompt_is_read_gets_no_text():
    """Fails if texts are written that began after everybody had left."""
    generator = Slow()
    with serving(generator, Settings(port=0)) as address:
        server = Served(None, [], address)
        with server.open_stream(prompt="a"):
            assert generator.is_asked.wait(SECONDS)
        programs.wait_until(lambda: not server.metrics()["zjax_requests_active"])
        assert generator.cancelled == []
        generator.may_read.set()
        programs.wait_until(lambda: len(generator.cancelled) == 1)


def test_a_generator_that_failed_is_told():
    """Fails if a server whose engine has ended looks well, or shows its insides."""
    generator = Stalled(RuntimeError("secret weights"))
    with serving(generator, Settings(port=0)) as address:
        server = Served(None, [], address)
        assert server.get("/health")[0] == 200
        status, reply = server.ask(prompt="a")
        assert (status, reply["error"]["code"]) == (500, "server_failed")
        assert "secret" not in reply["error"]["message"]
        assert server.get("/health") == (503, '{"status":"failed"}')


def test_a_text_that_failed_alone_leaves_the_server_well():
    """Fails if a text that cannot be decoded looks like the end of the engine."""
    error = DataError(Problem("sample", 0, "cannot be decoded", "check it"))
    with serving(Stalled(error), Settings(port=0)) as address:
        server = Served(None, [], address)
        assert server.ask(prompt="a")[0] == 500
        assert server.get("/health")[0] == 200


def test_a_server_of_a_thread_ends_with_its_block():
    """Fails if requests outlive the block, or the address is still taken."""
    with serving(Stalled(), Settings(port=0, drain_seconds=0.0)) as address:
        url = urllib.parse.urlsplit(address)
        connection = http.client.HTTPConnection(url.hostname, url.port, timeout=SECONDS)
        connection.request("POST", "/v1/completions", b'{"prompt": "a"}', JSON)
        server = Served(None, [], address)
        programs.wait_until(lambda: server.metrics()["zjax_requests_active"] == 1)
    reply = connection.getresponse()
    assert (reply.status, json.loads(reply.read())["error"]["code"]) == (
        503,
        "server_ends",
    )
    connection.close()
    with serving(Stalled(), Settings(port=url.port)) as again:
        assert again == address


def test_a_server_that_fails_before_it_is_ready_is_not_waited_for(monkeypatch):
    """Fails if the block waits for a server that will never take requests."""

    async def fail(*_):
        raise RuntimeError("no event loop")

    monkeypatch.setattr(Server, "_run", fail)
    found = []

    def enter():
        try:
            with serving(Stalled(), Settings(port=0)):
                found.append("entered")
        except RuntimeError as error:
            found.append(str(error))

    thread = threading.Thread(target=enter, daemon=True)
    thread.start()
    thread.join(timeout=SECONDS)
    assert found == ["no event loop"]
