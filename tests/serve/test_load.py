"""A server under load: many clients, some that vanish, and some that do not read."""

import concurrent.futures
import json
import re
import socket
import threading

import pytest

from tests.support import programs, small_llama
from tests.support.serving import JSON, served

KEY = "a-key-of-many-letters"
NUM_CLIENTS = 200
LEFT = 'endpoint="/v1/completions",status="499"'
LONG = {"prompt": "a", "max_tokens": 1000, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("loaded") / "llama"
    small_llama.write(folder)
    words = "--max_rows=8", "--max_unread_bytes=20000", "--served_name=tiny"
    with served(f"--model={folder}", *words, key=KEY) as server:
        yield server
        programs.wait_until(server.is_idle, server.program)


def written(server):
    return server.metrics()["zjax_tokens_written_total"]


def num_left(server):
    """Requests whose clients left."""
    found = server.metrics()
    return found.get(f"zjax_requests_total{{{LEFT}}}", 0)


def test_a_key_is_asked_for(server):
    body = b'{"prompt": "a", "max_tokens": 1}'
    for shown in ("", "Bearer", "Bearer another-key-of-letters", f"Basic {KEY}"):
        headers = JSON | {"authorization": shown}
        found, sent, text = server.request("POST", "/v1/completions", body, headers)
        assert (found, sent["www-authenticate"]) == (401, "Bearer")
        assert json.loads(text)["error"]["code"] == "invalid_api_key"
        assert server.get("/metrics", {"authorization": shown})[0] == 401
        assert server.get("/v1/models", {"authorization": shown})[0] == 401
        assert server.get("/health", {"authorization": shown})[0] == 200
    assert server.request("POST", "/v1/completions", body, JSON)[0] == 200
    # A name of another machine, which may have forwarded the request.
    headers = JSON | {"host": "model.example"}
    assert server.request("POST", "/v1/completions", body, headers)[0] == 200
    assert KEY not in "".join(server.said)
    assert '-H "Authorization: Bearer $ZJAX_API_KEY"' in server.said[-1]


def test_many_clients_get_the_texts_that_they_asked_for(server):
    """Fails if replies are mixed up, lost, or wait for ever."""
    together = threading.Barrier(NUM_CLIENTS)

    def ask(number):
        prompt = f"client {number} " + "x" * (number % 7)
        asked = {"prompt": prompt, "max_tokens": 3 + number % 5, "ignore_eos": True}
        together.wait()
        if number % 2:
            events = server.events(echo=True, **asked)
            text = "".join(event["choices"][0]["text"] for event in events)
            return text.startswith(prompt) and len(text) > len(prompt)
        status, reply = server.ask(echo=True, **asked)
        usage = reply["usage"]
        assert (status, usage["prompt_tokens"]) == (200, len(prompt))
        assert usage["completion_tokens"] == asked["max_tokens"]
        return reply["choices"][0]["text"].startswith(prompt)

    with concurrent.futures.ThreadPoolExecutor(NUM_CLIENTS) as clients:
        assert all(clients.map(ask, range(NUM_CLIENTS)))
    programs.wait_until(server.is_idle, server.program)


def test_scores_of_a_prompt_reach_all_texts_of_a_stream(server):
    """Fails if the scores of several texts, which come at once, seem unread."""
    asked = {"prompt": "x" * 100, "echo": True, "logprobs": 2, "n": 4, "max_tokens": 2}
    events = server.events(ignore_eos=True, temperature=1, **asked)
    ends = [event["choices"][0]["finish_reason"] for event in events]
    assert ends.count("length") == 4
    numbers = [0] * 4
    for event in events:
        (choice,) = event["choices"]
        numbers[choice["index"]] += len(
            (choice["logprobs"] or {"tokens": []})["tokens"]
        )
    assert numbers == [102] * 4


def test_texts_of_clients_that_left_are_not_written(server):
    """Fails if a row runs on for a client that streams, waits or queues no more."""
    programs.wait_until(server.is_idle, server.program)
    before, left = written(server), num_left(server)
    streams = [server.open_stream(**LONG) for _ in range(12)]  # of which 8 have a row
    for stream in streams[:4]:
        stream.recv(100)
    body = json.dumps(LONG).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nContent-Length: {len(body)}\r\n"
    head += "".join(f"{x}: {y}\r\n" for x, y in (JSON | server.key).items())
    waiting = socket.create_connection((server.host, server.port))
    waiting.sendall(head.encode() + b"Host: localhost\r\n\r\n" + body)
    active = "zjax_requests_active"
    programs.wait_until(lambda: server.metrics()[active] == 13, server.program)
    for client in (*streams, waiting):
        client.close()
    programs.wait_until(server.is_idle, server.program)
    assert num_left(server) - left == 13
    assert written(server) - before < 13 * LONG["max_tokens"] / 4


def test_a_client_that_leaves_while_it_sends_is_forgotten(server):
    left = num_left(server)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n"
    head += "".join(f"{x}: {y}\r\n" for x, y in (JSON | server.key).items())
    with socket.create_connection((server.host, server.port)) as client:
        client.sendall(head.encode() + b'\r\n{"prompt"')
        active = "zjax_requests_active"
        programs.wait_until(lambda: server.metrics()[active] == 1, server.program)
    programs.wait_until(lambda: num_left(server) == left + 1, server.program)
    programs.wait_until(server.is_idle, server.program)


def test_a_client_that_does_not_read_is_cut_off_and_told(server):
    """Fails if the engine waits for the client, or keeps what is not read."""
    programs.wait_until(server.is_idle, server.program)
    before = written(server)
    wide = LONG | {"logprobs": 20, "n": 4}
    with server.open_stream(receive_bytes=4096, **wide) as stream:
        running = "zjax_rows_running"
        programs.wait_until(lambda: server.metrics()[running] == 4, server.program)
        # Others are served meanwhile.
        assert server.ask(prompt="a", max_tokens=2)[0] == 200
        programs.wait_until(lambda: server.metrics()[running] == 0, server.program)
        assert written(server) - before < 4 * LONG["max_tokens"] / 4
        text = b""
        while b"slow_reader" not in text[-1000:]:
            piece = stream.recv(1 << 16)
            assert piece
            text += piece
    *_, last = re.findall(rb"data: (.*)\n\n", text)
    error = json.loads(last)["error"]
    assert error["message"] == (
        "the stream was not read fast enough; read it as it comes"
    )
    assert b"[DONE]" not in text
    programs.wait_until(server.is_idle, server.program)
