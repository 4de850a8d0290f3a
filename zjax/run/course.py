"""Schedules of a run, known before the start: as a table and as a plot."""

import functools
import os
from collections.abc import Callable, Mapping

import numpy as np

from zjax.observe import plot
from zjax.schedule.curriculum import metric_name
from zjax.schedule.dropping import dropping_values, make_dropping, make_layer_tokens
from zjax.schedule.learning_rate import make_schedule
from zjax.schedule.lengths import CUTS, in_steps, make_lengths, make_tokens
from zjax.schedule.pacing import make_pacing
from zjax.schedule.step_values import make_step_values
from zjax.settings.schema import Config
from zjax.sharding.describe import render_table

_NUM_ROWS = 11
"""Rows of the table, besides the row of the first step."""
_NUM_POINTS = 500
"""Steps from which a curve of the picture is drawn."""

Course = Mapping[str, Callable[[int], float]]
"""Functions of the number of a step, 1 or more, by name of the metric."""


def make_course(config: Config, num_devices: int = 1) -> Course:
    """Returns the schedules that the settings vary, by name of the metric.

    Example:
        >>> course = make_course(Config())
        >>> [f"{name}={at(1_000):.5g}" for name, at in course.items()]
        ['learning_rate=3e-05', 'consumed_tokens=3.2768e+07']
    """
    rate, tokens = make_schedule(config), make_tokens(config)
    course: dict[str, Callable[[int], float]] = {
        # The optimizer counts updates from 0.
        "learning_rate": lambda step: float(rate(step - 1)),
        "consumed_tokens": lambda step: float(tokens.sum_until(step)),
    }
    if config.sequence_warmup.form in CUTS:
        lengths = make_lengths(config)
        course["sequence_length"] = lambda step: float(lengths.at(step))
    dropping = functools.partial(dropping_values, config, make_dropping(config))
    for values in (make_step_values(config), dropping):
        for name in values(1):
            # Defaults bind the values of this iteration.
            course[name] = lambda step, name=name, values=values: values(step)[name]
    # With buckets, only the data tell the length of a step.
    if config.random_ltd.form != "none" and config.buckets.form == "none":
        until = make_layer_tokens(config, num_devices, make_lengths(config).at)
        course["consumed_layer_tokens"] = lambda step: float(until(step))
    course.update(_difficulties(config))
    return course


def _difficulties(config: Config) -> Course:
    """Difficulties of the curriculum, as far as settings alone give the values."""
    course: dict[str, Callable[[int], float]] = {}
    for metric in config.curriculum.metrics:
        # A growth without an end takes the last value from the index file.
        if metric.pacing.end or metric.pacing.kind in ("discrete", "custom"):
            at = make_pacing(in_steps(config, metric.pacing)).at
            course[metric_name(metric)] = lambda step, at=at: float(at(step))
    return course


def describe_course(config: Config, num_devices: int = 1) -> str:
    """Table of the schedules of a run at some of the steps.

    Args:
        config: Checked settings; the batch size is known.
        num_devices: Devices of the run.

    Returns:
        Text of at most 100 columns.

    Example:
        >>> print(describe_course(Config()).splitlines()[-1])
        1,000           3e-05        32,768,000
    """
    course = make_course(config, num_devices)
    shown = np.linspace(1, config.num_steps, _NUM_ROWS + 1).round().astype(int)
    rows = [
        [f"{step:,}", *(_format(at(step)) for at in course.values())]
        # A short run has fewer steps than rows.
        for step in dict.fromkeys(map(int, shown))
    ]
    names = [name.replace("_", " ") for name in course]
    return render_table(("step", *names), rows, right=range(len(names) + 1))


def plot_course(
    config: Config, path: str | os.PathLike[str], num_devices: int = 1
) -> None:
    """Plots the schedules of a run against the step."""
    course = make_course(config, num_devices)
    steps = np.unique(np.linspace(1, config.num_steps, _NUM_POINTS).round().astype(int))
    figure = plot.make_figure(8, 0.6 + 1.5 * len(course))
    panels = figure.subplots(len(course), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (name, at) in zip(panels, course.items(), strict=True):
        values = [at(int(step)) for step in steps]
        axes.step(steps, values, where="post", color=plot.BLUE, linewidth=1.5)
        axes.set_ylabel(name.replace("_", "\n"))
        # A curve of zeros needs some height.
        axes.set_ylim(0, 1.05 * max(values) or 1)
        plot.style_axes(axes)
    panels[-1].set_xlabel("step")
    plot.save_figure(figure, path)


def _format(value: float) -> str:
    is_whole = value == int(value) and abs(value) >= 1
    return f"{int(value):,}" if is_whole else f"{value:.3g}"
