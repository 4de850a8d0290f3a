"""Decoding a Llama of 7B with weights of 8 and 4 bits, over weights of 16 bits.

A token of one row takes the time in which the weights are read; with many rows, no kind
may be slower than plain weights.
"""

from contestants import on_one_device
from contests import Case, Contest, Row
from narrow_decode_ours import BATCHES, KINDS, metric_of

PLAIN, *NARROW = KINDS
OURS, PEER = (
    on_one_device(
        f"zjax {name}",
        "zjax",
        "narrow_decode_ours",
        f"--kinds={','.join(kinds)}",
        timeout_seconds=240,
    )
    for name, kinds in (("narrow", NARROW), (PLAIN, (PLAIN,)))
)
BARS = {
    ("int8", 1): (1.6, 1.85),
    ("int4", 1): (2.3, 3.0),
    ("float8", 64): (1.4, 1.6),
}
"""Least and hoped-for ratios that are above `NO_SLOWER`."""
NO_SLOWER = 1.0, 1.1


def get_contest():
    return Contest("Narrow weights", (PEER, OURS), (row(),))


def row():
    """Tokens per second of all kinds and batches."""
    return Row(
        "narrow_decode",
        "Weights of 8 and 4 bits decode few rows faster, and many no slower.",
        tuple(compare(kind, batch) for kind in NARROW for batch in BATCHES),
        headline="Llama 7B with weights of 8 and 4 bits: over 16 bits",
        notes="random weights; passes of 8 tokens of each row behind 128 keys; greedy; "
        "int8 and float8 have a scale of a column, int4 of 128 inputs; float8 also "
        "rounds the rows",
        by_devices=False,
    )


def compare(kind, batch):
    """Rate of a kind over plain weights."""
    must, aim = BARS.get((kind, batch), NO_SLOWER)
    return Case(
        ours=(OURS.name,),
        peer=(PEER.name,),
        metric=metric_of(kind, batch),
        peer_metric=metric_of(PLAIN, batch),
        unit="tokens/s",
        must=must,
        aim=aim,
        name=f"{kind} b={batch}",
    )
