"""Only results that mean something are written, and read."""

import dataclasses
import json
import pathlib
import shutil

import pytest

from zjax.bench.result import Comparison, Result, Side, read_result, write_result
from zjax.bench.table import update_table
from zjax.errors import BenchError

ROOT = pathlib.Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "benchmarks" / "results"
OURS = Side("ours", 30.0, 29.0, 31.0, 5, "tokens/s")
PEER = Side("peer", 20.0, 19.0, 21.0, 5, "tokens/s")
RESULT = Result(
    id="speed_1p5b",
    claim="It is faster.",
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


@pytest.mark.parametrize("cases", [(ONE,), (("a", OURS, PEER), ("b", PEER, OURS))])
def test_what_is_written_is_read(tmp_path, cases):
    written = result(*cases)
    path = write_result(written, tmp_path / "new")
    assert path.name == "speed_1p5b.json"
    assert read_result(path) == written


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            result(ONE, id="Speed 1", date="today", claim=" "),
            "id='Speed 1' is not a name for a file; use lower-case letters, digits and "
            "underscores\n"
            "claim='' says nothing; write one line\n"
            "date='today' is not a date; use YYYY-MM-DD",
        ),
        (result(), "cases=() compares nothing; give a comparison"),
        (
            result(("a", OURS, PEER), ("a", OURS, PEER)),
            "cases=('a', 'a') does not tell the comparisons apart; give each a name of "
            "its own",
        ),
        (
            result(ONE, ("a", OURS, PEER)),
            "cases=('', 'a') does not tell the comparisons apart; give each a name of "
            "its own",
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
            result(("", OURS, side(PEER, unit="bytes"))),
            "unit='tokens/s' is not that of the peer, 'bytes'; compare numbers of one "
            "kind",
        ),
    ],
)
def test_what_means_nothing_is_not_written(tmp_path, wrong, message):
    with pytest.raises(BenchError) as error:
        write_result(wrong, tmp_path)
    assert str(error.value) == message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ratio": 1.6}, "ratio=1.6 is not ours / peer = 1.5; "),
        ({"id": "A"}, "id='A' is not a name for a file; "),
        ({"more": 1}, "result='{path}' is not a result (TypeError: "),
        ({"peer": None}, "result='{path}' is not a result (TypeError: "),
        ({"peer": {}}, "result='{path}' is not a result (TypeError: "),
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


def test_rows_are_sorted_by_id_and_devices(tmp_path):
    table = tmp_path / "B.md"
    shutil.copy(ROOT / "BENCHMARKS.md", table)
    for devices in (8, 2, 16):
        named = dataclasses.replace(RESULT, id=f"speed_1p5b_x{devices}")
        write_result(named, tmp_path / "r")
    write_result(dataclasses.replace(RESULT, id="a"), tmp_path / "r")
    update_table(table, tmp_path / "r")
    lines = [line for line in table.read_text().splitlines() if line.startswith("| [")]
    files = [line.partition("](r/")[2].partition(".json)")[0] for line in lines]
    ids = ["a", "speed_1p5b_x2", "speed_1p5b_x8", "speed_1p5b_x16"]
    assert files == ids


def test_the_published_table_is_that_of_the_published_files(tmp_path):
    """Fails if either was edited without the other, or a result is not sound."""
    (tmp_path / "examples" / "benchmarks").mkdir(parents=True)
    results = tmp_path / "examples" / "benchmarks" / "results"
    if FOLDER.exists():
        shutil.copytree(FOLDER, results)
    table = tmp_path / "BENCHMARKS.md"
    shutil.copy(ROOT / "BENCHMARKS.md", table)
    update_table(table, results)
    assert table.read_text() == (ROOT / "BENCHMARKS.md").read_text()
