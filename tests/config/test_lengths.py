"""Lengths of sequences by step, and what is refused of them in exact words."""

import pytest

from tests.support.refusals import case, refusal
from zjax.config import schema
from zjax.config.lengths import Lengths, make_lengths

BASE = "sequence_warmup.form=truncate;num_steps=2000"
CASES = [
    case(
        f"{BASE};sequence_warmup.start_length=1024",
        "sequence_warmup.start_length=1024 is not shorter than data.length=1024; use a "
        "smaller one, or form='none'",
        id="bounds-reversed",
    ),
    case(
        f"{BASE};sequence_warmup.num_steps=2001",
        "sequence_warmup.num_steps=2001 is beyond num_steps=2000; use at most 2000",
        id="beyond-the-run",
    ),
    case(
        f"{BASE};sequence_warmup.multiple=48",
        "sequence_warmup.multiple=48 does not divide "
        "sequence_warmup.start_length=64; use a divisor\n"
        "sequence_warmup.multiple=48 does not divide data.length=1024; use a divisor",
        id="multiple",
    ),
    case(
        f"{BASE};sequence_warmup.multiple=2;mesh.sequence=4",
        "sequence_warmup.multiple=2 is not a multiple of mesh.sequence=4; use 4",
        id="shards",
    ),
    case(
        f"{BASE};sequence_warmup.multiple=32;model.attention=sparse",
        "sequence_warmup.multiple=32 is not a multiple of model.sparsity.block=64; use "
        "64 or a multiple of it",
        id="blocks",
    ),
    case(
        "sequence_warmup.multiple=32",
        "sequence_warmup.multiple=32 has no effect with sequence_warmup.form='none'; "
        "leave it at 64, or set sequence_warmup.form to 'truncate'",
        id="without-effect",
    ),
]


@pytest.mark.parametrize(("overrides", "num_devices", "message"), CASES)
def test_what_does_not_fit_is_refused(overrides, num_devices, message):
    assert refusal(overrides, num_devices) == message


def test_lengths_have_the_golden_values():
    """Linear from 8 to 1024 in multiples of 8 over 15 000 steps."""
    lengths = Lengths(start=8, full=1024, num_steps=15_000, multiple=8)
    golden = {1: 8, 119: 16, 500: 40, 7_500: 512, 14_999: 1016, 15_000: 1024}
    assert {step: lengths.at(step) for step in golden} == golden
    assert lengths.at(10**9) == 1024


@pytest.mark.parametrize(
    "lengths",
    [Lengths(8, 1024, 997, 8), Lengths(64, 1024, 10, 64), Lengths(16, 16, 1, 16)],
)
def test_changes_and_sums_are_those_of_the_steps(lengths):
    at = [lengths.at(step) for step in range(1, 1200)]
    assert at == sorted(at) and all(x % lengths.multiple == 0 for x in at)
    changes = {1: at[0]}
    changes |= {n + 1: at[n] for n in range(1, len(at)) if at[n] != at[n - 1]}
    assert lengths.changes() == changes
    for step in (0, 1, 7, 500, 1199):
        assert lengths.sum_until(step) == sum(at[:step])


def test_without_warm_up_all_sequences_are_whole():
    lengths = make_lengths(schema.Config(data=schema.Data(length=96)))
    assert lengths.changes() == {1: 96} and lengths.sum_until(5) == 480
