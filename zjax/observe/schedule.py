"""Schedules of a run, known before the start: as a table and as a plot."""

import os

import numpy as np

from zjax.observe import plot
from zjax.schedule.training import TrainingSchedule
from zjax.sharding.describe import render_table

_NUM_ROWS = 11
"""Rows of the table, besides the row of the first step."""
_NUM_POINTS = 500
"""Steps from which a curve of the picture is drawn."""


def describe_schedule(schedule: TrainingSchedule) -> str:
    """Tabulates the schedules of a run at some of the steps.

    Example:
        >>> from zjax.settings.schema import Config
        >>> schedule = TrainingSchedule(Config())
        >>> print(describe_schedule(schedule).splitlines()[-1])
        1,000           3e-05        32,768,000
    """
    planned = _planned(schedule, _NUM_ROWS + 1)
    rows = [
        [f"{step:,}", *map(_format, values.values())]
        for step, values in planned.items()
    ]
    names = [name.replace("_", " ") for name in planned[1]]
    return render_table(("step", *names), rows, right=range(len(names) + 1))


def plot_schedule(schedule: TrainingSchedule, path: str | os.PathLike[str]) -> None:
    """Plots the schedules of a run against the step."""
    planned = _planned(schedule, _NUM_POINTS)
    figure = plot.make_figure(8, 0.6 + 1.5 * len(planned[1]))
    panels = figure.subplots(len(planned[1]), 1, sharex=True, squeeze=False)[:, 0]
    for axes, name in zip(panels, planned[1], strict=True):
        values = [at_step[name] for at_step in planned.values()]
        axes.step([*planned], values, where="post", color=plot.BLUE, linewidth=1.5)
        axes.set_ylabel(name.replace("_", "\n"))
        # A curve of zeros needs some height.
        axes.set_ylim(0, 1.05 * max(values) or 1)
        plot.style_axes(axes)
    panels[-1].set_xlabel("step")
    plot.save_figure(figure, path)


def _planned(
    schedule: TrainingSchedule, num_points: int
) -> dict[int, dict[str, float]]:
    """Returns the planned values of the first, the last, and evenly spaced steps."""
    steps = np.linspace(1, schedule.config.num_steps, num_points).round().astype(int)
    # A short run has fewer steps than points.
    return {step: schedule.planned(step) for step in dict.fromkeys(steps.tolist())}


def _format(value: float) -> str:
    is_whole = value == int(value) and abs(value) >= 1
    return f"{int(value):,}" if is_whole else f"{value:.3g}"
