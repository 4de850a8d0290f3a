"""Every number has a legal range."""

import dataclasses
import typing

import pytest

from tests.support.refusals import refusal
from zjax.settings import ranges, schema


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
        ("optimizer.rule.b1", "1.0", "use 0 or more and less than 1"),
        ("optimizer.weight_decay", "inf", "use 0 or more"),
        ("optimizer.clip_norm", "0.0", "use more than 0, or inf for no limit"),
        ("optimizer.schedule.final_fraction", "1.1", "use 0 to 1"),
        ("model.dropout_rate", "-0.1", "use 0 or more and less than 1"),
        ("model.num_heads", "0", "use 1 or more"),
        ("model.vocab_size", "1", "use 2 or more, or 0 to derive it"),
        ("observe.profile.start_step", "0", "use 1 or more"),
        ("processes.num_processes", "-1", "use 0 or more"),
        ("num_steps", f"{2**31}", "use at most 2147483647"),
        ("model.num_heads", f"{2**31 - 1}", "use at most 4194304"),
        ("model.embed_size", f"{2**62}", "use at most 4194304"),
        ("model.num_layers", f"{2**62}", "use at most 16384"),
        ("data.length", f"{2**62}", "use at most 16777216"),
        ("mesh.data", f"{2**62}", "use at most 1048576"),
        ("data.num_workers", "1000000", "use at most 1024"),
        ("optimizer.peak_learning_rate", "1e+300", "use at most 3e+38"),
        ("optimizer.rule.eps", "1e-300", "use at least 1.2e-38"),
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
each_section = pytest.mark.parametrize("section", SECTIONS, ids=lambda s: s.__name__)


@each_section
def test_no_number_is_without_bounds(section):
    """Fails where a setting takes any number: its sizes would overflow, or take all."""
    for name, hint in typing.get_type_hints(section).items():
        if hint in (int, float):
            allowed = ranges.range_of(section, name)
            huge = 2**63 if name == "min_shard_elements" else 2**33
            for value in (huge, 2**62, -(2**62)) if hint is int else (1e39, -1e39):
                assert allowed.remedy_for(value) or (name, value) == (
                    "min_shard_elements",
                    2**62,
                )


def test_a_batch_that_comes_out_too_large_is_refused():
    settings = ["global_batch_size=0", "microbatch_size=65536", "num_microbatches=256"]
    assert refusal(settings, 8) == (
        "global_batch_size=0 comes out as 134217728; use at most 16777216, such as by "
        "num_microbatches"
    )
