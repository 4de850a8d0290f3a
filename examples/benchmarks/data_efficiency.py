"""Shorter contexts, easy samples, fewer tokens first: stability, wall time, programs.

A GPT of 30M parameters on one device, three seeds, 600 steps of 64 x 2,048 tokens of
real text, a fifth more where the first ones cost less. Seconds are those of training
steps, without compilation and evaluation.
"""

from contestants import JAX_MEMORY, ONE_DEVICE
from contests import Case, Contest, Contestant, Row

NAME = "zjax"
HEADLINES = ("slw_time", "data_efficiency")
NOTES = (
    "seed by seed, both where they first reach the final loss of plain training, "
    "interpolated between 30 evaluations of averaged weights, at a constant learning "
    "rate; schedules end at 60 % of the steps; seconds without compilation and "
    "evaluation"
)


def get_contest():
    command = ("{python}", "examples/benchmarks/efficiency_quality.py")
    ours = Contestant(NAME, command, "zjax", JAX_MEMORY | ONE_DEVICE, 3600)

    def row(id, claim, metric, must, aim, unit, name, notes, *, peer_name, higher):
        case = Case(
            ours=(NAME,),
            peer=1.0,
            metric=metric,
            unit=unit,
            must=must,
            aim=aim,
            name=name,
            peer_name=peer_name,
        )
        return Row(
            id,
            claim,
            (case,),
            headline=name if id in HEADLINES else "",
            higher_is_better=higher,
            notes=notes,
            by_devices=False,
        )

    rows = (
        row(
            "slw_stability",
            "At 7 x the learning rate, growing contexts are stabler.",
            "unstable_over_warm",
            5.0,
            None,
            "times fewer unstable steps",
            "Growing context: unstable steps without it over with it",
            "steps with more than 1.2 times the least loss before; none counts as one; "
            "truncation, whose steps at whole length are as unstable; at 6 times the "
            "rate it had more than plain training",
            peer_name="as many",
            higher=True,
        ),
        row(
            "slw_time",
            "A growing context reaches the loss of plain training sooner.",
            "time_over_plain",
            1.3,
            2.0,
            "times the speed",
            "Growing context: speed to the loss of plain training",
            "truncation to 128 tokens first, doubled four times; a window takes 1.11 "
            f"times the seconds of plain training; {NOTES}",
            peer_name="plain training",
            higher=True,
        ),
        row(
            "window_compiles",
            "One program runs the whole schedule of a growing window.",
            "window_programs",
            1.0,
            1.0,
            "programs",
            "Growing window: programs",
            "training programs that were compiled",
            peer_name="one program",
            higher=False,
        ),
        row(
            "data_efficiency",
            "Short contexts, easy samples, dropped tokens train faster.",
            "composed_over_plain",
            1.5,
            2.0,
            "times the speed",
            "Short contexts, easy samples, fewer tokens: speed to a loss",
            "rarity of the vocabulary; layers on half of the tokens from 45 % to 70 % "
            f"of the steps; truncation alone is faster; {NOTES}",
            peer_name="plain training",
            higher=True,
        ),
    )
    return Contest("Data efficiency", (ours,), rows)
