"""Pictures show live, cut and dead blocks, and gather many into few cells."""

import sys
import tracemalloc

import numpy as np
import pytest
from matplotlib import image
from matplotlib.figure import Figure

from tests.support.refusals import value_error
from zjax_kernels.sparse.layout import BlockLayout
from zjax_kernels.sparse.patterns import BSLongformer, Dense, LocalSlidingWindow
from zjax_kernels.sparse.picture import draw_layout, plot_layout

WHITE = 1.0


def cells_of(figure):
    """The drawn colours, [rows, columns, 3]."""
    return np.asarray(figure.axes[0].images[0].get_array())


def darkness(figure):
    """0 where nothing is drawn, more where more lives."""
    return WHITE - cells_of(figure).mean(axis=-1)


def test_text_shows_live_cut_and_dead_blocks():
    live = np.array([[1, 1, 0], [0, 0, 0], [1, 0, 1]])
    heads = np.stack([live, np.ones((3, 3))])
    layout = BlockLayout.from_dense(heads, block=16, causal=True)
    assert draw_layout(layout) == "+..\n...\n#.+"
    assert draw_layout(layout, head=1) == "+..\n#+.\n##+"
    both_ways = BlockLayout.from_dense(heads, block=16)
    assert draw_layout(both_ways) == "##.\n...\n#.#"


def test_plot_shows_live_cut_and_dead_blocks():
    layout = LocalSlidingWindow(1, block=64, num_sliding_window_blocks=5).layout(640)
    figure = plot_layout(layout)
    assert isinstance(figure, Figure)
    cells = cells_of(figure)
    live = layout.to_dense()[0]
    assert cells.shape == (10, 10, 3)
    np.testing.assert_array_equal((cells < WHITE).any(axis=-1), live)
    cut, below = (
        cells[np.eye(10, dtype=bool)],
        cells[live & np.tri(10, k=-1, dtype=bool)],
    )
    assert len(np.unique(cut, axis=0)) == len(np.unique(below, axis=0)) == 1
    assert (cut[0] != below[0]).any()
    legend = figure.axes[0].get_legend()
    texts = [text.get_text() for text in legend.get_texts()]
    assert texts == ["live", "masked by token, on the causal diagonal"]


def test_title_tells_of_the_head():
    live = np.zeros((2, 4, 4), bool)
    live[1, 0] = True
    layout = BlockLayout.from_dense(live, block=128)
    title = plot_layout(layout, head=1).axes[0].get_title()
    assert title == "512 tokens, blocks of 128, density 25%"
    layout = BlockLayout.from_dense(np.ones((1, 16, 32)), block=64)
    figure = plot_layout(layout)
    assert figure.axes[0].get_title() == (
        "1,024 x 2,048 tokens, blocks of 64, density 100%"
    )
    assert figure.axes[0].get_legend() is None


@pytest.mark.parametrize("num_blocks", [513, 1024, 1100])
def test_cells_are_the_darker_the_more_of_them_lives(num_blocks):
    live = np.zeros((num_blocks, num_blocks), bool)
    live[:, 0] = True
    live[4:8, 4:8] = True
    figure = plot_layout(BlockLayout.from_dense(live, block=16, num_heads=1))
    dark = darkness(figure)
    assert max(dark.shape) <= 512
    assert 0 == dark[0, -1] < dark[-1, 0] < dark[2, 2]
    assert (dark[:, 0] > 0).all()


def test_a_short_last_cell_is_full_where_its_blocks_live():
    figure = plot_layout(Dense(1).layout(16 * 513))
    dark = darkness(figure)
    assert dark.shape == (257, 257)
    np.testing.assert_allclose(dark, dark[0, 0])
    assert tuple(figure.axes[0].images[0].get_extent()) == (0, 514, 514, 0)
    assert figure.axes[0].get_xlim() == pytest.approx((-5.14, 518.14))
    assert figure.axes[0].get_ylim() == pytest.approx((518.14, -5.14))


def test_cells_on_the_diagonal_are_cut():
    layout = BSLongformer(1, attention="unidirectional").layout(16 * 1024)
    cells = cells_of(plot_layout(layout))
    diagonal, first = cells[np.arange(512), np.arange(512)], cells[5:, 0]
    assert (diagonal[1:, 0] > diagonal[1:, 2]).all()
    assert (first[:, 0] < first[:, 2]).all()


def test_a_million_tokens_are_drawn_without_a_square_array():
    layout = BSLongformer(1).layout(1_048_576)
    tracemalloc.start()
    try:
        figure = plot_layout(layout)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert cells_of(figure).shape == (512, 512, 3)
    assert peak < layout.num_rows**2 / 50


def test_picture_is_drawn_where_asked_and_saved(tmp_path):
    layout = Dense(1).layout(64)
    own = Figure()
    left, right = own.subplots(1, 2)
    path = tmp_path / "new" / "layout.png"
    assert plot_layout(layout, axes=right, path=path) is own
    assert (len(left.images), len(right.images)) == (0, 1)
    assert image.imread(path).ndim == 3


def test_pyplot_is_not_touched_and_a_missing_matplotlib_is_named(monkeypatch):
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)
    plot_layout(Dense(1).layout(64))
    assert "matplotlib.pyplot" not in sys.modules
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError) as error:
        plot_layout(Dense(1).layout(64))
    assert str(error.value) == (
        "package='matplotlib' is not installed, and plot_layout needs it; "
        "pip install matplotlib"
    )


@pytest.mark.parametrize("draw", [draw_layout, plot_layout])
@pytest.mark.parametrize("head", [-1, 2, 1.5])
def test_other_heads_are_refused(draw, head):
    with value_error(f"head={head} is not one of 2 heads; give 0 to 1"):
        draw(Dense(2).layout(64), head=head)


def test_text_of_many_blocks_is_refused():
    with value_error(
        "layout=(513, 513) is more than 512 blocks a side; use plot_layout, which "
        "merges blocks"
    ):
        draw_layout(Dense(1).layout(16 * 513))
