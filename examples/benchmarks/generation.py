"""Generation on one device: many requests, a start from nothing, weights on the host.

All with random weights in bfloat16. Many requests to Llama 3 8B: 2,048 tokens each,
over what vLLM publishes; 512 each, over transformers; and lengths of 1:16, over batches
that end before the next one begins. The seconds of a generator of 48 layers to the
first token, with all that it compiles. Bytes of a Llama of 7B that come from the host
for each token of many rows, over the link.
"""

from contestants import on_one_device
from contests import Case, Contest, Row
from published_rates import H100_COPY, PUBLISHED

OURS = on_one_device(
    "zjax 8B",
    "zjax",
    "decode_ours",
    "--continuous",
    "--shape=8b",
    "--num_new=512,2048",
    "--num_sweeps=3",
    timeout_seconds=300,
)
MIXED = (
    "decode_ours",
    "--continuous",
    "--shape=8b",
    "--num_requests=256",
    "--min_new=128",
    "--num_new=2048",
    "--max_rows=32",
)
JOINED = on_one_device(
    "zjax joining", "zjax", *MIXED, "--num_sweeps=2", timeout_seconds=240
)
BATCHES = on_one_device(
    "zjax in batches",
    "peer",
    *MIXED,
    "--num_sweeps=1",
    "--in_batches",
    timeout_seconds=300,
)
TRANSFORMERS = on_one_device(
    "transformers",
    "peer",
    "decode_transformers",
    "--continuous",
    "--shape=8b",
    "--num_new=512",
    "--num_sweeps=2",
    "--attention=sdpa,paged|eager",
    timeout_seconds=400,
)
VLLM = on_one_device("vLLM on H100 as published", "peer", "published_rates")
START = on_one_device("zjax 48 layers", "zjax", "compile_ours", timeout_seconds=240)
HOST = on_one_device("zjax host", "zjax", "host_decode_ours", timeout_seconds=240)
LINK = on_one_device("link", "peer", "host_link")
LONG, SHORT, SPREAD = (f"{x} new tokens/s" for x in ("2048", "512", "128 to 2048"))
MUST_RATE, AIM_RATE = 6_000, 9_000
"""Tokens per second on an H100; vLLM publishes 6,612."""


def get_contest():
    programs = OURS, JOINED, BATCHES, TRANSFORMERS, VLLM, START, HOST, LINK
    return Contest("Generation", programs, (mixed_row(), start_row(), host_row()))


def mixed_row():
    """Many requests, over other ways to serve them."""

    def compare(name, ours, peer, metric, must, aim=None):
        sides = (ours.name,), (peer.name,)
        return Case(*sides, metric, "tokens/s", must=must, aim=aim, name=name)

    published = PUBLISHED[LONG]
    return Row(
        "generation_mixed",
        "Many requests at once get more tokens per second than elsewhere.",
        (
            compare(
                "2,048 tokens each: over vLLM",
                OURS,
                VLLM,
                LONG,
                MUST_RATE / published,
                AIM_RATE / published,
            ),
            compare(
                "128 to 2,048 tokens: over batch after batch",
                JOINED,
                BATCHES,
                SPREAD,
                2.5,
                4.0,
            ),
            compare(
                "512 tokens each: over transformers",
                OURS,
                TRANSFORMERS,
                SHORT,
                3.0,
                8.0,
            ),
        ),
        headline="Many requests to Llama 3 8B: tokens/s over other ways",
        notes="random weights in bfloat16, prompts of 32 tokens, greedy; 128 requests "
        "at once, or 256 of which 32 have a row; one short run to warm up, then one to "
        f"three; vLLM's rate is published, {published:,} on an H100, and not measured "
        "here: it is multiplied by the bandwidth of a copy in this run over "
        f"{H100_COPY / 1e12:.2f} TB/s, measured on an H100; batch after batch is the "
        "same engine, in which no request joins others",
        by_devices=False,
    )


def start_row():
    """A start without any compiled program."""

    def bound(name, metric, unit, must, aim):
        case = {"must": 1.0, "aim": aim / must, "name": name, "peer_name": "stated bar"}
        return Case((START.name,), must, metric, unit, **case)

    return Row(
        "generation_compile",
        "A generator starts soon, and another shape of prompts costs nothing more.",
        (
            bound("first token", "cold_seconds", "seconds", 12, 6),
            bound("another shape", "second_seconds", "seconds", 1, 0.1),
            bound("programs", "num_programs", "programs", 6, 4),
        ),
        headline="48 layers from nothing: seconds to the first token, programs",
        higher_is_better=False,
        notes="48 layers of Llama 3 8B with random weights on the device, one process, "
        "no compiled program from a disk; seconds from the generator to the first "
        "token of a prompt of 100; what 5 prompts of 700 take longer at first than "
        "again; programs of passes, after 1, 8, 32 and 64 rows",
        by_devices=False,
    )


def host_row():
    """Blocks that come from the host for each pass."""
    case = Case(
        ours=(HOST.name,),
        peer=(LINK.name,),
        metric="host bytes/s",
        peer_metric="upward_bytes_per_second",
        unit="bytes/s",
        must=0.8,
        aim=0.92,
    )
    return Row(
        "host_decode",
        "Decoding with weights on the host is as fast as the link brings them.",
        (case,),
        theme="offload",
        headline="Llama 7B on the host: bytes of weights over the link",
        notes="random weights in bfloat16; 128 rows get a token from each pass; the "
        "link is a copy of eight arrays of 1 GiB from pinned memory",
        by_devices=False,
    )
