"""Distillation closes the loss gap of a pruned model faster than training alone.

A GPT of 124M parameters, trained on source text, loses half of the layers, or half of
the heads and of the hidden channels; what stays is chosen by importance. The gap is the
loss on held-out files over the loss of the larger model; three seeds.

python examples/benchmarks/contest.py examples/benchmarks/layer_reduction.py
"""

from contests import Case, Contest, Contestant, Row

NAME = "zjax"
SHAPES = {"depth": "half of the layers", "width": "half of the heads and channels"}
MUST, AIM = 0.7, 0.5


def get_contest():
    command = ("{python}", "examples/benchmarks/prune_quality.py")
    ours = Contestant(NAME, command, "zjax", timeout_seconds=3_600)
    row = Row(
        "layer_reduction",
        "Distillation closes the loss gap of a pruned model.",
        tuple(map(_case, SHAPES)),
        higher_is_better=False,
        notes="both runs have the same pruned start and see the same tokens; the ratio "
        "is that of the seed that gains least",
        by_devices=False,
    )
    return Contest("Compression", (ours,), (row,))


def _case(shape):
    """Gap with distillation over the gap without, of the seed that gains least."""
    return Case(
        ours=(NAME,),
        peer=1,
        metric=f"{shape}_gap_ratio",
        unit="of the gap",
        must=MUST,
        aim=AIM,
        name=SHAPES[shape],
        peer_name="the gap of training alone",
    )
