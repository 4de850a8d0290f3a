"""A contest of programs that print their numbers: files, table, picture, failures."""

import dataclasses
import datetime
import json
import os
import pathlib

import pytest
from contests import Case, Contestant, Row
from contests import compete as competing
from contests.compete import Selection, compete
from contests.pages import BEGIN, END
from matplotlib import image

from tests.support.refusals import bench_error
from tests.support.toy_contests import (
    MACHINE,
    contestant,
    runner,
    speed,
    speed_row,
    write_contest,
)
from zjax.errors import BenchError

EMPTY = f"above\n{BEGIN}\nold\n{END}\nbelow\n"
TODAY = datetime.date.today().isoformat()


class Ground:
    """A folder with a contest and a table, on a machine of two toys."""

    def __init__(self, folder, patch):
        self.folder = folder
        self.results = folder / "bench" / "results"
        self.table = folder / "BENCHMARKS.md"
        self.table.write_text(EMPTY)
        self.pages = folder / "docs" / "benchmarks"
        patch.chdir(folder)
        patch.setattr(competing, "find_machine", lambda _: MACHINE)

    def hold(self, contestants, claims, **selection):
        write_contest(self.folder / "bench" / "toy.py", contestants, claims)
        return compete("bench/toy.py", Selection(**selection), output="out")

    def read(self, name):
        return json.loads((self.results / name).read_text())


@pytest.fixture
def ground(tmp_path, monkeypatch):
    return Ground(tmp_path, monkeypatch)


def test_a_result_is_exact(ground):
    ours, peer = runner("ours", 30.0), runner("theirs", 20.0, kind="peer")
    row = speed_row("speed", ("ours",), ("theirs",), must=1.0, aim=2.0)
    ground.hold([ours, peer], [row])
    unit = "tokens/s/device"
    assert ground.read("speed_x2.json") == {
        "id": "speed_x2",
        "claim": "claim speed",
        "theme": "speed",
        "headline": "",
        "command": f"{competing.COMMAND} bench/toy.py --rows=speed",
        "date": TODAY,
        "device": "2 x toy",
        "versions": {"o": "1", "t": "1"},
        "ours": {"name": "ours", "unit": unit, **speed(30.0)},
        "peer": {"name": "theirs", "unit": unit, **speed(20.0)},
        "must": 1.0,
        "aim": 2.0,
        "ratio": 1.5,
        "higher_is_better": True,
        "notes": "",
        "outdated": "",
    }


def test_the_table_shows_each_row_against_its_own_bar(ground, capsys):
    """Fails if what is ahead of its peer and misses its bar looks like a win."""
    pair = [runner("ours", 30.0), runner("theirs", 20.0, kind="peer")]
    rows = [
        speed_row("b_win", ("ours",), ("theirs",), must=2.0, aim=3.0),
        speed_row("a_loss", ("theirs",), ("ours",), must=0.5, aim=0.6),
        Row(
            "c_memory",
            "two | cases",
            (
                Case(("ours",), ("theirs",), "peak_bytes", "bytes", name="same"),
                Case(
                    ("ours",),
                    16,
                    "peak_bytes",
                    "bytes",
                    name="bar",
                    peer_name="x",
                    must=0.75,
                    aim=0.25,
                ),
            ),
            theme="memory",
            higher_is_better=False,
            notes="a note",
        ),
    ]
    ground.hold(pair, rows)
    text = ground.table.read_text()
    assert text.startswith(
        f'above\n{BEGIN}\n\n<div class="results" markdown>\n\n'
        "Of 4 comparisons, 1 reach their aim, 1 meet their bar, "
        "1 miss it and 1 have no bar; 0 are from an older revision.\n\n| theme |"
    )
    assert text.endswith(f".\n\n</div>\n\n{END}\nbelow\n")
    assert "\nold\n" not in text
    speed, memory = (ground.pages / f"{x}.md" for x in ("speed", "memory"))
    fast, slow = "30 tokens/s/device", "20 tokens/s/device"
    lines = [line for line in speed.read_text().splitlines() if line.startswith("| ")]
    assert lines[1:] == [
        f"| [claim a_loss (2 devices)](#a_loss_x2) | {slow} | {fast} | **0.6667** | "
        "aim reached |",
        f"| [claim b_win (2 devices)](#b_win_x2) | {fast} | {slow} | **1.5** | "
        "**missed by 25 %** |",
    ]
    lines = [line for line in memory.read_text().splitlines() if line.startswith("| ")]
    assert lines[1:] == [
        "| **[two \\| cases (2 devices)](#c_memory_x2)** |  |  |  |  |",
        "| &emsp;same | 8 B | 8 B | **1** | no bar |",
        "| &emsp;bar | 8 B | 16 B | **0.5** | met |",
    ]
    link = "[its file](../../bench/results/c_memory_x2.json)"
    assert memory.read_text().splitlines()[-15:-3] == [
        "<summary>two | cases (2 devices)</summary>",
        "",
        '<a id="c_memory_x2"></a>',
        "",
        "- same: ours: 8 B; theirs: 8 B",
        "- bar: ours: 8 B; x: 16 B; bar: at most 0.75, aim 0.25",
        f"- Measured on 2 x toy, {TODAY}.",
        "- Notes: a note.",
        f"- `{competing.COMMAND} bench/toy.py --rows=c_memory` ({link})",
        "",
        "</details>",
        "",
    ]
    cases = ground.read("c_memory_x2.json")["cases"]
    assert [(case["name"], case["ratio"]) for case in cases] == [
        ("same", 1.0),
        ("bar", 0.5),
    ]
    printed = capsys.readouterr().out.splitlines()
    shown = [line.split("1.500")[-1].split("0.667")[-1].strip() for line in printed]
    assert [x for x in shown if x in ("missed by 25 %", "aim reached")] == [
        "missed by 25 %",
        "aim reached",
    ]


def test_the_best_of_each_side_counts(ground):
    """Fails if the first or the worst is taken, or memory is taken for speed."""
    many = [runner("a", 30.0, 5), runner("b", 40.0, 9), runner("c", 50.0, 4)]
    many += [runner("d", 20.0, 3)]
    memory = Case(("a", "b"), ("c", "d"), "peak_bytes", "bytes")
    rows = [
        speed_row("speed", ("a", "b"), ("d", "c")),
        Row("memory", "less", (memory,), higher_is_better=False),
    ]
    fast, small = ground.hold(many, rows)
    assert (fast.cases[0].ours.name, fast.cases[0].peer.name) == ("b", "c")
    assert fast.cases[0].ratio == 40 / 50
    assert (small.cases[0].ours.name, small.cases[0].peer.name) == ("a", "d")
    assert small.cases[0].ratio == 5 / 3


def test_another_metric_or_a_number_by_devices_can_be_the_peer(ground):
    program = contestant("a", held=11, formula=10)
    case = Case(
        ("a",), ("a",), "held", "bytes", peer_metric="formula", peer_name="form"
    )
    (found,) = ground.hold([program], [Row("state", "close", (case,))])
    assert (found.cases[0].peer.name, found.cases[0].ratio) == ("form", 1.1)
    assert not list(ground.results.glob("*.png"))  # no speed to draw
    case = Case(("a",), _share_of_24, "held", "bytes", peer_name="form")
    (found,) = ground.hold([contestant("a", held=15)], [Row("state", "close", (case,))])
    assert (found.cases[0].peer.median, found.cases[0].ratio) == (12, 1.25)


def _share_of_24(num_devices):
    return 24 / num_devices


@pytest.mark.parametrize(
    ("code", "settings", "failure"),
    [
        ("print('so far'); raise SystemExit(3)", {}, "exit code 3"),
        ("print('so far'); exit('CUDA out of memory.')", {}, "out of memory"),
        ("print('so far')", {}, "printed 0 RESULT lines"),
        (
            "import time; print('so far', flush=True); time.sleep(60)",
            {"timeout": 1},
            "ran past 1 s",
        ),
    ],
)
def test_one_that_fails_is_told_and_ends_no_other(
    ground, capsys, code, settings, failure
):
    broken = contestant("broken", kind="peer", code=code, **settings)
    everyone = [runner("ours", 30.0), broken, runner("theirs", 20.0, kind="peer")]
    rows = [
        speed_row("alone", ("ours",), ("broken",)),
        speed_row("both", ("ours",), ("broken", "theirs"), must=1.0),
    ]
    (found,) = ground.hold(everyone, rows)
    assert found.id == "both_x2"
    assert found.cases[0].peer.name == "theirs"
    assert found.notes == f"broken: {failure}"
    assert found.cases[0].must == 1.0
    out = capsys.readouterr().out
    # a busy machine may end one that ran past its time before it prints
    assert "  | so far\n" in out or settings
    assert f"alone is not judged: broken: {failure}\n" in out
    assert [path.name for path in ground.results.glob("*.json")] == ["both_x2.json"]


def test_a_program_that_does_not_exist_is_told(ground):
    missing = Contestant("broken", ("/does/not/exist",), "peer")
    rows = [speed_row("both", ("ours",), ("ours", "broken"))]
    (found,) = ground.hold([runner("ours", 30.0), missing], rows)
    assert found.notes == "broken: could not start: No such file or directory"


def test_programs_get_the_number_of_devices_and_their_own_variables(ground):
    code = (
        "import os, json, sys; print('RESULT', json.dumps("
        "{'devices': int(sys.argv[1]), 'variable': int(os.environ['ZJAX_A'])}))"
    )
    command = ("{python}", "-c", code, "{devices}")
    program = Contestant("a", command, "zjax", {"ZJAX_A": "7"})
    case = Case(("a",), ("a",), "devices", "1", peer_metric="variable")
    (found,) = ground.hold([program], [Row("given", "both", (case,))])
    assert found.cases[0].ratio == 2 / 7


def test_numbers_are_on_disk_before_the_next_program_starts(ground):
    """A killed contest keeps what it has; a later part is judged together with it."""
    code = (
        "import json, pathlib; held = pathlib.Path('out/toy_x2.jsonl').read_text();"
        "first = json.loads(held.splitlines()[0]);"
        "print('RESULT', json.dumps({'peak_bytes': first['result']['peak_bytes'] * 2}))"
    )
    second = contestant("second", kind="peer", code=code)
    case = Case(("first",), ("second",), "peak_bytes", "bytes")
    row = Row("order", "first, then second", (case,))
    (found,) = ground.hold([runner("first", 30.0, peak=8), second], [row])
    assert found.cases[0].peer.median == 16
    log = (ground.folder / "out" / "toy_x2.log").read_text()
    assert log.index("=== first: ") < log.index("noise") < log.index("=== second: ")


def test_parts_are_judged_from_their_records(ground, capsys):
    pair = [runner("ours", 30.0), runner("theirs", 20.0, kind="peer")]
    rows = [
        speed_row("speed", ("ours",), ("theirs",)),
        speed_row("own", ("ours",), ("ours",)),
    ]
    assert [r.id for r in ground.hold(pair, rows, only=("ours",))] == ["own_x2"]
    assert "speed is not judged: not measured: theirs\n" in capsys.readouterr().out
    os.rename("out/toy_x2.jsonl", "first.jsonl")
    ground.hold(pair, rows, only=("theirs",))
    parts = ("first.jsonl", "out/toy_x2.jsonl")
    never = [runner("ours", 1.0), runner("theirs", 1.0, kind="peer")]
    (found,) = ground.hold(never, rows, records=parts, rows=("speed",))
    assert found.cases[0].ratio == 1.5
    assert image.imread(ground.results / "toy_x2.png").shape[2] == 4


def test_the_last_record_of_a_program_counts(ground):
    """One result is of a row of any number of devices."""
    row = speed_row("speed", ("ours",), ("ours",))
    rows = [dataclasses.replace(row, by_devices=False)]
    (found,) = ground.hold([runner("ours", 30.0)], rows)
    assert found.id == "speed"
    assert ground.read("speed.json")["device"] == "2 x toy"
    ground.hold([runner("ours", 40.0)], rows)
    (found,) = ground.hold([runner("ours", 1.0)], rows, records=("out/toy_x2.jsonl",))
    assert found.cases[0].ours.median == 40


def test_only_what_the_rows_need_is_run(ground):
    everyone = [runner(name, 10.0) for name in "abc"]
    rows = [speed_row("left", ("a",), ("b",)), speed_row("right", ("b",), ("c",))]
    ground.hold(everyone, rows, rows=("left",))
    lines = (ground.folder / "out" / "toy_x2.jsonl").read_text().splitlines()
    assert [json.loads(line)["name"] for line in lines] == ["a", "b"]


def test_records_of_two_machines_are_refused(ground):
    pair = [runner("ours", 30.0), runner("theirs", 20.0)]
    rows = [speed_row("speed", ("ours",), ("theirs",))]
    ground.hold(pair, rows)
    first, second = pathlib.Path("out/toy_x2.jsonl").read_text().splitlines()
    pathlib.Path("mixed.jsonl").write_text(
        f"{first}\n{second.replace('toy', 'other')}\n"
    )
    with bench_error(
        "records=['mixed.jsonl'] come from 2 machines; give records of one machine; "
        "others cannot be compared"
    ):
        ground.hold(pair, rows, records=("mixed.jsonl",))


def test_a_file_that_holds_no_records_is_refused(ground):
    rows = [speed_row("speed", ("ours",), ("ours",))]
    with bench_error(
        "records='BENCHMARKS.md' is not a list of records (JSONDecodeError: Expecting "
        "value: line 1 column 1 (char 0)); give a .jsonl file that a contest wrote"
    ):
        ground.hold([runner("ours", 30.0)], rows, records=("BENCHMARKS.md",))


def test_a_metric_that_is_not_printed_is_refused(ground):
    case = Case(("a",), ("a",), "speed", "1")
    with bench_error(
        "metric='speed' is not in the result of 'a'; name one of loss, peak"
    ):
        ground.hold([contestant("a", loss=1, peak=2)], [Row("x", "y", (case,))])


def test_names_that_mean_nothing_are_refused_together(ground):
    rows = [speed_row("speed", ("ours",), ("ours",))]
    with bench_error(
        "--only='us' names no contestant; use ours\n"
        "--rows='sped' names no row; use speed"
    ):
        ground.hold([runner("ours", 1.0)], rows, only=("us",), rows=("sped",))


def test_a_contest_that_contradicts_itself_is_refused(ground):
    twice = [runner("ours", 1.0), runner("ours", 2.0)]
    bar = Case(("ours",), 3.0, "peak_bytes", "bytes")
    rows = [speed_row("speed", ("ours",), ("them",)), Row("speed", "again", (bar,))]
    with bench_error(
        "contestants='ours' appears 2 times; give each its own name\n"
        "rows='speed' appears 2 times; give each its own name\n"
        "rows.speed='them' names no contestant; use ours\n"
        "rows.speed.peer=3.0 has no source; say in peer_name where it comes from"
    ):
        ground.hold(twice, rows)


@pytest.mark.parametrize(
    ("text", "problem"), [(None, "does not exist"), ("x = 1", "gives no contest")]
)
def test_a_file_without_a_contest_is_refused(tmp_path, text, problem):
    path = tmp_path / "toy.py"
    if text:
        path.write_text(text)
    with bench_error(
        f"contest='{path}' {problem}; give a Python file whose get_contest() returns a "
        "contests.Contest"
    ):
        compete(str(path), Selection(), output="out")


def test_a_table_without_a_place_is_refused(ground):
    ground.table.write_text("nothing\n")
    rows = [speed_row("speed", ("ours",), ("ours",))]
    with pytest.raises(BenchError, match="has no place for the results; write a file"):
        ground.hold([runner("ours", 9.0)], rows)


def test_a_result_says_how_many_devices_were_used(ground):
    ours, peer = (
        contestant(
            name, kind=kind, num_devices=1, tokens_per_second_per_device=speed(20.0)
        )
        for name, kind in (("ours", "zjax"), ("theirs", "peer"))
    )
    ground.hold([ours, peer], [speed_row("speed", ("ours",), ("theirs",))])
    assert ground.read("speed_x2.json")["device"] == "1 x toy"
