"""The summary and the picture of a contest show wins, misses and losses alike."""

import itertools
import re

import pytest
from contests import Contest
from contests.contest import THEMES
from contests.pages import BEGIN, END, describe_results
from contests.picture import draw_contest
from contests.result import Comparison, Result, Side
from contests.turns import Record

from tests.support.benchmarks import ROOT
from tests.support.toy_contests import MACHINE, contestant

LINKS = {theme: f"pages/{theme}.md" for theme in THEMES}


def result(id, *ratios, must=1.0, aim=2.0, **changes):
    """A result with one comparison per ratio, of ours over a peer of 10."""
    cases = tuple(
        Comparison(
            f"case {k}" if len(ratios) > 1 else "",
            Side("ours", 10 * x, 10 * x, 10 * x, 1, "tokens/s"),
            Side("peer", 10, 10, 10, 1, "tokens/s"),
            must,
            aim,
        )
        for k, x in enumerate(ratios)
    )
    given = dict(
        id=id,
        claim="It is faster.",
        theme="speed",
        headline="",
        command="zjax bench",
        date="2026-01-31",
        device="8 x NVIDIA toy",
        versions={},
        cases=cases,
        higher_is_better=True,
        notes="",
    )
    return Result(**given | changes)


def lines_of(*results):
    return describe_results(results, LINKS).splitlines()


def headlines(*results):
    lines = lines_of(*results)
    start = next(k for k, line in enumerate(lines) if line.startswith("| claim"))
    return list(itertools.takewhile(bool, lines[start + 2 :]))


def test_each_theme_is_counted():
    found = lines_of(
        result("a", 2.5, 1.5, 0.5),
        result("b", 0.5, must=None, theme="memory", outdated="before"),
    )
    assert "| [Speed](pages/speed.md) | 3 | 1 | 1 | 1 | 0 | 0 |" in found
    assert "| [Memory](pages/memory.md) | 1 | 0 | 0 | 0 | 1 | 1 |" in found
    assert not any("[Offload]" in line for line in found)


def test_misses_losses_and_old_results_are_named():
    """Fails if what speaks against zjax is seen only by who opens a theme."""
    found = lines_of(
        result("missed", 0.9),
        result("half", 0.9, 1.1),
        result("behind", 0.95, must=0.9),
        result("ahead", 1.2),
        result("old", 1.2, 1.3, outdated="before"),
        result("less", 1.1, must=1.2, aim=None, higher_is_better=False),
    )
    assert found[-5:] == [
        "**Missed their bar** (2): [missed](pages/speed.md#missed), "
        "[half](pages/speed.md#half) (1 of 2).",
        "",
        "**Behind the peer, within their bar** (2): [behind](pages/speed.md#behind), "
        "[less](pages/speed.md#less).",
        "",
        "**From an older revision** (2): [old](pages/speed.md#old) (2 of 2).",
    ]


def test_a_headline_shows_the_worst_of_its_comparisons():
    """Fails if the best, the first or the last of several stands for all."""
    theme, line = headlines(result("a", 1.5, 0.5, 2.5, headline="Fast"))
    assert theme == "| **[Speed](pages/speed.md)** |  |  |  |  |"
    assert line == (
        "| [Fast (worst of 3)](pages/speed.md#a) | 5 tokens/s | 10 tokens/s | **0.5** "
        "| **missed by 50 %** |"
    )
    cheap = result("b", 0.5, 0.9, higher_is_better=False, headline="Small")
    assert "| 9 tokens/s |" in headlines(cheap)[1]


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        (({"date": "2026-01-30"}, {"date": "2026-01-31"}), "#a_x4"),
        (({"date": "2026-01-31"}, {"date": "2026-01-30"}), "#a_x2"),
        (({"date": "2026-01-31", "outdated": "x"}, {"date": "2026-01-30"}), "#a_x4"),
        (({"outdated": "x"}, {"outdated": "x"}), "| met, older |"),
    ],
)
def test_a_headline_shows_the_newest_of_its_results(changes, shown):
    twice = [
        result(f"a_x{n}", 1.5, headline="Fast", **change)
        for n, change in zip((2, 4), changes, strict=True)
    ]
    (line,) = headlines(*twice)[1:]
    assert shown in line


def test_headlines_stand_by_theme():
    given = [
        result("a", 1, headline="One", theme="offload"),
        result("b", 1, headline="Two"),
        result("c", 1, headline="Three"),
        result("d", 1),
    ]
    names = [line.partition("[")[2].partition("]")[0] for line in headlines(*given)]
    assert names == ["Speed", "Two", "Three", "Offload", "One"]


def test_the_published_summary_is_one_screen():
    text = (ROOT / "BENCHMARKS.md").read_text()
    above, _, rest = text.partition(BEGIN)
    summary = rest.partition(END)[0]
    assert len(above.splitlines()) + len(summary.splitlines()) <= 88
    shown = re.sub(r"\]\([^)]*\)", "]", summary)  # without addresses of links
    lines = [line for line in shown.splitlines() if line.startswith("| ")]
    assert max(map(len, lines)) <= 150


def record(name, failure="", **result):
    return Record(name, MACHINE, "2026-01-31", result, failure)


def speed(median, least, most):
    spread = {"median": median, "min": least, "max": most, "n": 5}
    return {"tokens_per_second_per_device": spread}


CONTEST = Contest(
    "two programs", (contestant("ours"), contestant("theirs", kind="peer")), ()
)


def test_bars_of_a_contest_are_speed_and_memory(tmp_path, drawn):
    records = [
        record("ours", **speed(40_000.0, 39_000.0, 42_000.0), peak_bytes=58 * 10**9),
        record("failed", failure="out of memory"),
        record("theirs", **speed(20_000.0, 20_000.0, 20_000.0), peak_bytes=None),
    ]
    assert draw_contest(CONTEST, records, tmp_path / "new" / "contest.png")
    (figure,) = drawn
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
