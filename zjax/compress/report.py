"""Table and picture of weights before and after compression."""

import os
from collections.abc import Mapping
from typing import NamedTuple

from zjax.compress.scores import Score
from zjax.compress.sizes import Sizes, milliseconds
from zjax.estimate.device_memory import DeviceMemory
from zjax.observe.plot import BLUE, GRAY, ORANGE, make_figure, save_figure, style_axes
from zjax.sharding.describe import format_bytes, render_table


class Compared(NamedTuple):
    """Size and score of weights on held-out rows."""

    sizes: Sizes
    score: Score


def describe_scores(
    found: Mapping[str, Compared], memory: DeviceMemory, device: str, num_tokens: int
) -> str:
    """Formats a table of weights: bytes, loss, greedy tokens and time.

    Args:
        found: Sizes and scores by name of the weights.
        memory: Memory that decodes.
        device: Name of the device.
        num_tokens: Held-out tokens.
    """
    rows = [
        (
            name,
            format_bytes(each.sizes.total),
            f"{each.score.loss:.4f}",
            f"{each.score.perplexity:.3f}",
            f"{each.score.agreement:.1%}",
            f"{milliseconds(each.sizes, memory):.3g}",
        )
        for name, each in found.items()
    ]
    columns = "weights", "size", "loss", "perplexity", "same tokens", "ms a token"
    table = render_table(columns, rows, right=range(1, 6))
    return "\n".join(
        [
            table,
            f"of {num_tokens:,} held-out tokens; same tokens: the most likely next one",
            f"ms a token: one text on {device}, as fast as its memory delivers weights",
        ]
    )


def plot_scores(found: Mapping[str, Compared], path: str | os.PathLike[str]) -> None:
    """Draws the loss of weights against the size."""
    figure = make_figure(6, 4)
    axes = figure.subplots()
    colors = dict(zip(found, (GRAY, ORANGE, BLUE), strict=False))
    for name, each in found.items():
        size, loss = each.sizes.total / 1e9, each.score.loss
        axes.plot([size], [loss], "o", color=colors[name], markersize=8)
        place = {"xytext": (6, 6), "textcoords": "offset points"}
        axes.annotate(name, (size, loss), color=colors[name], **place)
    axes.set_xlabel("size in GB")
    axes.set_ylabel("loss on held-out rows")
    axes.margins(0.25)
    style_axes(axes)
    save_figure(figure, path)
