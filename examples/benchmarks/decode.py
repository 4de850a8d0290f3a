"""A Llama of 7B in bfloat16 that continues rows of 1,024 tokens on one device.

Bytes of weights, keys and values per second, of all rows together, over the bandwidth
of a copy; and tokens per second over those of compiled torch and of transformers.
"""

from contestants import on_one_device
from contests import Case, Contest, Row

BARS = {1: 0.80, 16: 0.78, 64: 0.75}
"""Share of a copy that must be reached with so many rows."""
OURS = on_one_device("zjax 7B", "zjax", "decode_ours", timeout_seconds=540)
COPY = on_one_device("copy", "peer", "copy_bandwidth")
PEERS = (
    (on_one_device("torch", "peer", "decode_torch", timeout_seconds=540), 1.03),
    (
        on_one_device(
            "transformers", "peer", "decode_transformers", timeout_seconds=540
        ),
        1.2,
    ),
)
"""Programs, and the ratios that must be reached."""


def get_contest():
    row = Row(
        "decode_7b",
        "Decoding reads memory nearly as fast as a copy, and is faster than peers.",
        tuple(case for batch in BARS for case in compare(batch)),
        headline="Decoding with Llama 7B: share of a copy, over peers",
        notes="random weights in bfloat16; 64 tokens, in whose middle each row has "
        "1,024; greedy; weights are counted without the token table",
        by_devices=False,
    )
    programs = OURS, COPY, *(peer for peer, _ in PEERS)
    return Contest("Decoding", programs, (row,))


def compare(batch):
    """Cases of a batch."""
    yield Case(
        ours=(OURS.name,),
        peer=(COPY.name,),
        metric=f"batch {batch} bytes/s",
        peer_metric="copy_bytes_per_second",
        unit="bytes/s",
        must=BARS[batch],
        name=f"batch {batch}: of a copy",
    )
    for peer, must in PEERS:
        yield Case(
            ours=(OURS.name,),
            peer=(peer.name,),
            metric=f"batch {batch} tokens/s",
            unit="tokens/s",
            must=must,
            name=f"batch {batch}: over {peer.name}",
        )
