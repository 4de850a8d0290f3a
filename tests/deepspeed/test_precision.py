"""Dtypes and loss scales of a ds_config, also where the run turns them on."""

import json

import pytest

from zjax.config import check_config, describe_config, load_config, to_mapping
from zjax.deepspeed import convert, sections
from zjax.run import resume
from zjax.settings.describe import differences

SCALE = {"initial_scale_power": 4, "min_loss_scale": 8, "hysteresis": 3}


def converted(**keys):
    return convert({"train_batch_size": 8} | keys)


def told(found, key):
    return next((row.verdict, row.note) for row in found.rows if row.key == key)


@pytest.mark.parametrize(
    ("section", "initial", "window"),
    [(SCALE, 16.0, 1_000), (SCALE | {"loss_scale": 128}, 128.0, 0)],
    ids=["dynamic", "fixed"],
)
def test_a_run_in_float16_has_the_scale_of_a_section_that_it_turns_on(
    section, initial, window
):
    found = converted(fp16={"enabled": "auto"} | section, bf16={"enabled": "auto"})
    assert not found.problems()
    config = load_config({}, found.settings, "precision.compute_dtype=float16")
    scale = config.precision.loss_scale
    assert (scale.initial, scale.window) == (initial, window)
    if window:
        assert (scale.minimum, scale.hysteresis) == (8.0, 3)
        assert told(found, "fp16.initial_scale_power") == (
            "derived",
            "precision.loss_scale.initial=16.0; for runs in float16",
        )
    check_config(config, num_devices=8)


def test_a_run_in_another_dtype_may_leave_such_a_scale_unused(tmp_path):
    found = converted(fp16={"enabled": "auto"} | SCALE)
    check_config(load_config({}, found.settings), num_devices=8)
    path = tmp_path / "ours.py"
    path.write_text(sections.config_file(found))
    assert (
        "    # Add where compute_dtype is float16: "
        "config.precision.loss_scale.initial = 16.0\n" in path.read_text()
    )
    check_config(load_config(path), num_devices=8)


def test_records_of_a_run_have_no_scale_that_it_leaves_unused(tmp_path, monkeypatch):
    """Fails if what a run saves cannot be read back, or differs from it."""
    monkeypatch.setattr(resume, "describe_plan", lambda plan: {})
    monkeypatch.setattr(resume, "describe_errors", lambda *rest: {})
    plan, rows = object.__new__(resume.Plan), object.__new__(resume.TrainState)
    found = converted(fp16={"enabled": "auto"} | SCALE)
    for dtype, initial in (("bfloat16", 65_536.0), ("float16", 16.0)):
        config = load_config({}, found.settings, f"precision.compute_dtype={dtype}")
        path = tmp_path / f"{dtype}.gin"
        path.write_text(describe_config(config))
        read = load_config(path)
        check_config(read, num_devices=8)
        assert read.precision.loss_scale.initial == initial
        saved = resume.describe_run(config, plan, rows, {}, 0)["config"]
        assert differences(json.loads(json.dumps(saved)), config) == ()
        assert differences(saved, to_mapping(read)) == ()


def test_small_arrays_stay_whole_where_the_run_has_the_stage():
    key = "stage3_param_persistence_threshold"
    found = converted(zero_optimization={"stage": "auto", key: 5_000})
    assert found.settings["zero.min_shard_elements"] == 5_000
    below = converted(zero_optimization={"stage": 2, key: 5_000})
    assert "zero.min_shard_elements" not in below.settings
