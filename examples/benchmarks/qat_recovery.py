"""Training on rounded matrices recovers what rounding to nearest loses.

A GPT of 124M parameters, trained on source text, goes on with and without rounding, in
full and by LoRA; three seeds. The gap is the loss on held-out files of the plain run,
rounded to nearest, over the loss without rounding. Groups of 128 inputs share a scale
of 4 bits, or of 3 if 4 bits lose less than a hundredth of a nat.

python examples/benchmarks/contest.py examples/benchmarks/qat_recovery.py
"""

from contests import Case, Contest, Contestant, Row

NAME = "zjax"
MUST = {"full": 0.60, "lora": 0.45}
AIM = {"full": 0.80, "lora": 0.60}


def get_contest():
    command = ("{python}", "examples/benchmarks/qat_quality.py")
    ours = Contestant(NAME, command, "zjax", timeout_seconds=3_600)
    row = Row(
        "qat_recovery",
        "Training on rounded matrices recovers what rounding to nearest loses.",
        tuple(map(_case, MUST)),
        notes="both runs see the same further tokens; the recovered share is that of "
        "the seed that recovers least",
        by_devices=False,
    )
    return Contest("Compression", (ours,), (row,))


def _case(how):
    """Share of the gap that the seed recovers that recovers least."""
    return Case(
        ours=(NAME,),
        peer=1,
        metric=f"{how}_recovered",
        unit="of the gap",
        must=MUST[how],
        aim=AIM[how],
        name={"full": "all weights", "lora": "LoRA"}[how],
        peer_name="the whole gap",
    )
