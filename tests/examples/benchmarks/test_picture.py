"""The picture of a contest holds the bars of its numbers."""

from contests import Contest
from contests.picture import draw_contest
from contests.turns import Record
from matplotlib.figure import Figure

from tests.support.toy_contests import MACHINE, contestant


def record(name, failure="", **result):
    return Record(name, MACHINE, "2026-01-31", result, failure)


def speed(median, least, most):
    spread = {"median": median, "min": least, "max": most, "n": 5}
    return {"tokens_per_second_per_device": spread}


CONTEST = Contest(
    "two programs", (contestant("ours"), contestant("theirs", kind="peer")), ()
)


def test_bars_of_a_contest_are_speed_and_memory(tmp_path, monkeypatch):
    figures = []
    save = Figure.savefig

    def keep(figure, *args, **settings):
        figures.append(figure)
        save(figure, *args, **settings)

    monkeypatch.setattr(Figure, "savefig", keep)
    records = [
        record("ours", **speed(40_000.0, 39_000.0, 42_000.0), peak_bytes=58 * 10**9),
        record("failed", failure="out of memory"),
        record("theirs", **speed(20_000.0, 20_000.0, 20_000.0), peak_bytes=None),
    ]
    assert draw_contest(CONTEST, records, tmp_path / "new" / "contest.png")
    (figure,) = figures
    left, right = figure.axes
    speeds, sizes = (
        next(c for c in axes.containers if hasattr(c, "patches"))
        for axes in figure.axes
    )
    assert figure.get_suptitle() == "two programs, 2 x toy"
    assert [bar.get_width() for bar in speeds] == [40_000, 20_000]
    assert [bar.get_width() for bar in sizes] == [58, 0]
    assert speeds[0].get_facecolor() != speeds[1].get_facecolor()
    assert [text.get_text() for text in left.texts] == [" 40,000", " 20,000"]
    assert [text.get_text() for text in right.texts] == [" 58.00 GB", " not known"]
    assert [label.get_text() for label in left.get_yticklabels()] == ["ours", "theirs"]


def test_a_contest_without_speeds_has_no_picture(tmp_path):
    path = tmp_path / "contest.png"
    assert not draw_contest(CONTEST, [record("ours", loss=2.5)], path)
    assert not path.exists()
