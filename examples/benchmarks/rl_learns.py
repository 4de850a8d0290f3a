"""GRPO learns three verifiable tasks beyond a supervised start that no longer rises.

A model of 3M parameters from nothing, 5,000 or 10,000 steps on the traces of a teacher
that errs, then 200 steps of GRPO; three seeds. Both operands of held-out prompts are of
a range of which no prompt for training has two. All runs take minutes on one GPU.

python examples/benchmarks/contest.py examples/benchmarks/rl_learns.py
"""

from contests import Case, Contest, Contestant, Row

NAME = "zjax"
TASKS = ("sums", "countdown", "reverse")
MUST_POINTS, AIM_POINTS = 20, 30


def get_contest():
    command = (
        "{python}",
        "examples/benchmarks/rl_quality.py",
        "--num_devices={devices}",
    )
    ours = Contestant(NAME, command, "zjax", timeout_seconds=1_200)
    row = Row(
        "rl_learns",
        "GRPO solves prompts that its supervised start does not.",
        (*map(_points, TASKS), *map(_any_of_eight, TASKS)),
        notes="held-out pass@1 of the start is 20 to 60 %, and rises less than 1 point "
        "over its last fifth; its teacher errs in 65 % of the traces",
        by_devices=False,
    )
    return Contest("Reinforcement learning", (ours,), (row,))


def _points(task):
    """Rise of the share of right texts, of the seed that gains least."""
    return Case(
        ours=(NAME,),
        peer=1,
        metric=f"{task}_points",
        unit="points of pass@1",
        must=MUST_POINTS,
        aim=AIM_POINTS,
        name=f"{task}, least rise of three seeds",
        peer_name="a point",
    )


def _any_of_eight(task):
    """Share of prompts with a right text of eight, over the share before."""
    return Case(
        ours=(NAME,),
        peer=1,
        metric=f"{task}_any_of_eight",
        unit="times pass@8",
        aim=1,
        name=f"{task}, one of eight texts",
        peer_name="supervised start",
    )
