"""Packing and unpacking 1.5 billion gradients for a slow link, one device.

Against a copy of the same float32 numbers, which reads and writes each once.
"""

from contestants import on_one_device
from contests import Case, Contest, Row

NUM_FLOATS = 358 * 2**22
"""Whole blocks of every codec."""
CODECS = ("onebit", "int4", "int8")
OURS = on_one_device(
    "zjax codecs",
    "zjax",
    "compress_ours",
    f"--num_floats={NUM_FLOATS}",
    f"--codecs={','.join(CODECS)}",
)
COPY = on_one_device("copy", "peer", "copy_bandwidth", f"--num_floats={NUM_FLOATS}")


def get_contest():
    compared = tuple(
        Case(
            ours=(OURS.name,),
            peer=(COPY.name,),
            metric=f"{codec} seconds",
            peer_metric="copy_seconds",
            unit="seconds",
            must=2.0,
            aim=1.2,
            name=codec,
        )
        for codec in CODECS
    )
    row = Row(
        "compress_overhead",
        "Codecs take no longer than copying the gradients twice.",
        compared,
        higher_is_better=False,
        notes="1.5 billion gradients",
        by_devices=False,
    )
    return Contest("Codecs of gradients", (OURS, COPY), (row,))
