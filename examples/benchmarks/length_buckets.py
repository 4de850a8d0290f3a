"""Length buckets on real documents: tokens per second over rows that join documents.

A GPT of 124M parameters on one device, 8 x 8,192 tokens per step, forward, backward and
AdamW in bfloat16; Python files of at most 64 KiB of this machine as documents.
"""

from contestants import JAX_MEMORY, ONE_DEVICE
from contests import Case, Contest, Contestant, Row

NAME = "zjax"


def get_contest():
    command = ("{python}", "examples/benchmarks/bucket_speed.py")
    ours = Contestant(NAME, command, "zjax", JAX_MEMORY | ONE_DEVICE, 900)
    case = Case(
        ours=(NAME,),
        peer=1.0,
        metric="buckets_over_joined",
        unit="times the tokens/s",
        must=1.2,
        aim=1.6,
        name="tokens/s of buckets of 256 to 8,192 tokens",
        peer_name="rows of 8,192 tokens that cut and join documents",
    )
    row = Row(
        "buckets",
        "Batches of equal lengths train faster than joined rows.",
        (case,),
        headline="Length buckets: tokens/s over joined rows of 8k",
        notes="the same tokens per step, text and model; Python files up to 64 KiB "
        "(1.20 with files up to 256 KiB, half of whose tokens are in rows of 8,192); "
        "rounds of 48 steps in a row, with all programs compiled before",
        by_devices=False,
    )
    return Contest("Length buckets", (ours,), (row,))
