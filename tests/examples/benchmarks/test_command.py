"""A contest as it is typed, and programs of a contest, one after another."""

import json
import os
import signal
import subprocess
import sys

import pytest
from contests.contest import Contest, Contestant, contest_problems
from contests.pages import BEGIN, END
from contests.turns import find_machine

from tests.support import programs, small_run
from tests.support.benchmarks import FOLDER, ROOT, load
from tests.support.toy_contests import contestant, speed_row, write_contest
from zjax.config import describe_config
from zjax.errors import BenchError
from zjax.run import compiler

CONTEST = """
from contests import Case, Contest, Contestant, Row

COMMAND = ("{python}", "-m", "zjax.cli.main", "bench", "--gin_file=small.gin")
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
    (tmp_path / "small.py").write_text(CONTEST)
    (tmp_path / "BENCHMARKS.md").write_text(f"{BEGIN}\n{END}\n")
    return tmp_path


def run(folder, *words, code=0):
    result = subprocess.run(
        [sys.executable, str(FOLDER / "contest.py"), *words, "--simulated_devices=8"],
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
    out = run(folder, "small.py", "--output=out")
    assert "no bar" in out
    found = json.loads((folder / "results" / "close_x8.json").read_text())
    assert found["device"] == "8 x cpu"
    assert found["ratio"] == found["ours"]["median"] / found["peer"]["median"]
    assert found["ratio"] == pytest.approx(1, rel=0.05)
    assert "[Speed](docs/benchmarks/speed.md) | 1 " in table_of(folder, "BENCHMARKS.md")
    link = "(../../results/close_x8.json)"
    assert link in table_of(folder, "docs/benchmarks/speed.md")
    assert (folder / "results" / "small_x8.png").stat().st_size > 5_000
    log = (folder / "out" / "small_x8.log").read_text()
    assert log.count("tokens/s per device") == 1
    assert not (folder / "run").exists()


def test_mistakes_end_with_their_remedies_and_without_a_traceback(folder):
    assert run(folder, "small.py", "--only=tiny,small", "--rows=far", code=2) == (
        "contest: --only='tiny' names no contestant; use small\n"
        "--rows='far' names no row; use close\n"
    )


@pytest.fixture
def asked(monkeypatch):
    """Runs the program, and returns what it asks of a contest."""
    program = load("contest")
    found = {}

    def compete(path, selection, **options):
        found.update(path=path, **vars(selection), **options)

    def ask(*words):
        monkeypatch.setattr(sys, "argv", ["contest.py", "toy.py", *words])
        program.main()
        return found

    monkeypatch.setattr(program, "compete", compete)
    monkeypatch.setattr(program, "exit_on_signals", lambda: None)
    return ask


def test_names_and_files_are_read_as_typed(asked, monkeypatch):
    monkeypatch.setenv("ZJAX_A", "parts")
    words = ("--only=zjax ZeRO-2, FSDP2", "--rows=speed", "--output=$ZJAX_A/out")
    found = asked(*words, "--records=a.jsonl", "--records=b.jsonl")
    assert found["path"] == "toy.py"
    assert found["only"] == ["zjax ZeRO-2", "FSDP2"]
    assert found["rows"] == ["speed"]
    assert found["records"] == ["a.jsonl", "b.jsonl"]
    assert found["output"] == "parts/out"
    assert found["environment"] == os.environ


def test_programs_of_a_contest_keep_what_their_command_may(asked, monkeypatch):
    """Fails if only the command itself is told, which runs nothing on the devices."""
    monkeypatch.setattr(compiler, "LOADS_SIMULATED", False)
    environment = asked("--simulated_devices=2")["environment"]
    assert environment["JAX_NUM_CPU_DEVICES"] == "2"
    assert environment["JAX_ENABLE_COMPILATION_CACHE"] == "False"


def test_names_that_the_command_line_would_split_are_refused():
    contest = Contest("x", (Contestant("ours, faster", ("true",), "zjax"),), ())
    (problem,) = contest_problems(contest)
    assert str(problem) == (
        "contestant='ours, faster' cannot be given to --only; name it without a comma"
    )


def test_pages_are_rewritten_from_the_results_beside_the_program(tmp_path):
    path = tmp_path / "BENCHMARKS.md"
    path.write_text(f"above\n{BEGIN}\nold\n{END}\nbelow\n")
    subprocess.run(
        [sys.executable, str(FOLDER / "pages.py")],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=True,
        timeout=200,
    )
    _, begin, published = (ROOT / "BENCHMARKS.md").read_text().partition(BEGIN)
    summary, end, _ = published.partition(END)
    assert path.read_text() == f"above\n{begin}{summary}{end}\nbelow\n"
    assert (tmp_path / "docs" / "benchmarks" / "speed.md").is_file()


def test_devices_are_counted_without_being_held():
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "3"}
    machine = find_machine(environment)
    assert (machine.num_devices, machine.device) == (3, "cpu")
    assert machine.identity == find_machine(environment).identity
    with pytest.raises(BenchError, match=r"jax.devices.* fails: "):
        find_machine(environment | {"JAX_PLATFORMS": "nonsense"})


def test_stopping_a_contest_stops_its_program_and_what_that_started(tmp_path):
    """Fails if an orphan would go on holding the devices."""
    code = (
        "import os, pathlib, subprocess, sys, time;child = subprocess.Popen(['sleep', "
        "'99']);pathlib.Path('pids').write_text(f'{os.getpid()} "
        "{child.pid}');time.sleep(99)"
    )
    rows = [speed_row("speed", ("ours",), ("ours",))]
    write_contest(tmp_path / "toy.py", [contestant("ours", code=code)], rows)
    words = (str(FOLDER / "contest.py"), "toy.py", "--simulated_devices=2")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    how = {"cwd": tmp_path, "env": environment, "stdout": subprocess.PIPE}
    pids = tmp_path / "pids"
    with programs.started([sys.executable, *words], **how) as program:
        programs.wait_until(
            lambda: pids.exists() and len(pids.read_text().split()) == 2, program
        )
        program.send_signal(signal.SIGTERM)
        programs.finish(program)
    assert program.returncode == 128 + signal.SIGTERM
    for pid in map(int, pids.read_text().split()):
        assert not programs.is_alive(pid)
