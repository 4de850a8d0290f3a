"""The shape of Llama 3 8B from Hugging Face's files onto one device.

Seconds until a run that trains adapters has its state, over those of a plain read of
the files; and the host memory that this takes, over the largest file.
"""

from contestants import on_one_device
from contests import Case, Contest, Row

NAME = "zjax"
CASES = {
    "seconds": ("seconds_over_plain_read", 2.0, 1.2, "times a plain read"),
    "host memory": ("host_over_largest_shard", 3.0, 1.5, "times the largest file"),
}


def get_contest():
    ours = on_one_device(NAME, "zjax", "load_hf_speed", timeout_seconds=540)
    cases = tuple(
        Case(
            ours=(NAME,),
            peer=1.0,
            metric=metric,
            unit=unit,
            must=must,
            aim=aim,
            name=name,
            peer_name=unit.removeprefix("times "),
        )
        for name, (metric, must, aim, unit) in CASES.items()
    )
    row = Row(
        "load_hf",
        "An 8B checkpoint loads about as fast as it is read.",
        cases,
        headline="Llama 8B from Hugging Face: time and memory",
        higher_is_better=False,
        notes="16 GB of bfloat16 in files of 5 GB, read from disk; compilation "
        "included; memory without the pages of files",
        by_devices=False,
    )
    return Contest("Checkpoints", (ours,), (row,))
