"""Lengths of sequences by step, and what is refused of them in exact words."""

import pytest

from tests.support.refusals import case, refusal
from zjax.schedule.lengths import end_by_tokens
from zjax.schedule.training import TrainingSchedule
from zjax.settings import schema

FIELD = "sequence_warmup.pacing"
BASE = "sequence_warmup=truncate;num_steps=2000"
WINDOW = "sequence_warmup=window;num_steps=2000"
CASES = [
    case(
        f"{BASE};{FIELD}.start=1024",
        f"{FIELD}.start=1024 is not below data.length=1024; use a smaller one",
        id="bounds-reversed",
    ),
    case(
        f"{BASE};{FIELD}.end=2048",
        f"{FIELD}.end=2048 is above data.length=1024; use at most 1024",
        id="beyond-the-sequence",
    ),
    case(
        f"{BASE};{FIELD}.num_steps=2001",
        f"{FIELD}.num_steps=2001 is beyond num_steps=2000; use at most 2000",
        id="beyond-the-run",
    ),
    case(
        f"{BASE};{FIELD}.multiple=48",
        f"{FIELD}.multiple=48 does not divide {FIELD}.start=64; use a divisor\n"
        f"{FIELD}.multiple=48 does not divide data.length=1024; use a divisor",
        id="multiple",
    ),
    case(
        f"{BASE};{FIELD}.multiple=2;mesh.sequence=4",
        f"{FIELD}.multiple=2 is not a multiple of mesh.sequence=4; use 4",
        id="shards",
    ),
    case(
        f"{BASE};{FIELD}.multiple=32;model.attention=sparse",
        f"{FIELD}.multiple=32 is not a multiple of model.attention.block=64; use 64 or "
        "a multiple of it",
        id="blocks",
    ),
    case(
        f"{BASE};{FIELD}.kind=discrete;{FIELD}.values=(6, 1024);{FIELD}.last_steps=(9,)"
        ";mesh.sequence=4",
        f"{FIELD}.values=6 is not a multiple of mesh.sequence=4; use 4 or 8",
        id="shards-of-a-value",
    ),
    case(
        f"{FIELD}.multiple=32",
        f"{FIELD}.multiple=32 has no effect with sequence_warmup=None; "
        "leave it out, or set sequence_warmup to 'truncate' or 'reshape' or "
        "'window'",
        id="without-effect",
    ),
    case(
        "num_tokens=100000;sequence_warmup=truncate;sequence_warmup.pacing.end=1000",
        "sequence_warmup.pacing.multiple=64 does not divide "
        "sequence_warmup.pacing.end=1000; use a divisor",
        id="no-end",
    ),
    case(
        "num_steps=100;num_tokens=4000000",
        "num_tokens=4000000 is above the 3,276,800 of num_steps=100; raise num_steps, "
        "or leave it at 0",
        id="tokens-beyond-the-run",
    ),
    case(
        f"{WINDOW};{FIELD}.num_tokens=9000;{FIELD}.num_steps=9",
        f"{FIELD}.num_steps=9 ends it, too, besides {FIELD}.num_tokens=9000; leave out "
        "one",
        id="steps-and-tokens",
    ),
    case(
        f"{WINDOW};{FIELD}.num_tokens=3276801;num_steps=100",
        f"{FIELD}.num_tokens=3276801 is not reached in num_steps=100; use less, or "
        "raise num_steps",
        id="pacing-tokens-beyond-the-run",
    ),
    case(
        "random_ltd=span;random_ltd.pacing.num_tokens=32768001",
        "random_ltd.pacing.num_tokens=32768001 is not reached in num_steps=1000; use "
        "less, or raise num_steps",
        id="kept-tokens-beyond-the-run",
    ),
    case(
        f"{WINDOW};{FIELD}.kind=custom;{FIELD}.function=math:gcd;{FIELD}.num_tokens=9",
        f"{FIELD}.num_tokens=9 has no effect with {FIELD}='custom'; leave it out, or "
        f"set {FIELD} to 'linear' or 'root'",
        id="tokens-of-a-function",
    ),
    case(
        f"{FIELD}.num_tokens=9000;sequence_warmup=reshape;global_batch_size=32;"
        "microbatch_size=64",
        "global_batch_size=32 does not divide by 8 batch shards x microbatch_size=64; "
        "use a multiple of 512",
        id="tokens-of-no-microbatch",
    ),
    case(
        f"{WINDOW};{FIELD}.multiple=48",
        f"{FIELD}.multiple=48 does not divide {FIELD}.start=64; use a divisor\n"
        f"{FIELD}.multiple=48 does not divide data.length=1024; use a divisor",
        id="window-multiple",
    ),
    case(
        f"{WINDOW};model.kind=encoder",
        "sequence_warmup='window' looks back alone, and tokens of "
        "model.kind='encoder' look both ways; use None",
        id="window-encoder",
    ),
    case(
        f"{WINDOW};mesh.sequence=4;model.sequence_attention=ring",
        "model.sequence_attention='ring' does not limit attention to "
        "sequence_warmup='window'; use 'ulysses', or "
        "sequence_warmup='truncate'",
        id="window-ring",
    ),
]


@pytest.mark.parametrize(("overrides", "num_devices", "message"), CASES)
def test_what_does_not_fit_is_refused(overrides, num_devices, message):
    assert refusal(overrides, num_devices) == message


def test_without_warm_up_all_sequences_are_whole():
    schedule = TrainingSchedule(schema.Config(data=schema.Data(length=96)))
    assert schedule.shapes == ((32, 96),) and not list(schedule.changes(1))
    assert schedule.tokens.sum_until(5) == 32 * 480


TOKENS = 200_000
"""Reached in step 7 of 32 x 1,024 tokens."""


@pytest.mark.parametrize("kind", [None, schema.Window, schema.Truncate, schema.Reshape])
def test_tokens_end_a_pacing_at_the_step_that_reaches_them(kind):
    """Of kept tokens and of lengths, on which the tokens depend; fails for steps."""
    pacing = schema.LinearPacing(num_tokens=TOKENS)
    config = schema.Config(
        sequence_warmup=kind(pacing=pacing) if kind else None,
        random_ltd=schema.Span(pacing=pacing),
    )
    schedule = TrainingSchedule(config)
    tokens, length = schedule.tokens, config.data.length
    steps = range(1, config.num_steps + 1)
    # Kept tokens count earlier steps: the step after the end is the first whole one.
    whole = next(n for n in steps if schedule.at(n, length).num_kept == length)
    end = whole - 1
    assert tokens.sum_until(end - 1) < TOKENS <= tokens.sum_until(end)
    assert (end == 7) == (kind in (None, schema.Window))
    if kind:
        grown = [schedule.at(n).window or schedule.at(n).length for n in steps]
        assert grown.index(length) + 1 == end


def test_windows_leave_sequences_whole():
    """Counted from step 1, as the paper counts lengths (golden A.4)."""
    pacing = schema.LinearPacing(start=8, multiple=8, num_steps=15_000)
    warmup = schema.Window(pacing=pacing)
    config = schema.Config(sequence_warmup=warmup)
    schedule = TrainingSchedule(config)
    assert {schedule.at(n).length for n in (1, 500, 15_000)} == {1024}
    found = [schedule.at(n).window for n in (1, 119, 500, 7_500, 14_999, 15_000)]
    assert found == [8, 16, 40, 512, 1016, 1024]


@pytest.mark.parametrize(
    ("warmup", "last"),
    [(None, 4), (schema.Truncate(pacing=schema.LinearPacing(num_steps=15)), 9)],
    ids=["none", "truncate"],
)
def test_tokens_end_a_run_at_the_step_that_consumes_them(warmup, last):
    """4 steps of 32 x 1,024 tokens; lengths of 64, 128, ... take 9 steps to as many."""
    for num_tokens, end in ((98_305, last), (98_304, last - (warmup is None))):
        config = schema.Config(num_tokens=num_tokens, sequence_warmup=warmup)
        assert end_by_tokens(config).num_steps == end
