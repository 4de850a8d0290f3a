"""A server of a tiny model in a process of its own, and raw clients for it."""

import contextlib
import http.client
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import threading
import urllib.parse

from tests.support import programs

ROOT = pathlib.Path(__file__).parents[2]
SECONDS = 100
"""A client that waits longer hangs."""
JSON = {"content-type": "application/json"}


class Served:
    """A server that runs, and what it has printed."""

    def __init__(self, program, said, address, key=""):
        self.program, self.said, self.address = program, said, address
        self.key = {"authorization": f"Bearer {key}"} if key else {}
        url = urllib.parse.urlsplit(address)
        self.host, self.port = url.hostname, url.port

    def request(self, method, path, body=None, headers=None):
        """The status, the headers and the body of a reply."""
        with self.connected() as connection:
            connection.request(method, path, body, self.key | (headers or {}))
            reply = connection.getresponse()
            return reply.status, reply.headers, reply.read().decode()

    @contextlib.contextmanager
    def connected(self):
        connection = http.client.HTTPConnection(self.host, self.port, timeout=SECONDS)
        with contextlib.closing(connection):
            yield connection

    def ask(self, path="/v1/completions", headers=None, **fields):
        """The status and the value of a reply to JSON."""
        sent = json.dumps(fields).encode()
        headers = JSON | (headers or {})
        status, _, text = self.request("POST", path, sent, headers)
        return status, json.loads(text)

    def get(self, path, headers=None):
        status, _, text = self.request("GET", path, headers=headers)
        return status, text

    def events(self, path="/v1/completions", **fields):
        """The events of a stream, without the last."""
        sent = json.dumps(fields | {"stream": True}).encode()
        status, headers, text = self.request("POST", path, sent, JSON)
        assert status == 200, text
        assert headers["content-type"].startswith("text/event-stream")
        *events, last, nothing = text.split("\n\n")
        assert (last, nothing) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]

    def metrics(self):
        """Numbers of /metrics by name with labels."""
        status, text = self.get("/metrics")
        assert status == 200
        lines = [x for x in text.splitlines() if not x.startswith("#")]
        return {x.rpartition(" ")[0]: float(x.rpartition(" ")[2]) for x in lines}

    def is_idle(self):
        """Whether no request, row or page is in use."""
        found = self.metrics()
        names = "requests_active", "rows_running", "rows_waiting", "pages_live"
        return not any(found[f"zjax_{name}"] for name in names)

    def open_stream(self, receive_bytes=0, **fields):
        """A socket to which a stream is sent, which nobody reads so far."""
        sent = json.dumps(fields | {"stream": True}).encode()
        found = socket.socket()
        found.settimeout(SECONDS)
        if receive_bytes:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        found.connect((self.host, self.port))
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        head += "Connection: close\r\n"
        head += "".join(f"{x}: {y}\r\n" for x, y in (JSON | self.key).items())
        head += f"Content-Length: {len(sent)}\r\n\r\n"
        found.sendall(head.encode() + sent)
        return found


@contextlib.contextmanager
def served(*words, key=""):
    """Yields a server that `python -m zjax serve` starts, and ends it in any case."""
    command = [sys.executable, "-m", "zjax", "serve", "--port=0", *words]
    how = {"env": os.environ | {"ZJAX_API_KEY": key}, "cwd": ROOT}
    how |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with programs.started(command, **how) as program:
        late = threading.Timer(SECONDS, program.kill)
        late.start()
        said = []
        for line in program.stdout:
            said.append(line)
            if line.startswith("try: "):
                break
        late.cancel()
        found = re.search(r"at (http://\S+)/v1 ", "".join(said))
        assert found, "".join(said)
        # Whatever it prints later must not block it.
        rest = threading.Thread(target=lambda: said.extend(program.stdout), daemon=True)
        rest.start()
        yield Served(program, said, found[1], key)
