"""Figures of a plan say for which devices they hold."""

import re

import pytest

from tests.support import small_run
from zjax.errors import OutputError
from zjax.estimate.trial import Trial
from zjax.models.flops import num_params as count_params
from zjax.run.plan_report import describe_on_gpus, report_plan
from zjax.settings import schema


def test_a_step_on_gpus_is_told_as_text():
    trial = Trial(schema.Mesh(), state=2.5e9, activations=1.25e9)
    assert describe_on_gpus(trial) == (
        "a step on GPUs by formula, attention as a kernel that keeps no scores\n"
        "(an upper estimate: two measured peaks were up to 10 % lower)\n"
        "                      bytes/device\n"
        "──────────────────────────────────\n"
        "state and gradients        2.50 GB\n"
        "activations                1.25 GB\n"
        "total                      3.75 GB"
    )


def test_what_a_step_takes_of_gpus_needs_none(tmp_path):
    """Fails if figures of the formula are not those of the mesh and the model."""
    config = small_run.make_config(tmp_path)
    text = report_plan(config, num_devices=1, picture=str(tmp_path / "plan.png"))
    assert "compiled" not in text
    (count,) = re.findall(r"([\d,]+) parameters\n", text)
    # In float32: parameters in use, gradients, master weights and two moments; and two
    # counters of updates.
    state = 5 * 4 * int(count.replace(",", "")) + 8
    (told,) = re.findall(r"state and gradients +([\d.]+) kB", text)
    assert told == f"{state / 1e3:.2f}"
    tokens, vocabulary, width, hidden = 16 * 16, 61, 16, 32
    # Of the one block, `elementwise` and what computing it again takes; then logits.
    kept = 2 * width + 3 * width + width + hidden
    scores = 2 * 16 * 3  # in float32 no kernel has attention: three of 4 bytes each
    block = kept + 2 * width + hidden + scores
    found = re.findall(r"activations +([\d.]+) kB", text)
    logits = vocabulary * (tokens * 8 + 4 * width)
    assert found == [f"{(4 * tokens * (kept + 2 * block) + logits) / 1e3:.2f}"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("file/plan.png", "File exists"),
        ("plan.xyz", "Format 'xyz' is not supported"),
    ],
)
def test_a_picture_that_cannot_be_drawn_is_named(name, reason, tmp_path):
    (tmp_path / "file").write_text("")
    config = small_run.make_config(tmp_path)
    with pytest.raises(OutputError) as error:
        report_plan(config, num_devices=1, picture=str(tmp_path / name))
    said = str(error.value)
    assert said.startswith(f"output='{tmp_path}/{name}' cannot be drawn ({reason}")
    assert said.endswith("; name a file that can be made, such as plan.png")


def test_a_step_that_moves_its_state_has_no_such_formula(tmp_path):
    settings = ("zero.offload=pinned_host", "model.embed_size=256")
    config = small_run.make_config(tmp_path, *settings)
    text = report_plan(config, num_devices=1, picture=str(tmp_path / "plan.png"))
    assert "rests there" in text
    assert "by formula" not in text


def test_closed_form_of_experts_splits_them_over_fewer_devices(tmp_path):
    """Fails if it divides experts, which the mesh has split, by all devices again."""
    config = small_run.make_config(
        tmp_path,
        "model.moe.num_experts=4",
        "mesh.data=2",
        "mesh.expert=4",
        "zero.min_shard_elements=0",
    )
    text = report_plan(config, num_devices=8, picture=str(tmp_path / "plan.png"))
    lines = re.findall(r"^[0-3]  .* ([\d.]+) kB +([\d.]+) kB$", text, re.M)
    assert len(lines) == 4
    for planned, closed_form in lines:
        assert float(closed_form) == pytest.approx(float(planned), rel=0.03)
    active, total = count_params(config.model, active=True), count_params(config.model)
    assert f"\n\na token uses {active:,} of {total:,} parameters\n\n" in text
