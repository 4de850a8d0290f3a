"""What changes from step to step in a run, as a table and a picture before it."""

import matplotlib.image
import numpy as np
import pytest

from zjax.config import load_config
from zjax.data.curriculum import Curriculum
from zjax.data.metric_index import write_index
from zjax.observe.schedule import describe_schedule
from zjax.run.plan_report import report_plan
from zjax.schedule.training import TrainingSchedule

SETTINGS = {
    "num_steps": 1_000,
    "optimizer": {"schedule": {"num_warmup_steps": 100}},
    "data": {"length": 512},
}
WINDOW = "sequence_warmup=window", "sequence_warmup.pacing.num_steps=400"


def make_config(*overrides):
    return load_config(SETTINGS, *overrides)


@pytest.mark.parametrize(
    ("kind", "name", "tokens"),
    [
        ("window", "attention_window", 16_384_000),
        ("truncate", "sequence_length", 13_115_392),
    ],
)
def test_schedules_are_those_of_the_metrics(kind, name, tokens):
    config = make_config(*WINDOW, f"sequence_warmup={kind}")
    planned = TrainingSchedule(config).planned
    assert list(planned(1)) == ["learning_rate", "consumed_tokens", name]
    found = [planned(step)[name] for step in (1, 200, 399, 400, 1_000)]
    assert found == [64, 256, 448, 512, 512]
    assert planned(1)["learning_rate"] == 0.0
    assert planned(1_000)["consumed_tokens"] == tokens


def test_dropped_tokens_and_layers_are_among_them():
    drops = "random_ltd=span", "layer_drop.theta=0.5", "layer_drop.gamma=1"
    planned = TrainingSchedule(make_config(*drops)).planned
    names = ["kept_tokens", "layer_drop_theta", "consumed_layer_tokens"]
    assert list(planned(1))[2:] == names
    found = [planned(step)["kept_tokens"] for step in (1, 500, 1_000)]
    assert found == [128, 256, 384]
    assert [planned(step)["layer_drop_theta"] for step in (1, 100)] == [1.0, 0.5]


def test_difficulties_have_the_names_of_the_metrics(tmp_path):
    """Fails if a file that was renamed has one name before the run, and one in it."""
    write_index(tmp_path / "easy.index", "voc", np.arange(200.0), "abcd")
    pacing = {"start": 5, "num_steps": 400}
    metric = {"index": str(tmp_path / "easy.index"), "pacing": pacing}
    config = make_config({"curriculum": {"metrics": (metric,)}})
    planned, opened = TrainingSchedule(config).planned(200), Curriculum(config, "abcd")
    assert {"difficulty_easy": planned["difficulty_easy"]} == opened.values(200)


def test_listed_values_are_drawn_without_the_index():
    values = {"kind": "discrete", "values": (5, 9), "last_steps": (400,)}
    metric = {"index": "voc.index", "difficulty": "value", "pacing": values}
    config = make_config({"curriculum": {"metrics": (metric,)}})
    planned = TrainingSchedule(config).planned
    assert [planned(step)["difficulty_voc"] for step in (400, 401)] == [5, 9]


def test_layers_of_stages_that_run_whole_count_so():
    """Of 6 layers in a stage, 2 are whole; of 12 without stages, 2."""
    for stages, wanted in ((1, 2 * 512 + 10 * 128), (2, 4 * 512 + 8 * 128)):
        config = make_config("random_ltd=span", f"mesh.pipeline={stages}")
        planned = TrainingSchedule(config, 2).planned(1)
        assert planned["consumed_layer_tokens"] == 32 * wanted


def test_the_table_fits_a_terminal_and_ends_with_the_run(tmp_path):
    config = make_config(*WINDOW)
    lines = describe_schedule(TrainingSchedule(config)).splitlines()
    assert max(map(len, lines)) <= 100
    first, last = lines[2].split(), lines[-1].split()
    assert (first[0], first[-1]) == ("1", "64")
    assert (last[0], last[-2], last[-1]) == ("1,000", "16,384,000", "512")


def test_the_plan_draws_it(tmp_path):
    """With the end by tokens."""
    short = (
        "sequence_warmup.pacing.num_steps=40",
        "optimizer.schedule.num_warmup_steps=10",
    )
    settings = *WINDOW, "num_tokens=1000000", *short
    config = make_config(f"directory={tmp_path}", *settings)
    text = report_plan(config, num_devices=8, schedule=True)
    assert text.endswith(f"picture: {tmp_path}/plan.png and {tmp_path}/steps.png")
    assert "1,015,808" in text and "16,384,000" not in text
    assert matplotlib.image.imread(tmp_path / "steps.png").std() > 0


def test_dropped_tokens_and_layers_are_schedules_too():
    dropping = "random_ltd=span", "layer_drop.theta=0.5", "layer_drop.gamma=0.001"
    planned = TrainingSchedule(make_config(*dropping)).planned
    found = [planned(step)["kept_tokens"] for step in (1, 1_000, 1_001)]
    assert found == [128, 384, 512]  # the paper counts steps from 0
    assert planned(1)["layer_drop_theta"] == 1.0
    assert 0.68 < planned(1_001)["layer_drop_theta"] < 0.69
