"""Pictures of a layout, as text and as a plot."""

import importlib.util
import os
import pathlib
from typing import Any

import numpy as np

from zjax_kernels.device import describe, invalid
from zjax_kernels.sparse.arguments import integer_problems
from zjax_kernels.sparse.layout import BlockLayout, Pattern, check_layout

MAX_PIXELS = 512
"""Pixels per side of a plot; several blocks of a larger layout share one."""
_LIVE = (0.20, 0.40, 0.67)
_DIAGONAL = (0.87, 0.47, 0.13)
_MIN_SHADE = 0.4
"""Shade of a cell with a single live block among many."""


def draw_layout(layout: BlockLayout, head: int = 0) -> str:
    """Draws one head as text, a character per block.

    Args:
        layout: Layout of at most 512 blocks per side.
        head: Index of the head.

    Returns:
        One line per block row: `#` is live, `+` live and masked by token on the causal
        diagonal, `.` dead.

    Raises:
        ValueError: `layout` is not a BlockLayout or has too many blocks, or there is no
            such head.

    Example:
        >>> live = [[1, 0, 0], [0, 1, 0], [1, 1, 0]]
        >>> print(draw_layout(BlockLayout.from_dense(live, block=16, num_heads=1)))
        #..
        .#.
        ##.
    """
    pattern = _pattern_of(layout, head)
    shape = layout.num_rows, layout.num_columns
    if max(shape) > MAX_PIXELS:
        problem = f"is more than {MAX_PIXELS} blocks a side"
        raise invalid("layout", shape, problem, "use plot_layout, which merges blocks")
    rows, columns = pattern.rows, pattern.columns
    marks = np.full(shape, ".")
    marks[rows, columns] = np.where(_on_diagonal(layout, rows, columns), "+", "#")
    return "\n".join("".join(row) for row in marks)


def plot_layout(
    layout: BlockLayout,
    *,
    head: int = 0,
    axes: Any = None,
    path: str | os.PathLike[str] | None = None,
) -> Any:
    """Plots one head: live blocks, blocks on the causal diagonal, and dead blocks.

    More than 512 blocks per side share pixels, shaded by the number of live blocks.

    Args:
        layout: Layout to plot.
        head: Index of the head.
        axes: Matplotlib Axes to draw in; None makes a figure.
        path: File to write, in the format of the suffix.

    Returns:
        The Matplotlib Figure.

    Raises:
        ValueError: `layout` is not a BlockLayout, or there is no such head.
        ImportError: Matplotlib is not installed.

    Example:
        >>> layout = BlockLayout.from_dense(np.ones([2, 2]), block=64, num_heads=1)
        >>> plot_layout(layout).axes[0].get_title()
        '128 tokens, blocks of 64, density 100%'
    """
    pattern = _pattern_of(layout, head)
    if importlib.util.find_spec("matplotlib") is None:
        problem = "is not installed, and plot_layout needs it"
        remedy = "pip install matplotlib"
        raise ImportError(describe("package", "'matplotlib'", problem, remedy))
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    if axes is None:
        # Without pyplot: no window, and no global list of figures.
        axes = Figure(figsize=(7, 7), layout="constrained").subplots()
    side = -(-max(layout.num_rows, layout.num_columns) // MAX_PIXELS)
    density, on_diagonal = _gather(layout, pattern, side)
    bottom, right = (side * cells for cells in density.shape)
    colors = _shade(density, on_diagonal)
    axes.imshow(colors, extent=(0, right, bottom, 0))
    margin = max(bottom, right) / 100  # the frame would hide the first row and column
    axes.set_xlim(-margin, layout.num_columns + margin)
    axes.set_ylim(layout.num_rows + margin, -margin)
    axes.set_title(_title(layout, pattern), fontsize=11)
    axes.set_xlabel("block of keys")
    axes.set_ylabel("block of queries")
    if on_diagonal.any():
        labels = (_LIVE, "live"), (_DIAGONAL, "masked by token, on the causal diagonal")
        marks = [Patch(color=color, label=label) for color, label in labels]
        axes.legend(handles=marks, loc="upper right", fontsize=8, frameon=False)
    figure = axes.get_figure(root=True)
    if path is not None:
        pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=140)
    return figure


def _shade(density: np.ndarray, on_diagonal: np.ndarray) -> np.ndarray:
    """Returns RGB colours [rows, columns, 3], white where nothing lives."""
    color = np.where(on_diagonal[..., None], _DIAGONAL, _LIVE)
    strength = np.where(density > 0, _MIN_SHADE + (1 - _MIN_SHADE) * density, 0)[
        ..., None
    ]
    return 1 - strength * (1 - color)


def _gather(
    layout: BlockLayout, pattern: Pattern, side: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the live fraction of each pixel, and whether the diagonal crosses."""
    num_rows, num_columns = layout.num_rows, layout.num_columns
    shape = -(-num_rows // side), -(-num_columns // side)
    rows, columns = pattern.rows, pattern.columns
    cells = rows // side * shape[1] + columns // side
    live = np.bincount(cells, minlength=shape[0] * shape[1]).reshape(shape)
    # The last pixels of a side cover fewer blocks.
    heights = np.minimum(side, num_rows - side * np.arange(shape[0]))
    widths = np.minimum(side, num_columns - side * np.arange(shape[1]))
    on_diagonal = np.zeros(shape[0] * shape[1], bool)
    on_diagonal[cells[_on_diagonal(layout, rows, columns)]] = True
    return live / np.outer(heights, widths), on_diagonal.reshape(shape)


def _on_diagonal(
    layout: BlockLayout, rows: np.ndarray, columns: np.ndarray
) -> np.ndarray:
    return layout.causal & (rows == columns)


def _title(layout: BlockLayout, pattern: Pattern) -> str:
    """Returns tokens, block size and density."""
    block, num_rows, num_columns = layout.block, layout.num_rows, layout.num_columns
    tokens = f"{num_rows * block:,}"
    if num_rows != num_columns:
        tokens += f" x {num_columns * block:,}"
    density = len(pattern.columns) / (num_rows * num_columns)
    return f"{tokens} tokens, blocks of {block}, density {100 * density:.3g}%"


def _pattern_of(layout: BlockLayout, head: int) -> Pattern:
    """Returns the pattern of a head; refuses other values than a layout and head."""
    check_layout(layout)
    if integer_problems("head", head, 0) or head >= layout.num_heads:
        problem = f"is not one of {layout.num_heads} heads"
        raise invalid("head", head, problem, f"give 0 to {layout.num_heads - 1}")
    return layout.patterns[layout.head_patterns[head]]
