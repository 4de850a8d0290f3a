"""Picture of a contest: speed and peak memory of each program."""

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from contests.contest import Contest
from contests.turns import PEAK, SPEED, Record
from zjax.observe.plot import BLUE, GRAY, make_figure, save_figure, style_axes
from zjax.sharding.describe import format_bytes


def draw_contest(
    contest: Contest, records: Sequence[Record], path: pathlib.Path
) -> bool:
    """Draws a row of bars per program with a speed; returns whether there is any."""
    drawn = [record for record in records if SPEED in record.result]
    if not drawn:
        return False
    figure = make_figure(10, 1.4 + 0.36 * len(drawn))
    left, right = figure.subplots(1, 2, sharey=True)
    machine = drawn[0].machine
    where = f"{machine.num_devices} x {machine.device}"
    figure.suptitle(f"{contest.title}, {where}", fontsize=12)
    rows = np.arange(len(drawn))
    ours = {each.name for each in contest.contestants if each.kind == "zjax"}
    colors = [BLUE if record.name in ours else GRAY for record in drawn]
    style = {"height": 0.6, "color": colors}
    spreads = [record.result[SPEED] for record in drawn]
    speeds = np.array([spread["median"] for spread in spreads])
    ends = np.array([(spread["min"], spread["max"]) for spread in spreads]).T
    left.barh(rows, speeds, xerr=np.abs(ends - speeds), ecolor="#333333", **style)
    _label_bars(left, ends[1], [f"{speed:,.0f}" for speed in speeds])
    left.set_yticks(rows, [record.name for record in drawn])
    left.invert_yaxis()  # the first program on top
    left.set_xlabel("tokens/s per device")
    left.xaxis.set_major_formatter("{x:,.10g}")
    sizes = np.array([record.result.get(PEAK) or 0 for record in drawn])
    right.barh(rows, sizes / 1e9, **style)
    texts = [format_bytes(size) if size else "not known" for size in sizes.tolist()]
    _label_bars(right, sizes / 1e9, texts)
    right.set_xlabel("peak memory per device, GB")
    for axes in (left, right):
        style_axes(axes)
        axes.grid(visible=False, axis="y")
    save_figure(figure, path)
    return True


def _label_bars(axes: Any, ends: np.ndarray, texts: Sequence[str]) -> None:
    """Writes a text behind the end of each bar."""
    for row, (end, text) in enumerate(zip(ends, texts, strict=True)):
        axes.text(float(end), row, f" {text}", va="center", fontsize=9)
    axes.set_xlim(0, 1.3 * (float(max(ends)) or 1.0))
