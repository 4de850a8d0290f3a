"""`zjax bench` as it is typed."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests.support import small_run
from zjax.bench.contest import Contest, Contestant, contest_problems
from zjax.bench.table import BEGIN, END
from zjax.config import describe_config

ROOT = pathlib.Path(__file__).parents[2]
CONTEST = """
from zjax.bench import Case, Contest, Contestant, Row

COMMAND = ("{python}", "-m", "zjax.main", "bench", "--gin_file=small.gin")
NUM_BYTES = 12 * 3_488  # by hand: test_work_is_counted_by_both_conventions


def get_contest():
    case = Case(("small",), lambda n: NUM_BYTES / n, "state_bytes", "bytes",
                peer_name="closed form")
    row = Row("close", "As predicted.", (case,), higher_is_better=False)
    return Contest("small", (Contestant("small", COMMAND, "zjax"),), (row,))
"""


@pytest.fixture
def folder(tmp_path):
    config = small_run.make_config("run", "zero.min_shard_elements=0")
    (tmp_path / "small.gin").write_text(describe_config(config))
    (tmp_path / "contest.py").write_text(CONTEST)
    (tmp_path / "BENCHMARKS.md").write_text(f"{BEGIN}\n{END}\n")
    return tmp_path


def run(folder, *words, code=0):
    result = subprocess.run(
        [sys.executable, "-m", "zjax.main", "bench", *words, "--simulated_devices=8"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert result.returncode == code, result.stdout + result.stderr
    return result.stderr if code else result.stdout


def table_of(folder, name):
    return (folder / name).read_text()


def test_a_contest_reads_what_a_measurement_prints(folder):
    out = run(folder, "--contest=contest.py", "--output=out")
    assert "no bar" in out
    found = json.loads((folder / "results" / "close_x8.json").read_text())
    assert found["device"] == "8 x cpu"
    assert found["ratio"] == found["ours"]["median"] / found["peer"]["median"]
    assert found["ratio"] == pytest.approx(1, rel=0.05)
    assert "[Speed](docs/benchmarks/speed.md) | 1 " in table_of(folder, "BENCHMARKS.md")
    link = "(../../results/close_x8.json)"
    assert link in table_of(folder, "docs/benchmarks/speed.md")
    assert (folder / "results" / "contest_x8.png").stat().st_size > 5_000
    log = (folder / "out" / "contest_x8.log").read_text()
    assert log.count("tokens/s per device") == 1
    assert not (folder / "run").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--gin_file=small.gin", "--only=a,b", "--output=x"),
            "zjax: --only=['a', 'b'] has no effect without --contest; leave it out\n"
            "--output='x' has no effect without --contest; leave it out\n",
        ),
        (
            (
                "--contest=contest.py",
                "--config.zero.stage=2",
                "--gin_file=small.gin",
            ),
            "zjax: --gin_file=['small.gin'] has no effect on a contest; write it in "
            "the contest's file\n--config.zero.stage='2' has no effect on a contest; "
            "write it in the contest's file\n",
        ),
        (
            ("--contest=contest.py", "--num_devices=2"),
            "zjax: --num_devices=2 has no effect on zjax bench; leave it out; plan "
            "read it\n",
        ),
    ],
)
def test_what_has_no_effect_is_refused(folder, words, message):
    assert run(folder, *words, code=2) == message


def test_names_that_the_command_line_would_split_are_refused():
    contest = Contest("x", (Contestant("ours, faster", ("true",), "zjax"),), ())
    (problem,) = contest_problems(contest)
    assert str(problem) == (
        "contestant='ours, faster' cannot be given to --only; name it without a comma"
    )
