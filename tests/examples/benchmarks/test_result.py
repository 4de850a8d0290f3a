"""Only results that mean something are written, and read."""

import dataclasses
import functools
import json
import re
import shutil

import pytest
from contests.compete import COMMAND
from contests.contest import THEMES, load_contest
from contests.pages import PAGES, describe_details, table_rows, update_pages
from contests.result import Comparison, Result, Side, read_result, verdict, write_result

from tests.support.benchmarks import ROOT
from tests.support.refusals import bench_error
from zjax.errors import BenchError

FOLDER = ROOT / "examples" / "benchmarks" / "results"
PUBLISHED = ["BENCHMARKS.md", *(str(PAGES / f"{theme}.md") for theme in THEMES)]
OURS = Side("ours", 30.0, 29.0, 31.0, 5, "tokens/s")
PEER = Side("peer", 20.0, 19.0, 21.0, 5, "tokens/s")
RESULT = Result(
    id="speed_1p5b",
    claim="It is faster.",
    theme="speed",
    headline="Speed of a toy",
    command="zjax bench",
    date="2026-01-31",
    device="8 x toy",
    versions={"jax": "1"},
    cases=(Comparison("", OURS, PEER),),
    higher_is_better=True,
    notes="",
)
ONE = "", OURS, PEER


def side(base=OURS, **changes):
    return dataclasses.replace(base, **changes)


def result(*cases, **changes):
    made = tuple(Comparison(*case) for case in cases)
    return dataclasses.replace(RESULT, cases=made, **changes)


@pytest.mark.parametrize(
    "cases", [(ONE,), ((*ONE, 1.2, 2),), (("a", OURS, PEER, 1), ("b", PEER, OURS))]
)
def test_what_is_written_is_read(tmp_path, cases):
    written = result(*cases, outdated="before it was faster")
    path = write_result(written, tmp_path / "new")
    assert path.name == "speed_1p5b.json"
    assert read_result(path) == written


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            result(ONE, id="Speed 1", date="today", claim=" ", theme="fast"),
            "id='Speed 1' is not a name for a file; use lower-case letters, digits and "
            "underscores\n"
            "claim='' says nothing; write one line\n"
            "theme='fast' is not a theme; use speed, memory, offload, "
            "sparse_attention, parallelism\n"
            "date='today' is not a date; use YYYY-MM-DD",
        ),
        (result(), "cases=() compares nothing; give a comparison"),
        (
            result(("a", OURS, PEER), ("a", OURS, PEER)),
            "cases=('a', 'a') does not tell the comparisons apart; give each its own "
            "name",
        ),
        (
            result(ONE, ("a", OURS, PEER)),
            "cases=('', 'a') does not tell the comparisons apart; give each its own "
            "name",
        ),
        (
            result(("a", side(median=28.0), side(PEER, n=0, name=""))),
            "a.ours=(29.0, 28.0, 31.0) are not min <= median <= max; sort the "
            "measurements\n"
            "a.peer.n=0 is below 1; measure at least once\n"
            "a.peer.name='' is missing; say what it is",
        ),
        (
            result(("", side(max=float("inf")), side(PEER, min=0.0))),
            "ours=(29.0, 30.0, inf) are not finite numbers above 0; measure again\n"
            "peer=(0.0, 20.0, 21.0) are not finite numbers above 0; measure again",
        ),
        (
            result((*ONE, 0.0, float("nan"))),
            "must=0.0 is not a finite ratio above 0; state one\n"
            "aim=nan is not a finite ratio above 0; state one",
        ),
        (
            result(("", OURS, side(PEER, unit="bytes"))),
            "unit='tokens/s' is not that of the peer, 'bytes'; compare numbers of one "
            "kind",
        ),
    ],
)
def test_what_means_nothing_is_not_written(tmp_path, wrong, message):
    with bench_error(message):
        write_result(wrong, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ratio": 1.6}, "ratio=1.6 is not ours / peer = 1.5; "),
        ({"id": "A"}, "id='A' is not a name for a file; "),
        ({"more": 1}, "result='{path}' is not a result (TypeError: "),
        ({"peer": None}, "result='{path}' is not a result (TypeError: "),
        ({"peer": {}}, "result='{path}' is not a result (TypeError: "),
        ({"must": "1"}, "result='{path}' is not a result (Type"),
    ],
)
def test_what_was_changed_by_hand_is_not_read(tmp_path, change, message):
    path = write_result(RESULT, tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(BenchError) as error:
        read_result(path)
    assert str(error.value).startswith(message.format(path=path))


def test_a_file_that_is_no_json_is_not_read(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("{")
    with pytest.raises(BenchError, match="is not a result \\(JSONDecodeError"):
        read_result(path)


@pytest.mark.parametrize(
    ("must", "aim", "higher_is_better", "meaning"),
    [
        (1.5, 2.0, True, "met"),
        (1.5, 1.5, True, "aim reached"),
        (1.5, None, True, "met"),
        (1.6, 2.0, True, "missed by 6.2 %"),
        (1.5008, None, True, "missed by 0.053 %"),
        (1.5, 1.4, False, "met"),
        (1.2, 1.0, False, "missed by 25 %"),
        (0.001, None, False, "missed by 149,900 %"),
        (None, None, True, "no bar"),
        (None, 1.5, True, "aim reached"),
        (None, 1.6, True, "aim not reached"),
    ],
)
def test_a_ratio_is_judged_by_its_own_bar(must, aim, higher_is_better, meaning):
    case = Comparison("", OURS, PEER, must, aim)  # ours is 1.5 times the peer's
    assert verdict(case, higher_is_better) == meaning


def test_a_result_is_one_line_and_its_details_are_folded():
    """Fails if notes widen the table, or if an older revision is not marked in it."""
    old = dataclasses.replace(
        RESULT, id="a_x8", outdated="before it was faster", notes="as <before>"
    )
    line = "| [It is faster (8 devices)](#a_x8) | 30 tokens/s | 20 tokens/s | **1.5** "
    assert table_rows(old) == [f"{line}| no bar, older |"]
    assert describe_details(old, "r/a.json").splitlines() == [
        "<details markdown>",
        "<summary>It is faster (8 devices)</summary>",
        "",
        '<a id="a_x8"></a>',
        "",
        "- ours: 30 [29 to 31, n=5] tokens/s; peer: 20 [19 to 21, n=5] tokens/s",
        "- Measured on 8 x toy, 2026-01-31.",
        "- **Older revision**: before it was faster.",
        "- Notes: as <before>.",
        "- `zjax bench` ([its file](r/a.json))",
        "",
        "</details>",
    ]


def test_several_comparisons_stand_below_their_claim():
    """Fails if a missed bar is not bold, or a bar is not told."""
    several = result(("first", OURS, PEER, 2.0, 3.0), ("second", OURS, PEER))
    assert table_rows(several) == [
        "| **[It is faster](#speed_1p5b)** |  |  |  |  |",
        "| &emsp;first | 30 tokens/s | 20 tokens/s | **1.5** | **missed by 25 %** |",
        "| &emsp;second | 30 tokens/s | 20 tokens/s | **1.5** | no bar |",
    ]
    details = describe_details(several, "r/a.json")
    assert "- first: ours: 30 [29 to 31, n=5] tokens/s; " in details
    assert "; bar: at least 2, aim 3\n" in details


def test_rows_are_sorted_by_id_and_devices(tmp_path):
    table = tmp_path / "B.md"
    shutil.copy(ROOT / "BENCHMARKS.md", table)
    for devices in (8, 2, 16):
        named = dataclasses.replace(RESULT, id=f"speed_1p5b_x{devices}")
        write_result(named, tmp_path / "r")
    write_result(dataclasses.replace(RESULT, id="a"), tmp_path / "r")
    update_pages(table, tmp_path / "r")
    page = (tmp_path / PAGES / "speed.md").read_text()
    ids = re.findall(r"^\| .*\(#(\w+)\)", page, re.M)
    assert ids == ["a", "speed_1p5b_x2", "speed_1p5b_x8", "speed_1p5b_x16"]
    links = re.findall(r"\(\.\./\.\./r/(\w+)\.json\)", page)
    assert links == ids


def test_the_published_table_is_that_of_the_published_files(tmp_path):
    """Fails if either was edited without the other, or a result is not sound."""
    (tmp_path / "examples" / "benchmarks").mkdir(parents=True)
    results = tmp_path / "examples" / "benchmarks" / "results"
    if FOLDER.exists():
        shutil.copytree(FOLDER, results)
    shutil.copytree(ROOT / PAGES, tmp_path / PAGES)
    shutil.copy(ROOT / "BENCHMARKS.md", tmp_path)
    update_pages(tmp_path / "BENCHMARKS.md", results)
    for path in PUBLISHED:
        assert (tmp_path / path).read_text() == (ROOT / path).read_text()


UNPUBLISHED = {
    "gptq_gap",
    "layer_reduction",
    "moe_layer_vs_sonic",
    "qat_recovery",
    "rl_learns",
    "tensor_6p7b",
    "three_d",
    "ulysses_ring",
}
"""Claims without a measurement; the page of the benchmarks names them, too."""


@functools.cache
def contest_rows():
    """Every row with the file of its contest."""
    paths = sorted(FOLDER.parent.glob("*.py"))
    contests = [path for path in paths if "def get_contest(" in path.read_text()]
    return [(path.name, row) for path in contests for row in load_contest(path).rows]


def test_every_contest_has_its_rows():
    """Fails if a claim is measured and never published, or published no longer
    measured."""
    published = {path.stem for path in FOLDER.glob("*.json")}
    found = {
        row.id: {x for x in published if x == row.id or x.startswith(f"{row.id}_x")}
        for _, row in contest_rows()
    }
    assert {id for id, files in found.items() if not files} == UNPUBLISHED
    assert set().union(*found.values()) == published


def test_no_program_prints_what_it_is_held_against():
    """Fails if a fault of ours could move both sides of a comparison."""
    same = [
        row.id
        for _, row in contest_rows()
        for case, ours, peers in sides_of(row)
        if ours & (set(case.peer) if isinstance(case.peer, tuple) else peers)
    ]
    assert same == []


def sides_of(row):
    """What a contest asks of each case, and who may be its peer."""
    for case in row.cases:
        ours = set(case.ours)
        peers = set(case.peer) if isinstance(case.peer, tuple) else set()
        peers = {case.peer_name} if case.peer_name else peers
        yield case, ours, peers


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda x: x.stem)
def test_a_row_quotes_the_contest_that_makes_it(path):
    """Fails if a contest changed what it compares or asks, or a bar was moved in a
    file, and the row does not say that it is of an older revision."""
    result = read_result(path)
    contest, id = result.command.removeprefix(f"{COMMAND} ").split(" --rows=")
    rows = {row.id: row for name, row in contest_rows() if contest.endswith(name)}
    row = rows[id]
    assert result.id in (row.id, f"{row.id}_x{result.device.split()[0]}")
    assert result.higher_is_better == row.higher_is_better
    assert (result.theme, result.headline) == (row.theme, row.headline)
    if result.outdated:
        return
    assert result.claim == row.claim
    assert result.notes.startswith(row.notes)
    for found, (case, ours, peers) in zip(result.cases, sides_of(row), strict=True):
        assert (found.must, found.aim) == (case.must, case.aim)
        assert found.name == (case.name if len(row.cases) > 1 else "")
        assert found.ours.name in ours
        assert found.peer.name in peers
        if not isinstance(case.peer, tuple):
            devices = int(result.device.split()[0])
            stated = case.peer(devices) if callable(case.peer) else case.peer
            assert found.peer.median == stated


NUMBER = re.compile(r"\d{1,3}(?:,\d{3})+|\d+\.\d+")
OTHER_NUMBERS = {"8.9", "1.5"}
"""A compute capability, and the name of a model."""


def numbers_of(text):
    return {x: float(x.replace(",", "")) for x in NUMBER.findall(text)}


QUOTES = {"README.md": "## What works today"} | {
    f"docs/{page.name}": "## Tested and measured"
    for page in (ROOT / "docs").glob("*.md")
}
"""Documents that quote results, and the heading below which they do."""


@pytest.mark.parametrize("path", QUOTES)
def test_documents_quote_what_was_measured(path):
    """Fails if a figure of a document is in no row, and beside none."""
    today = (ROOT / path).read_text().partition(QUOTES[path])[2]
    published = numbers_of("".join((ROOT / x).read_text() for x in PUBLISHED)).values()
    for text, value in numbers_of(today).items():
        digits = len(text.partition(".")[2])
        found = any(round(other, digits) == value for other in published)
        assert found or text in OTHER_NUMBERS, text
