"""Every number has a legal range."""

import dataclasses

import pytest

from tests.support.refusals import refusal
from zjax.config import ranges, schema


@pytest.mark.parametrize(
    ("setting", "value", "remedy"),
    [
        ("seed", "-1", "use 0 to 4294967295"),
        ("seed", "4294967296", "use 0 to 4294967295"),
        ("num_steps", "0", "use 1 or more"),
        ("global_batch_size", "-1", "use 0 or more"),
        ("mesh.data", "-2", "use 1 or more, or -1 for the rest"),
        (
            "mesh.tensor",
            "-2",
            "use 1 or more, -1 for the rest, or 0 for zjax to choose",
        ),
        ("optimizer.peak_learning_rate", "0.0", "use more than 0"),
        ("optimizer.peak_learning_rate", "inf", "use more than 0"),
        ("optimizer.b1", "1.0", "use 0 or more and less than 1"),
        ("optimizer.weight_decay", "inf", "use 0 or more"),
        ("optimizer.clip_norm", "0.0", "use more than 0, or inf for no limit"),
        ("optimizer.final_learning_rate_fraction", "1.1", "use 0 to 1"),
        ("model.dropout_rate", "-0.1", "use 0 or more and less than 1"),
        ("model.num_heads", "0", "use 1 or more"),
        ("model.vocab_size", "1", "use 2 or more"),
        ("observe.profile_start_step", "-2", "use 1 or more, or -1 for never"),
        ("observe.profile_start_step", "0", "use 1 or more, or -1 for never"),
        ("processes.num_processes", "-1", "use 0 or more"),
    ],
)
def test_number_out_of_range(setting, value, remedy):
    """Only the range is reported: rules that would divide by the number stay out."""
    message = f"{setting}={value} is out of range; {remedy}"
    assert refusal([f"{setting}={value}"], 8).splitlines()[0] == message


def test_number_out_of_range_inside_a_group():
    groups = "optimizer.groups=[{}, {'pattern': 'x', 'learning_rate_scale': -1}]"
    assert refusal([groups], 8) == (
        "optimizer.groups[1].learning_rate_scale=-1.0 is out of range; use 0 or more"
    )


SECTIONS = [s for s in vars(schema).values() if dataclasses.is_dataclass(s)]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_every_number_has_a_range(section):
    numbers = {f.name for f in dataclasses.fields(section) if f.type in (int, float)}
    assert set(ranges.RANGES.get(section, {})) == numbers
