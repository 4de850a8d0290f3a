"""A server of Llama 3 8B with random weights and 128 clients, over its engine alone.

Prompts of 512 tokens, texts of 256, all as streams; the clients are another process.
"""

from contestants import on_one_device
from contests import Case, Contest, Row

CLIENTS = 128
SERVER = on_one_device("zjax serve", "zjax", "serve_ours", timeout_seconds=300)
ENGINE = on_one_device(
    "engine alone", "peer", "serve_ours", "--engine", timeout_seconds=300
)
NOTES = (
    "random weights in bfloat16; prompts of 512 random tokens, greedy; clients in a "
    "process of their own read streams by HTTP on the loopback; the engine gets all "
    "prompts as arrays, and hands out texts that are complete"
)


def get_contest():
    label = f"{CLIENTS} clients"
    speed = Case(
        ours=(SERVER.name,),
        peer=(ENGINE.name,),
        metric=f"{label} tokens/s",
        unit="tokens/s",
        must=0.9,
        aim=0.97,
        name="tokens/s over the engine",
    )
    live = Case(
        ours=(SERVER.name,),
        peer=1,
        metric=f"{label} live share",
        unit="times the tokens of the pages",
        must=0.9,
        aim=0.95,
        name="tokens over reserved tokens",
        peer_name="tokens that the pages hold",
    )
    first = Case(
        ours=(SERVER.name,),
        peer=(ENGINE.name,),
        metric="idle first_seconds",
        unit="seconds",
        must=1.5,
        aim=1.2,
    )
    rows = (
        Row(
            "serve_8b",
            "A server is about as fast as its engine, and wastes little memory.",
            (speed, live),
            headline="Llama 3 8B, 128 clients: tokens/s over the engine, live pages",
            notes=f"{NOTES}; texts of 256 tokens; tokens over reserved ones while all "
            "clients get tokens, from the metrics of the server",
            by_devices=False,
        ),
        Row(
            "serve_first_token",
            "An idle server answers nearly as soon as the prompt is read.",
            (first,),
            headline="Llama 3 8B, idle server: first token over the prefill",
            higher_is_better=False,
            notes=f"{NOTES}; the engine reads one prompt and chooses one token",
            by_devices=False,
        ),
    )
    return Contest("Serving", (SERVER, ENGINE), rows)
