"""Pictures hold the curves and bars of their numbers."""

import math

import numpy as np
import pytest
from matplotlib import image

from zjax.observe import (
    plot_memory_per_stage,
    plot_metrics,
    plot_run,
)
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
    plot_run(history(20), tmp_path / "new" / "run.png", title="a run")
    upper, lower = drawn[0].axes
    np.testing.assert_allclose(
        curves(upper)["training"], [(n, 10 / n) for n in range(1, 21)]
    )
    np.testing.assert_allclose(curves(upper)["validation (last 2.000)"], [(20, 2)])
    np.testing.assert_allclose(lower.lines[0].get_ydata(), np.arange(1001, 1021))
    assert lower.get_title(loc="right") == "median 1,010 tokens/s"
    rows = [{"step": n, "loss": 1.0, "step_seconds": 0.25} for n in range(1, 5)]
    plot_run(rows, tmp_path / "seconds.png", title="a model without tokens")
    lower = drawn[1].axes[1]
    np.testing.assert_array_equal(lower.lines[0].get_ydata(), 0.25)
    assert lower.get_title(loc="right") == "median 0.25 seconds per step"
    assert lower.get_ylabel() == "seconds per step"
    assert image.imread(tmp_path / "new" / "run.png").shape[:2] == (840, 1120)


def test_a_long_run_shows_a_centred_mean(tmp_path, drawn):
    plot_run(history(100), tmp_path / "run.png", title="a run")
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
    plot_run(rows, tmp_path / "run.png", title="a run")
    assert (tmp_path / "run.png").stat().st_size > 1000


def test_bars_are_the_bytes_of_each_stage(tmp_path, drawn):
    stages = [memory.zero_bytes(7.5e9, 64, stage) for stage in memory.STAGES]
    plot_memory_per_stage(stages, tmp_path / "memory.png", title="7.5 B on 64 devices")
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
    plot_run(rows, tmp_path / "run.png", title="a run")
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
    plot_metrics(values, tmp_path / "metrics.png", title="samples")
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
    plot_metrics(values, tmp_path / "metrics.png", title="samples")
    heights = [bar.get_height() for bar in drawn[0].axes[0].patches]
    assert sum(heights) == 1 << 20
    assert max(heights) - min(heights[:-1]) <= 1
