"""Plots of a run and of a plan, drawn without a display, and the load of experts."""

import os
import pathlib
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from zjax.errors import check_installed
from zjax.observe.metrics import Value
from zjax.sharding.describe import format_bytes
from zjax.sharding.memory import StageBytes

BLUE, ORANGE, GREEN, GRAY = "#3366aa", "#dd7722", "#339977", "#888888"
_MIN_FOR_AVERAGE = 50
"""Points from which on a mean is drawn."""
_NUM_BINS = 50
_MAX_COUNTED = 1 << 20
"""Most samples of a metric in a histogram; of more, equally spaced samples are
taken."""
_MAX_DRAWN = 1e30
"""Matplotlib cannot place tick labels beyond this value."""
_STAGES = (
    "stage 0\nnothing split",
    "stage 1\noptimizer state",
    "stage 2\n+ gradients",
    "stage 3\n+ parameters",
)


def plot_run(
    history: Sequence[Mapping[str, Value]],
    path: str | os.PathLike[str],
    *,
    title: str,
) -> None:
    """Plots loss and speed of a run against the step."""
    figure = make_figure(8, 6)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    figure.suptitle(title, fontsize=12)
    _draw_loss(upper, *_curve(history, "loss"))
    steps, losses = _curve(history, "eval_loss")
    if len(steps):
        style = {"color": ORANGE, "marker": "o", "markersize": 4, "linewidth": 1.5}
        label = f"validation (last {losses[-1]:.3f})"
        upper.plot(steps, losses, label=label, **style)
    upper.set_ylabel("loss")
    if upper.get_legend_handles_labels()[0]:
        upper.legend(frameon=False)
    if any("tokens_per_second" in row for row in history):
        _draw_speed(lower, *_curve(history, "tokens_per_second"), "tokens/s", ",.0f")
    else:
        _draw_speed(lower, *_curve(history, "step_seconds"), "seconds per step", ".3g")
    for axes in (upper, lower):
        style_axes(axes)
    save_figure(figure, path)


_REWARDS = (
    (("reward", "eval_reward"), "reward"),
    (("pass_at_1", "eval_pass_at_1"), "pass@1"),
    (("completion_length",), "tokens of a text"),
    (("entropy",), "entropy (nats)"),
    (("kl", "sampler_kl"), "divergence (nats)"),
)
"""Metrics of texts that a picture shows, and the names of their axes."""


def has_rewards(history: Sequence[Mapping[str, Value]]) -> bool:
    """Whether a history is of a run that learned from rewards."""
    return any("reward" in row for row in history)


def plot_rewards(
    history: Sequence[Mapping[str, Value]],
    path: str | os.PathLike[str],
    *,
    title: str,
) -> None:
    """Plots reward, pass@1, length, entropy and divergences against the step."""
    panels = [(names, axis) for names, axis in _REWARDS if _has_any(history, names)]
    figure = make_figure(8, 1 + 1.8 * len(panels))
    figure.suptitle(title, fontsize=12)
    rows = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (names, label) in zip(rows, panels, strict=True):
        for name, color in zip(names, (BLUE, ORANGE), strict=False):
            steps, values = _curve(history, name)
            if len(steps):
                marker = "o" if name.startswith("eval_") else None
                style = {"marker": marker, "markersize": 4, "linewidth": 1.3}
                axes.plot(steps, values, color=color, label=name, **style)
        axes.set_ylabel(label)
        axes.legend(frameon=False, fontsize=8)
        style_axes(axes)
    rows[-1].set_xlabel("step")
    save_figure(figure, path)


def _has_any(history: Sequence[Mapping[str, Value]], names: Sequence[str]) -> bool:
    """Whether a history has values of any of some metrics."""
    return any(name in row for row in history for name in names)


def plot_memory_per_stage(
    stages: Sequence[StageBytes], path: str | os.PathLike[str], *, title: str
) -> None:
    """Plots bytes per device for ZeRO stages 0 to 3, given in order.

    Reference:
        ZeRO, arXiv:1910.02054, figure 1.
    """
    figure = make_figure(8, 4)
    axes = figure.subplots()
    rows = np.arange(len(stages))
    start = np.zeros(len(stages))
    parts = (
        ("parameters", BLUE, [stage.parameters for stage in stages]),
        ("gradients", ORANGE, [stage.gradients for stage in stages]),
        ("optimizer state", GREEN, [stage.optimizer for stage in stages]),
    )
    for label, color, sizes in parts:
        widths = np.asarray(sizes, dtype=float)
        axes.barh(rows, widths, left=start, color=color, label=label, height=0.6)
        start += widths
    unit, size = _unit(float(start.max()))
    for row, total in zip(rows, start, strict=True):
        text = f" {format_bytes(total)}"
        axes.text(total, float(row), text, va="center", fontsize=10)
    axes.set_yticks(rows, _STAGES[: len(stages)])
    axes.invert_yaxis()
    # Room for the text behind the longest bar.
    axes.set_xlim(0, 1.15 * float(start.max()))
    axes.xaxis.set_major_formatter(lambda x, _: f"{x / size:g}")
    axes.set_xlabel(f"{unit} per device")
    axes.set_title(title, fontsize=12)
    axes.legend(frameon=False, loc="lower right")
    style_axes(axes)
    axes.grid(visible=False, axis="y")
    save_figure(figure, path)


def plot_metrics(
    values: Mapping[str, np.ndarray], path: str | os.PathLike[str], *, title: str
) -> None:
    """Plots a histogram of each metric of samples, ascending, with the median."""
    figure = make_figure(8, 0.6 + 1.9 * len(values))
    figure.suptitle(title, fontsize=12)
    panels = figure.subplots(len(values), 1, squeeze=False)[:, 0]
    for axes, (name, ascending) in zip(panels, values.items(), strict=True):
        shown = ascending[:: -(-len(ascending) // _MAX_COUNTED)]
        axes.hist(shown, bins=_bins(shown), color=BLUE)
        # The lower median, which is one of the samples.
        median = float(shown[(len(shown) - 1) // 2])
        axes.axvline(median, color=ORANGE, linewidth=1.5)
        axes.set_title(f"median {median:,.6g}", fontsize=9, loc="right")
        axes.set_xlabel(name)
        axes.set_ylabel("samples")
        style_axes(axes)
    save_figure(figure, path)


def make_figure(width: int, height: int | float) -> Any:
    """Returns an empty figure that needs no display; width and height in inches."""
    check_installed("matplotlib")
    # Not pyplot, which chooses a display and keeps every figure.
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _bins(ascending: np.ndarray) -> int | np.ndarray:
    """Bins of a histogram; for integers, each bin holds equally many integers."""
    if np.any(ascending % 1):
        return _NUM_BINS
    first, last = float(ascending[0]), float(ascending[-1])
    width = (last - first) // _NUM_BINS + 1
    # Edges lie between integers.
    return np.arange(first - 0.5, last + width + 0.5, width)


def _draw_loss(axes: Any, steps: np.ndarray, losses: np.ndarray) -> None:
    """Draws the training loss, and a centred mean of many points."""
    if not len(steps):
        return
    if len(steps) < _MIN_FOR_AVERAGE:
        axes.plot(steps, losses, color=BLUE, linewidth=1.5, label="training")
        return
    axes.plot(steps, losses, color=BLUE, linewidth=0.8, alpha=0.35, label="training")
    # The window is 4 % of the points.
    half = len(steps) // 50
    window = np.full(2 * half + 1, 1 / (2 * half + 1))
    # No mean at both ends, where the window would be cut.
    means = np.convolve(losses, window, mode="valid")
    label = f"training, mean of {len(window)} points"
    axes.plot(steps[half:-half], means, color=BLUE, linewidth=1.8, label=label)


def _draw_speed(
    axes: Any, steps: np.ndarray, speeds: np.ndarray, unit: str, digits: str
) -> None:
    """Draws a speed and the median, from 0 upwards."""
    axes.plot(steps, speeds, color=GREEN, linewidth=1.2)
    if np.isfinite(speeds).any():
        median = float(np.nanmedian(speeds))
        axes.axhline(median, color=GRAY, linestyle="--", linewidth=1, zorder=1)
        axes.set_title(f"median {median:{digits}} {unit}", fontsize=9, loc="right")
        axes.set_ylim(0, 1.2 * float(np.nanmax(speeds)))
    axes.set_ylabel(unit)
    axes.set_xlabel("step")
    axes.yaxis.set_major_formatter("{x:,.10g}")


def _curve(
    history: Sequence[Mapping[str, Value]], label: str
) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of a metric; a value too large to draw leaves a gap."""
    points = [(row["step"], row[label]) for row in history if label in row]
    values = np.array([y for _, y in points], float)
    drawable = np.where(np.abs(values) <= _MAX_DRAWN, values, np.nan)
    return np.array([x for x, _ in points]), drawable


def _unit(num_bytes: float) -> tuple[str, float]:
    units = {"TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3}
    return next(((name, n) for name, n in units.items() if num_bytes >= n), ("B", 1.0))


def style_axes(axes: Any) -> None:
    """Applies the common style of all plots to Matplotlib axes."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)


def save_figure(figure: Any, path: str | os.PathLike[str]) -> None:
    """Saves a figure, creating the parent directory."""
    pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)


_NAME = re.compile(r"load(/\d+)?")
_WIDTH = 100
_TICKS = 16
"""Most layers with a number beside the picture."""


def relative_load(values: Mapping[str, Value]) -> list[np.ndarray]:
    """Tokens of each expert over the mean of the layer, by layer with experts."""
    # By length first, so that load/10 follows load/9.
    names = sorted(filter(_NAME.fullmatch, values), key=lambda name: (len(name), name))
    layers = [np.ravel(row) for name in names for row in _rows(values[name])]
    # A layer without tokens has no mean.
    return [x / x.mean() if x.any() else np.full(x.size, np.nan) for x in layers]


def describe_load(values: Mapping[str, Value]) -> str:
    """Describes how even the load of a step is; empty without experts."""
    layers = relative_load(values)
    if not layers:
        return ""
    numbers = " ".join(f"{x.max():.2f}" for x in layers)
    text = f"fullest expert over the mean, by layer: {numbers}"
    return textwrap.fill(text, _WIDTH, subsequent_indent="  ")


def has_load(history: Sequence[Mapping[str, Value]]) -> bool:
    """Whether any step of a history has the load of experts."""
    return any(relative_load(row) for row in history)


def plot_load(
    history: Sequence[Mapping[str, Value]],
    path: str | os.PathLike[str],
    *,
    title: str,
) -> None:
    """Plots the load of each expert against the step; white is the layer's mean.

    The load of the fullest expert at the last step stands beside each layer.
    """
    steps, layers = _load_by_step(history)
    sizes = [len(x) for x in layers]
    figure = make_figure(8, 3 + min(6.0, 0.4 * len(layers)))
    axes = figure.subplots()
    ends = np.cumsum([0, *sizes])
    image = axes.pcolorfast(
        _edges(steps),
        np.arange(ends[-1] + 1),
        np.concatenate(layers),
        # White, the middle of the colours, is the mean: limits lie evenly around 1.
        cmap="RdBu_r",
        vmin=0,
        vmax=2,
    )
    for end in ends[1:-1]:
        axes.axhline(end, color="black", linewidth=0.5)
    every = -(-len(layers) // _TICKS)
    numbers = range(0, len(layers), every)
    middles = [(ends[i] + ends[i + 1]) / 2 for i in numbers]
    axes.set_yticks(middles, numbers)
    for i, middle in zip(numbers, middles, strict=True):
        text = f" {layers[i][:, -1].max():.2f}"
        axes.text(_edges(steps)[-1], middle, text, va="center", fontsize=9)
    axes.invert_yaxis()
    axes.set_ylabel("layer with experts, and its experts")
    axes.set_xlabel("step")
    axes.set_title(title, fontsize=12)
    axes.set_title(f"fullest at step {steps[-1]:,.0f}", fontsize=9, loc="right")
    bar = figure.colorbar(image, ax=axes, extend="max")
    bar.set_label("tokens of an expert over the mean of its layer")
    save_figure(figure, path)


def _rows(value: Value) -> list[Any]:
    """Rows of the layers with experts; a load of one dim has none."""
    return value if isinstance(value, list) and np.ndim(value) > 1 else []


def _load_by_step(
    history: Sequence[Mapping[str, Value]],
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Steps, and float[experts, steps] by layer."""
    columns = [(row["step"], relative_load(row)) for row in history]
    columns = [(step, layers) for step, layers in columns if layers]
    # Rows of a run with other numbers of experts are left out.
    shape = [len(x) for x in columns[-1][1]]
    same = [(s, x) for s, x in columns if [len(layer) for layer in x] == shape]
    layers = [np.stack(each, 1) for each in zip(*(x for _, x in same), strict=True)]
    return np.array([step for step, _ in same], float), layers


def _edges(steps: np.ndarray) -> np.ndarray:
    """Ends of the columns, halfway between steps."""
    if len(steps) == 1:
        return np.array([steps[0] - 0.5, steps[0] + 0.5])
    middle = (steps[1:] + steps[:-1]) / 2
    return np.array([2 * steps[0] - middle[0], *middle, 2 * steps[-1] - middle[-1]])
