"""Pictures hold the curves, bars, loads and stages of their numbers."""

import json
import math

import matplotlib.image
import numpy as np
import pytest
from matplotlib import image

from tests.support import small_run
from zjax import observe
from zjax.config import load_config
from zjax.observe.history import HISTORY
from zjax.observe.plot import describe_load, has_load, relative_load
from zjax.parallel.pipeline_schedule import make_schedule
from zjax.run import reports as schedules
from zjax.run.plan_report import report_plan
from zjax.sharding import memory


def history(num_lines):
    rows = [
        {"step": n, "loss": 10.0 / n, "tokens_per_second": 1000.0 + n}
        for n in range(1, num_lines + 1)
    ]
    return [*rows, {"step": num_lines, "eval_loss": 2.0}]


def curves(axes):
    return {line.get_label(): line.get_xydata() for line in axes.lines}


def test_a_run_shows_training_validation_and_speed(tmp_path, drawn):
    observe.plot_run(history(20), tmp_path / "new" / "run.png", title="a run")
    upper, lower = drawn[0].axes
    np.testing.assert_allclose(
        curves(upper)["training"], [(n, 10 / n) for n in range(1, 21)]
    )
    np.testing.assert_allclose(curves(upper)["validation (last 2.000)"], [(20, 2)])
    np.testing.assert_allclose(lower.lines[0].get_ydata(), np.arange(1001, 1021))
    assert lower.get_title(loc="right") == "median 1,010 tokens/s"
    rows = [{"step": n, "loss": 1.0, "step_seconds": 0.25} for n in range(1, 5)]
    observe.plot_run(rows, tmp_path / "seconds.png", title="a model without tokens")
    lower = drawn[1].axes[1]
    np.testing.assert_array_equal(lower.lines[0].get_ydata(), 0.25)
    assert lower.get_title(loc="right") == "median 0.25 seconds per step"
    assert lower.get_ylabel() == "seconds per step"
    assert image.imread(tmp_path / "new" / "run.png").shape[:2] == (840, 1120)


def test_a_long_run_shows_a_centred_mean(tmp_path, drawn):
    observe.plot_run(history(100), tmp_path / "run.png", title="a run")
    mean = curves(drawn[0].axes[0])["training, mean of 5 points"]
    losses = [10 / n for n in range(1, 101)]
    assert mean[0] == pytest.approx((3, np.mean(losses[:5])))
    assert mean[-1] == pytest.approx((98, np.mean(losses[-5:])))


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param([], id="empty"),
        pytest.param([{"step": 0, "eval_loss": 2.0}], id="validation alone"),
        pytest.param(
            [{"step": 1, "loss": math.nan}, {"step": 2, "loss": 1.0}], id="nan"
        ),
    ],
)
def test_a_short_run_is_drawn_all_the_same(rows, tmp_path):
    observe.plot_run(rows, tmp_path / "run.png", title="a run")
    assert (tmp_path / "run.png").stat().st_size > 1000


def test_bars_are_the_bytes_of_each_stage(tmp_path, drawn):
    stages = [memory.zero_bytes(7.5e9, 64, stage) for stage in memory.STAGES]
    observe.plot_memory_per_stage(
        stages, tmp_path / "memory.png", title="7.5 B on 64 devices"
    )
    (axes,) = drawn[0].axes
    totals = [text.get_text().strip() for text in axes.texts]
    assert totals == ["120.00 GB", "31.41 GB", "16.64 GB", "1.88 GB"]
    parameters, gradients, optimizer = axes.containers
    assert [bar.get_width() for bar in parameters] == [15e9, 15e9, 15e9, 15e9 / 64]
    assert gradients[2].get_x() == 15e9
    assert optimizer[0].get_x() + optimizer[0].get_width() == 120e9
    assert axes.get_xlabel() == "GB per device"


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 1e308])
def test_a_number_that_no_axis_shows_leaves_a_gap(value, tmp_path, drawn):
    """Fails if Matplotlib ends the run over the picture of it."""
    rows = [*history(20), {"step": 21, "loss": value, "tokens_per_second": value}]
    observe.plot_run(rows, tmp_path / "run.png", title="a run")
    _, lower = drawn[0].axes
    assert lower.get_title(loc="right") == "median 1,010 tokens/s"
    assert np.isnan(lower.lines[0].get_ydata()[-1])


def test_metrics_are_counted_once_each(tmp_path, drawn):
    """Fails if bins of integers hold unequal numbers of them, or lose the ends."""
    values = {
        "seqreo": np.repeat(np.arange(3.0, 133.0), 2),
        "one": np.full(9, 7.0),
        "compression": np.linspace(0.1, 0.9, 500),
    }
    observe.plot_metrics(values, tmp_path / "metrics.png", title="samples")
    lengths, one, ratios = drawn[0].axes
    heights = [bar.get_height() for bar in lengths.patches]
    assert heights[:-1] == [6] * 43  # three integers, twice each
    assert (sum(heights), len(heights)) == (260, 44)
    assert [bar.get_height() for bar in one.patches] == [9]
    assert sum(bar.get_height() for bar in ratios.patches) == 500
    assert lengths.get_title(loc="right") == "median 67"
    assert [axes.get_xlabel() for axes in drawn[0].axes] == list(values)


def test_many_samples_are_drawn_by_equally_spaced_ones(tmp_path, drawn):
    values = {"voc": np.arange(float(5 << 20))}
    observe.plot_metrics(values, tmp_path / "metrics.png", title="samples")
    heights = [bar.get_height() for bar in drawn[0].axes[0].patches]
    assert sum(heights) == 1 << 20
    assert max(heights) - min(heights[:-1]) <= 1


MOE = ("num_layers=2", "moe.num_experts=4", "moe.top_k=2", "moe.bias_rate=0.01")


def test_a_run_draws_and_prints_the_load_of_its_history(tmp_path, drawn, capsys):
    """Fails if the load of a step, layer or expert is lost or in another place."""
    settings = (f"model.{setting}" for setting in MOE)
    told = "num_steps=3", "observe.plot=True"
    small_run.fit(tmp_path, *told, *settings, num_devices=1)
    rows = [json.loads(line) for line in (tmp_path / HISTORY).read_text().splitlines()]
    loads = np.array([row["load"] for row in rows if "load" in row])
    steps, layers, experts = loads.shape
    assert (steps, experts) == (3, 4)
    np.testing.assert_array_equal(loads.sum(2), 16 * 16 * 2)
    axes = drawn[1].axes[0]
    (shown,) = axes.images
    expected = loads / loads.mean(2, keepdims=True)
    expected = expected.transpose(1, 2, 0).reshape(layers * experts, steps)
    np.testing.assert_allclose(shown.get_array(), expected)
    assert shown.get_extent()[:2] == (0.5, 3.5)
    assert axes.get_ylim() == (layers * experts, 0)
    assert image.imread(tmp_path / "experts.png").ndim == 3
    fullest = " ".join(f"{x:.2f}" for x in (loads[-1].max(1) / loads[-1].mean(1)))
    lines = capsys.readouterr().out.splitlines()
    assert f"fullest expert over the mean, by layer: {fullest}" in lines
    assert lines[-1] == f"picture: {tmp_path / 'experts.png'}"


def test_segments_are_in_their_order_and_steps_may_be_uneven(tmp_path, drawn):
    wide, narrow = [[1, 2, 3]], [[1, 3], [0, 0]]
    history = [
        {"step": 1, "load/2": wide, "load/10": narrow, "load": 3.0},
        {"step": 2, "loss": 1.0},
        {"step": 3, "load/2": wide},
        {"step": 5, "load/10": narrow, "load/2": wide},
        {"step": 6, "load/10": narrow, "load/2": wide},
    ]
    observe.plot_load(history, tmp_path / "load.png", title="a run")
    axes = drawn[0].axes[0]
    found = axes.images[0].get_array()
    np.testing.assert_array_equal(found[:5, 0], [0.5, 1, 1.5, 0.5, 1.5])
    assert np.ma.getmaskarray(np.ma.masked_invalid(found))[5:].all()
    assert found.shape == (7, 3)
    assert [text.get_text().strip() for text in axes.texts] == ["1.50", "1.50", "nan"]
    assert axes.get_title(loc="right") == "fullest at step 6"
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0", "1", "2"]


def test_a_history_without_load_has_no_picture(tmp_path):
    assert not has_load([{"step": 1, "loss": 1.0, "load": 2.0, "load/x": [[1]]}])
    assert relative_load({"load": [1, 2]}) == []
    assert describe_load({}) == ""
    assert observe.read_history(tmp_path / HISTORY) == []


def test_many_layers_take_several_lines():
    text = describe_load({"load": [[3, 1]] * 30})
    first, second = text.splitlines()
    assert max(len(first), len(second)) <= 100
    assert second.startswith("  1.50 ")


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
