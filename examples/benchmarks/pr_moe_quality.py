"""Smaller mixtures of experts on real text: PR-MoE over MoE, students with a teacher.

Six layers of width 256, three seeds, 500 steps of 64 x 256 bytes of the source of
Python's standard library; cross-entropy on held-out files.
"""

from contestants import JAX_MEMORY, ONE_DEVICE
from contests import Case, Contest, Contestant, Row

NAME = "zjax"


def get_contest():
    command = ("{python}", "examples/benchmarks/moe_quality.py")
    ours = Contestant(NAME, command, "zjax", JAX_MEMORY | ONE_DEVICE, 900)

    def case(metric, must, name, peer_name, unit="times the loss"):
        return Case(
            ours=(NAME,),
            peer=1.0,
            metric=metric,
            unit=unit,
            must=must,
            name=name,
            peer_name=peer_name,
        )

    row = Row(
        "pr_moe_quality",
        "A PR-MoE learns as well as a MoE, and teaches a student.",
        (
            case(
                "pr_moe_over_moe",
                1.01,
                "loss of PR-MoE (16, 16, 32 experts)",
                "MoE of 3 x 64 experts",
            ),
            case(
                "parameter_share",
                0.5,
                "parameters of PR-MoE",
                "MoE",
                "times the parameters",
            ),
            case(
                "distilled_over_alone",
                1.0,
                "loss of a 4-layer student with a teacher",
                "without",
            ),
        ),
        headline="Quality of smaller mixtures",
        higher_is_better=False,
        notes="ratios of losses seed by seed; the teacher is the PR-MoE of the same "
        "seed, for the first 70 % of the steps",
        by_devices=False,
    )
    return Contest("Quality of smaller mixtures of experts", (ours,), (row,))
