"""A GPT of 350M whose middle layers drop tokens, or whose layers are dropped.

Steps of 8 x 2048 tokens on one GPU, over steps of all tokens in all layers: ours, and
DeepSpeed's over its own. Validation losses on real text, over those of a run of all
tokens with equal batches and learning rates.

python examples/benchmarks/contest.py examples/benchmarks/random_ltd.py
"""

from contestants import on_one_device, size_flags
from contests import Case, Contest, Row
from kept_schedule import PHASES
from shape import Shape

SHAPE = Shape(
    num_layers=24,
    embed_size=1024,
    num_heads=16,
    vocab_size=50304,
    length=2048,
    microbatch_size=8,
)
OURS, QUALITY = "zjax", "zjax on real text"
COMPILED = {
    "DeepSpeed random-LTD": "none",
    "DeepSpeed random-LTD compiled": "blocks_and_loss",
}
SCHEDULE = (
    "the mean step of a run whose middle layers keep "
    + ", ".join(f"{share:.0%} of the tokens until {end:.0%}" for share, end in PHASES)
    + " of the steps, then all; the runs whose validation losses are compared have "
    "this schedule, too"
)
STEP = {"layerwise": (0.75, 0.6), "span": (0.70, 0.56)}
"""Ratios that must and should be reached."""


def get_contest():
    contestants = (
        on_one_device(
            OURS, "zjax", "dropping_steps", *size_flags(SHAPE), timeout_seconds=500
        ),
        *(
            on_one_device(
                name,
                "peer",
                "random_ltd_deepspeed",
                *size_flags(SHAPE),
                f"--compile={compiled}",
                is_distributed=True,
                timeout_seconds=500,
            )
            for name, compiled in COMPILED.items()
        ),
        on_one_device(QUALITY, "zjax", "random_ltd_quality", timeout_seconds=3600),
    )
    rows = (_steps(), _layer_drop(), _against_deepspeed(), _quality())
    return Contest("Dropped tokens and layers", contestants, rows)


def _steps():
    cases = tuple(
        _over_all(OURS, form, must, aim) for form, (must, aim) in STEP.items()
    )
    return Row(
        "random_ltd_step",
        "Steps that drop tokens take less time than full steps.",
        cases,
        higher_is_better=False,
        notes=SCHEDULE,
        by_devices=False,
    )


def _layer_drop():
    return Row(
        "pld_step",
        "Steps that drop layers take less time than full steps.",
        (_over_all(OURS, "layer_drop", 0.85, 0.76),),
        higher_is_better=False,
        notes="theta of 0.5, with which 74 % of the layers run",
        by_devices=False,
    )


def _against_deepspeed():
    case = Case(
        ours=(OURS,),
        peer=tuple(COMPILED),
        metric="layerwise_speed",
        unit="times the steps/s",
        must=1.1,
        aim=1.3,
    )
    return Row(
        "random_ltd_vs_deepspeed",
        "Dropped tokens save more of a step than in DeepSpeed.",
        (case,),
        headline="Random-LTD: what it saves of a step, over DeepSpeed's",
        notes=f"each over its own step of all tokens; {SCHEDULE}",
        by_devices=False,
    )


def _quality():
    cases = tuple(_over_all(QUALITY, form, 1.01, 1.0) for form in STEP)
    return Row(
        "random_ltd_quality",
        "Layers that drop tokens learn as well as full layers.",
        cases,
        higher_is_better=False,
        notes="validation losses at equal steps, seed by seed; 30M parameters, 5,000 "
        "steps of 64 x 512 tokens; kept tokens as for the time of a step; 1.09 with an "
        "eighth of the tokens until 47 % of the steps",
        by_devices=False,
    )


def _over_all(ours, form, must, aim):
    return Case(
        ours=(ours,),
        peer=1.0,
        metric=form,
        unit="times the loss" if ours == QUALITY else "times a full step",
        must=must,
        aim=aim,
        name=form,
        peer_name="all tokens" if form in STEP else "all layers",
    )
