"""A server that is told to end lets requests finish, for some time."""

import contextlib
import json
import signal

import pytest

from tests.support import programs, small_llama
from tests.support.serving import served

ENDLESS = {"prompt": "a", "ignore_eos": True, "max_tokens": 1_000, "n": 100}
ENDS = '"message":"the server ends; ask again later"'


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("drained") / "llama"
    return small_llama.write(folder)


@contextlib.contextmanager
def drained(folder, seconds):
    words = f"--model={folder}", f"--drain_seconds={seconds}", "--max_rows=8"
    with served(*words, "--max_unread_bytes=1000000000") as server:
        yield server


def begin(server, **fields):
    stream = server.open_stream(**fields)
    assert stream.recv(12) == b"HTTP/1.1 200"
    return stream


def end(server, number):
    server.program.send_signal(number)
    programs.wait_until(lambda: server.get("/health")[0] == 503, server.program)


def read_all(stream):
    text = b""
    while piece := stream.recv(1 << 16):
        text += piece
    stream.close()
    return text.decode()


def status_of(server):
    """Exit status of a server that prints no trace of a fault."""
    status = server.program.wait(programs.HANG_SECONDS)
    assert "Traceback" not in "".join(server.said)
    return status


def test_requests_finish_until_a_second_signal(folder):
    """Fails if SIGTERM cuts a text short, or Ctrl-C twice waits for the longest."""
    with drained(folder, 100_000) as server:
        short = begin(server, **(ENDLESS | {"max_tokens": 30, "n": 1}))
        long = begin(server, **ENDLESS)
        end(server, signal.SIGTERM)
        assert json.loads(server.get("/health")[1]) == {"status": "draining"}
        status, reply = server.ask(prompt="a")
        assert (status, reply["error"]["code"]) == (503, "server_ends")
        assert "data: [DONE]\n\n" in read_all(short)
        assert server.program.poll() is None
        server.program.send_signal(signal.SIGINT)
        text = read_all(long)
        assert ENDS in text and "[DONE]" not in text
        assert status_of(server) == 0


def test_requests_that_take_too_long_are_ended_and_told(folder):
    """Fails if a drain waits for a text without an end."""
    with drained(folder, 0.5) as server:
        long = begin(server, **ENDLESS)
        end(server, signal.SIGTERM)
        text = read_all(long)
        assert ENDS in text and "[DONE]" not in text
        assert status_of(server) == 0
