"""Clients of a server that speaks OpenAI's API, all in one process of their own.

python examples/benchmarks/serve_clients.py --address=http://127.0.0.1:8000

Each client of a round asks for one text, as a stream, and all ask at once. Prompts are
random tokens, so that none is in the server's cache. First one client asks for a text
at a time, of an idle server. While all clients of a round get tokens, the server's
metrics are read: tokens of prompts and texts over those that its pages hold.
"""

import argparse
import asyncio
import dataclasses
import json
import re
import statistics
import time
import urllib.parse

import call_timing
import decode_cases
import timing

IDLE_WARM_UPS, IDLE_ROUNDS = 3, 7
IDLE_TOKENS = 8
POLL_SECONDS = 0.2
PAGE_SIZE = 64
"""Tokens of a page of the server's cache."""
EVENT = b"data: {"
NUM_WRITTEN = re.compile(rb'"completion_tokens":\s*(\d+)')


@dataclasses.dataclass
class Reply:
    """When the first token of a text came, in seconds of a clock; 0.0 before."""

    first: float = 0.0
    last: float = 0.0


@dataclasses.dataclass(frozen=True)
class Load:
    """What clients ask for.

    Args:
        address: URL of the server.
        vocab_size: Number of token ids.
        num_given: Tokens of each prompt.
        num_new: Tokens of each text.
    """

    address: str
    vocab_size: int
    num_given: int
    num_new: int

    def prompts(self, num_clients):
        """Random prompts, which no earlier round had."""
        seed = time.monotonic_ns()
        size = self.num_given, self.vocab_size
        return decode_cases.random_prompts(num_clients, *size, seed=seed)

    async def open(self, method, path, body=b""):
        """Sends a request; returns the reader and the writer of the connection."""
        url = urllib.parse.urlsplit(self.address)
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        head = f"{method} {path} HTTP/1.1", f"Host: {url.netloc}", "Connection: close"
        kind = "Content-Type: application/json", f"Content-Length: {len(body)}"
        writer.write("\r\n".join((*head, *kind, "", "")).encode() + body)
        return reader, writer

    async def ask(self, prompt, reply):
        """Reads the stream of a text to the end."""
        asked = {
            "prompt": prompt,
            "max_tokens": self.num_new,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        body = json.dumps(asked).encode()
        reader, writer = await self.open("POST", "/v1/completions", body)
        tail = b""
        while piece := await reader.read(1 << 16):
            tail = tail[-1000:] + piece
            if not reply.first and EVENT in tail:
                reply.first = time.perf_counter()
        reply.last = time.perf_counter()
        writer.close()
        found = NUM_WRITTEN.findall(tail)
        if not found or int(found[-1]) != self.num_new:
            raise SystemExit(f"a text ended early: {tail[-500:].decode()}")

    async def metrics(self):
        """Numbers of the server by name."""
        reader, writer = await self.open("GET", "/metrics")
        text = (await reader.read()).decode()
        writer.close()
        found = re.findall(r"^zjax_(\w+) (\S+)\r?$", text, re.MULTILINE)
        return {name: float(number) for name, number in found}


async def watch(load, replies, shares):
    """Notes the share of live tokens while all clients get tokens."""
    before = await load.metrics()
    while not all(reply.last for reply in replies):
        await asyncio.sleep(POLL_SECONDS)
        is_steady = all(reply.first for reply in replies)
        found = await load.metrics()
        if is_steady and not any(reply.last for reply in replies):
            names = "tokens_read_total", "tokens_written_total"
            num_live = sum(found[name] - before[name] for name in names)
            shares.append(num_live / (PAGE_SIZE * found["pages_live"]))


async def ask_together(load, num_clients, shares):
    """Seconds of a round, and until the first token of each client."""
    replies = [Reply() for _ in range(num_clients)]
    prompts = load.prompts(num_clients)
    watching = asyncio.ensure_future(watch(load, replies, shares))
    await asyncio.sleep(POLL_SECONDS)
    start = time.perf_counter()
    asking = [load.ask(*each) for each in zip(prompts, replies, strict=True)]
    await asyncio.gather(*asking)
    seconds = time.perf_counter() - start
    await watching
    return seconds, [reply.first - start for reply in replies]


async def measure(load, all_clients, num_warm_ups, num_rounds):
    """Metrics of an idle server, and of each number of clients."""
    brief, idle = dataclasses.replace(load, num_new=IDLE_TOKENS), []
    for _ in range(IDLE_WARM_UPS + IDLE_ROUNDS):
        reply = Reply()
        [prompt] = load.prompts(1)
        start = time.perf_counter()
        await brief.ask(prompt, reply)
        idle.append(reply.first - start)
    call_timing.note("first token of an idle server", idle[IDLE_WARM_UPS:])
    metrics = {"idle first_seconds": timing.spread(idle[IDLE_WARM_UPS:])}
    for num_clients in all_clients:
        seconds, firsts, shares = [], [], []
        for number in range(num_warm_ups + num_rounds):
            found = [] if number < num_warm_ups else shares
            spent, first = await ask_together(load, num_clients, found)
            call_timing.note(f"{num_clients} clients", [spent])
            if number >= num_warm_ups:
                seconds.append(spent)
                firsts.append(statistics.median(first))
        label = f"{num_clients} clients"
        num_tokens = num_clients * load.num_new
        metrics[f"{label} tokens/s"] = call_timing.rates(num_tokens, seconds)
        metrics[f"{label} first_seconds"] = timing.spread(firsts)
        if shares:
            metrics[f"{label} live share"] = timing.spread(shares)
    return metrics


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the load."""
    parser.add_argument("--clients", default="128", help="numbers of them, by commas")
    for name, number in (
        ("num_given", 512),
        ("num_new", 256),
        ("num_warm_ups", 2),
        ("num_rounds", 5),
    ):
        parser.add_argument(f"--{name}", type=int, default=number)


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--address", required=True, help="URL of the server")
    parser.add_argument("--vocab_size", type=int, required=True)
    add_flags(parser)
    given = parser.parse_args()
    load = Load(given.address, given.vocab_size, given.num_given, given.num_new)
    counts = map(int, given.clients.split(","))
    rounds = given.num_warm_ups, given.num_rounds
    metrics = asyncio.run(measure(load, counts, *rounds))
    call_timing.print_result(metrics, device="clients", packages=())


if __name__ == "__main__":
    main()
