"""The summary shows wins, misses and losses alike, on one screen."""

import itertools
import pathlib

import pytest

from zjax.bench.result import Comparison, Result, Side
from zjax.bench.summary import describe_results
from zjax.bench.table import BEGIN, END
from zjax.bench.themes import THEMES

ROOT = pathlib.Path(__file__).parents[2]
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
    start = next(
        k for k, line in enumerate(lines) if line.startswith("| theme | claim")
    )
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
        "**Missed their bar** (2): `missed`, `half` (1 of 2).",
        "",
        "**Behind the peer, within their bar** (2): `behind`, `less`.",
        "",
        "**From an older revision** (2): `old` (2 of 2).",
    ]


def test_a_headline_shows_the_worst_of_its_comparisons():
    """Fails if the best, the first or the last of several stands for all."""
    (line,) = headlines(result("a", 1.5, 0.5, 2.5, headline="Fast"))
    assert line == (
        "| Speed | Fast (worst of 3: case 1) | 5 tokens/s | 10 tokens/s | **0.50** | "
        "8 x toy | 2026-01-31 | missed by 50 % |"
    )
    cheap = result("b", 0.5, 0.9, higher_is_better=False, headline="Small")
    assert "(worst of 2: case 1)" in headlines(cheap)[0]


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        (({"date": "2026-01-30"}, {"date": "2026-01-31"}), "2026-01-31"),
        (({"date": "2026-01-31"}, {"date": "2026-01-30"}), "2026-01-31"),
        (
            ({"date": "2026-01-31", "outdated": "x"}, {"date": "2026-01-30"}),
            "2026-01-30",
        ),
        (({"outdated": "x"}, {"outdated": "x"}), "2026-01-31, older revision"),
    ],
)
def test_a_headline_shows_the_newest_of_its_results(changes, shown):
    twice = [
        result(f"a_x{n}", 1.5, headline="Fast", **change)
        for n, change in zip((2, 4), changes, strict=True)
    ]
    (line,) = headlines(*twice)
    assert line.split(" | ")[-2] == shown


def test_headlines_stand_by_theme_and_name_it_once():
    given = [
        result("a", 1, headline="One", theme="offload"),
        result("b", 1, headline="Two"),
        result("c", 1, headline="Three"),
        result("d", 1),
    ]
    starts = [line.split(" | ")[:2] for line in headlines(*given)]
    assert starts == [["| Speed", "Two"], ["| ", "Three"], ["| Offload", "One"]]


def test_the_published_summary_is_one_screen():
    text = (ROOT / "BENCHMARKS.md").read_text()
    above, _, rest = text.partition(BEGIN)
    summary = rest.partition(END)[0]
    assert len(above.splitlines()) + len(summary.splitlines()) <= 60
    cells = [cell for line in summary.splitlines() for cell in line.split(" | ")]
    assert max(map(len, (c for c in cells if not c.startswith(("**", "Of"))))) <= 120
