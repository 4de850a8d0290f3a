"""Load of experts: a line about the last step, and a heat map over the steps of a run.

The total `load` of a step, or `load/0`, `load/1`, ... by segment, is the number of
tokens that chose each expert, int[layers, experts].
"""

import os
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from zjax.observe.metrics import Value
from zjax.observe.plot import make_figure, save_figure

_NAME = re.compile(r"load(/\d+)?")
_WIDTH = 100
_TICKS = 16
"""Most layers with a number beside the picture."""


def relative_load(values: Mapping[str, Value]) -> list[np.ndarray]:
    """Tokens of each expert over the mean of the layer, by layer with experts.

    Example:
        >>> [x.tolist() for x in relative_load({"load": [[3, 1], [2, 2]]})]
        [[1.5, 0.5], [1.0, 1.0]]
    """
    # By length first, so that load/10 follows load/9.
    names = sorted(filter(_NAME.fullmatch, values), key=lambda name: (len(name), name))
    layers = [np.ravel(row) for name in names for row in _rows(values[name])]
    # A layer without tokens has no mean.
    return [x / x.mean() if x.any() else np.full(x.size, np.nan) for x in layers]


def describe_load(values: Mapping[str, Value]) -> str:
    """Describes how even the load of a step is; empty without experts.

    Example:
        >>> print(describe_load({"load": [[3, 1], [2, 2]]}))
        fullest expert over the mean, by layer: 1.50 1.00
    """
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
