"""The schedule of a pipeline as a table and as a picture."""

import matplotlib.image
import numpy as np

from zjax.config import load_config
from zjax.observe import schedule as schedules
from zjax.parallel.pipeline_schedule import make_schedule
from zjax.run.plan_report import report_plan


def test_schedules_are_compared_for_the_same_stages():
    schedule = make_schedule("zb_h1", num_stages=2, num_microbatches=3)
    lines = schedules.describe_pipeline(schedule, recompute=False).splitlines()
    assert lines[0] == "2 stages, 3 microbatches; a forward pass takes 1"
    cells = [line.split() for line in lines[3:]]
    assert cells == [
        ["gpipe", "12", "25.0", "%", "3", *"activations of a stage".split()],
        ["1f1b", "12", "25.0", "%", "3", *"activations of a stage".split()],
        ["*", "zb_h1", "11", "18.2", "%", "3", *"activations of a stage".split()],
    ]


def test_a_picture_shows_every_kind_of_pass(tmp_path):
    path = tmp_path / "schedule.png"
    schedule = make_schedule("zb_h1", num_stages=2, num_microbatches=3)
    schedules.plot_pipeline(schedule, path, costs=schedules.pass_costs(recompute=False))
    pixels = (255 * matplotlib.image.imread(path)[..., :3]).round().astype(int)
    for color in schedules.COLORS.values():
        wanted = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
        assert (np.abs(pixels - wanted).max(-1) <= 2).sum() > 1000


def test_plan_says_when_stages_are_busy(tmp_path):
    settings = {"mesh": {"pipeline": 4}, "num_microbatches": 4}
    config = load_config({**settings, "directory": str(tmp_path)})
    text = report_plan(config, num_devices=8, schedule=True)
    assert "* 1f1b" in text
    pictures = [f"{tmp_path}/{name}.png" for name in ("plan", "steps", "schedule")]
    assert text.endswith(f"picture: {' and '.join(pictures)}")
    assert (tmp_path / "schedule.png").exists()
