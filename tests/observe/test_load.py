"""The picture of a run shows the load of its experts, as its history holds it."""

import json

import numpy as np
from matplotlib import image

from tests.support import small_run
from zjax.observe import plot_load, read_history
from zjax.observe.plot import describe_load, has_load, relative_load
from zjax.observe.sinks import HISTORY

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
    plot_load(history, tmp_path / "load.png", title="a run")
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
    assert read_history(tmp_path / HISTORY) == []


def test_many_layers_take_several_lines():
    text = describe_load({"load": [[3, 1]] * 30})
    first, second = text.splitlines()
    assert max(len(first), len(second)) <= 100
    assert second.startswith("  1.50 ")
