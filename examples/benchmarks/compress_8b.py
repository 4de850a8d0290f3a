"""GPTQ of a Llama of 8B on one GPU: minutes, and the most device memory.

python examples/benchmarks/contest.py examples/benchmarks/compress_8b.py
"""

from contestants import on_one_device
from contests import Case, Contest, Row

OURS = on_one_device("zjax", "zjax", "compress_8b_ours", timeout_seconds=1_200)


def get_contest():
    cases = (
        _case("minutes", "minutes", 8, 5, "a minute"),
        _case("peak_gb", "GB", 40, 24, "a gigabyte"),
    )
    row = Row(
        "compress_8b",
        "A model of 8B is compressed by GPTQ on one GPU in minutes.",
        cases,
        higher_is_better=False,
        notes="random weights, drawn on the device block by block; 128 rows of 2,048 "
        "tokens; 4 bits, groups of 128 inputs; with the losses of 4 held-out rows",
        by_devices=False,
    )
    return Contest("Compression of 8B", (OURS,), (row,))


def _case(metric, unit, must, aim, peer_name):
    """A number that is to be small."""
    return Case(
        ours=(OURS.name,),
        peer=1,
        metric=metric,
        unit=unit,
        must=must,
        aim=aim,
        name=unit,
        peer_name=peer_name,
    )
