"""GPTQ loses less than rounding to nearest does.

A GPT of 124M parameters, trained on source text, is rounded with groups of 128 inputs
that share a scale of 4 bits, or of 3 if 4 bits lose less than a hundredth of a nat. The
gap is the loss on held-out files over the loss without rounding.

python examples/benchmarks/contest.py examples/benchmarks/gptq_gap.py
"""

from contests import Case, Contest, Contestant, Row

NAME = "zjax"


def get_contest():
    command = ("{python}", "examples/benchmarks/gptq_quality.py")
    ours = Contestant(NAME, command, "zjax", timeout_seconds=3_600)
    case = Case(
        ours=(NAME,),
        peer=1,
        metric="gptq_share",
        unit="of the gap",
        must=0.6,
        aim=0.4,
        peer_name="rounding to nearest",
    )
    row = Row(
        "gptq_gap",
        "GPTQ loses less than rounding to nearest does.",
        (case,),
        higher_is_better=False,
        notes="128 rows of the training text calibrate; 128 held-out rows are read",
        by_devices=False,
    )
    return Contest("Compression", (ours,), (row,))
