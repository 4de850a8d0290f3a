"""`zjax tune`: what it tries, tells and writes, by trials that are made up."""

import ctypes
import dataclasses
import json
import os
import re
import signal
import sys

import pytest
from absl import flags

from tests.support.refusals import bench_error, plan_error
from zjax.cli import main, tune_search
from zjax.cli import tune as command
from zjax.cli.tune import tune
from zjax.cli.tune_search import Facts, Runner
from zjax.config import load_config
from zjax.config.gin import from_gin
from zjax.errors import BenchError, ConfigError, PlanError
from zjax.estimate import search
from zjax.estimate.candidates import Candidate, given_candidate
from zjax.estimate.search import OUT_OF_MEMORY, fastest, next_candidate
from zjax.processes.programs import Outcome, find_result
from zjax.settings.describe import describe_config

TINY = ("model.num_layers=1", "model.embed_size=32", "model.num_heads=1")
TINY += ("model.max_length=32", "model.vocab_size=64", "data.source=synthetic")
TINY += ("global_batch_size=8", "precision.compute_dtype=float32")
_PR_SET_PDEATHSIG, _PR_GET_PDEATHSIG = 1, 2
FACTS = Facts("made up", 1, 1, 80e9)


class Fake:
    """Trials whose speed is that of the microbatch, up to 4 rows."""

    def __init__(self, facts=FACTS, fails=False):
        self._facts, self._fails, self.tried = facts, fails, []

    def facts(self):
        return self._facts

    def measure(self, settings):
        config = from_gin(bindings=[settings])
        self.tried.append(config)
        if self._fails or config.microbatch_size > 4:
            return {}, OUT_OF_MEMORY
        speed = 1_000.0 * config.microbatch_size + (config.model.remat == "none")
        return {"tokens_per_second_per_device": {"median": speed}, "peak_bytes": 9}, ""


@pytest.fixture
def config(tmp_path):
    return load_config({}, *TINY, "microbatch_size=2", f"directory='{tmp_path}'")


def test_the_fastest_of_a_few_trials_is_written_and_told(config, tmp_path):
    runner = Fake()
    told = tune(config, num_trials=4, runner=runner)
    sizes = [(tried.microbatch_size, tried.model.remat) for tried in runner.tried]
    assert sizes[0] == (2, "elementwise")
    assert sizes[1] == (8, "none")  # predicted to be best, and out of memory
    assert len(sizes) == 4
    assert {tried.global_batch_size for tried in runner.tried} == {8}
    written = load_config(tmp_path / "tuned.gin")
    assert written.microbatch_size == max(x for x, _ in sizes if x <= 4)
    lines = told.splitlines()
    assert lines[-1] == f"next: zjax train --config={tmp_path}/tuned.gin"
    assert f"  --config.microbatch_size={written.microbatch_size}" in lines
    assert max(map(len, lines[: lines.index("")])) <= 79
    table = [line.split() for line in lines if re.match(r"\d", line)]
    assert [row[1] for row in table] == [str(size) for size, _ in sizes]
    assert "out of memory" in lines[3]
    assert lines[2].endswith("2,000   as given")
    assert [line.split()[1] for line in lines if line.endswith("fastest")] == ["4"]


def test_a_second_call_goes_on_from_the_records(config, tmp_path):
    first, second, third = Fake(), Fake(), Fake()
    tune(config, num_trials=2, runner=first)
    assert tune(config, num_trials=2, runner=second)
    assert not second.tried
    tune(config, num_trials=3, runner=third)
    assert len(third.tried) == 1
    assert third.tried[0] not in first.tried
    rows = [json.loads(x) for x in (tmp_path / "tune.jsonl").read_text().splitlines()]
    assert len(rows) == 3
    assert rows[1]["failure"] == OUT_OF_MEMORY


def test_trials_of_other_settings_or_machines_do_not_count(config):
    tune(config, num_trials=1, runner=Fake())
    other = Fake()
    tune(load_config(config, "seed=3"), num_trials=1, runner=other)
    assert len(other.tried) == 1
    moved = Fake(Facts("another", 1, 1, 80e9))
    tune(config, num_trials=1, runner=moved)
    assert len(moved.tried) == 1


def test_a_trial_that_was_cut_off_is_tried_again(config):
    class CutOff(Fake):
        def measure(self, settings):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune(config, num_trials=2, runner=CutOff())
    again = Fake()
    tune(config, num_trials=1, runner=again)
    assert given_candidate(again.tried[0], FACTS.machine()) == given_candidate(
        config, FACTS.machine()
    )


def test_where_all_fail_nothing_is_written(config, tmp_path):
    with plan_error(
        "trials=2 fail, the last with: out of memory; "
        "see tune.log in the directory of the run"
    ):
        tune(config, num_trials=2, runner=Fake(fails=True))
    assert not (tmp_path / "tuned.gin").exists()


def test_where_nothing_fits_the_least_is_named(config):
    runner = Fake(Facts("tiny", 1, 1, 1e4))
    with pytest.raises(PlanError) as error:
        tune(config, runner=runner)
    text = str(error.value)
    assert text.startswith("trials=0 has no settings that fit: microbatch 1, ZeRO 1, ")
    assert text.endswith("GB of 0.0 GB; use more devices, or a smaller model")
    assert not runner.tried
    assert tune(config, num_trials=1, runner=runner, device_gb=80)


def test_settings_that_tune_cannot_have_are_refused_at_once(config):
    with pytest.raises(ConfigError) as error:
        tune(
            load_config(config, "processes.coordinator='a:1'", "num_epochs=2"),
            output="best.py",
            runner=Fake(),
        )
    assert str(error.value).splitlines() == [
        "num_epochs=2.0 needs the number of rows, which only zjax.Trainer counts; "
        "set num_steps",
        "--output='best.py' is not a Gin file; use a name that ends in .gin",
        "processes.coordinator='a:1' joins other machines, and trials are of one; "
        "use none",
    ]


def test_a_record_that_was_cut_off_costs_no_other(config, tmp_path, caplog):
    """Fails if a kill while a trial is recorded loses trials before or after it."""
    tune(config, num_trials=2, runner=Fake())
    path = tmp_path / "tune.jsonl"
    first, second = path.read_text().splitlines()
    path.write_text(f"{first}\n{second[:-9]}")
    again = Fake()
    tune(config, num_trials=2, runner=again)
    assert len(again.tried) == 1
    assert caplog.messages == [f"{path}: the last line was cut off and is left out"]
    assert path.read_text() == f"{first}\n{second}\n"


def test_a_trial_ends_with_the_command_that_started_it(monkeypatch, capsys):
    """Fails if a trial holds the devices after its command was killed."""
    monkeypatch.setattr(sys, "argv", ["child", str(os.getppid()), "0"])
    libc, number = ctypes.CDLL(None), ctypes.c_int()
    try:
        tune_search.main()
        libc.prctl(_PR_GET_PDEATHSIG, ctypes.byref(number))
    finally:
        libc.prctl(_PR_SET_PDEATHSIG, 0)
    assert number.value == signal.SIGKILL
    assert "RESULT" in capsys.readouterr().out
    killed = []
    monkeypatch.setattr(os, "kill", lambda *given: killed.append(given))
    monkeypatch.setattr(sys, "argv", ["child", "1", "0"])  # has ended before
    try:
        tune_search.main()
    finally:
        libc.prctl(_PR_SET_PDEATHSIG, 0)
    assert killed == [(os.getpid(), signal.SIGKILL)]


def test_damaged_records_are_named(config, tmp_path):
    path = tmp_path / "tune.jsonl"
    path.write_text('{"run": 3}\n{"ru\n')
    with pytest.raises(BenchError) as error:
        tune(config, runner=Fake())
    assert str(error.value).startswith(f"records={str(path)!r} is not a list of trials")
    assert str(error.value).endswith("; remove it to begin anew")


def test_a_bar_on_a_terminal_names_the_trial(config, monkeypatch, capsys):
    class Terminal(command.Console):
        def __init__(self, **options):
            super().__init__(**options, force_terminal=True, width=100)

    monkeypatch.setattr(command, "Console", Terminal)
    tune(config, num_trials=2, runner=Fake())
    shown = capsys.readouterr().err
    assert "2/2" in shown
    assert "microbatch 8, ZeRO 1, remat none: out of memory" in shown


def test_processes_find_the_devices_and_take_real_steps(config, tmp_path):
    """The only test whose trial runs."""
    told = tune(config, num_trials=1, simulated_devices=2)
    assert "as given, fastest" in told
    row = json.loads((tmp_path / "tune.jsonl").read_text())
    assert row["tokens_per_second"] > 0
    log = (tmp_path / "tune.log").read_text()
    assert '"num_devices": 2' in log.partition("trial.gin")[0]


@pytest.mark.parametrize(
    ("printed", "code", "expected"),
    [
        ('RESULT {"peak_bytes": 3}', "", ({"peak_bytes": 3}, "")),
        ("zjax: seed=-1 is out of range", "exit code 2", "seed=-1 is out of range"),
        ("zjax: x takes (RESOURCE_EXHAUSTED: 3G)", "exit code 2", OUT_OF_MEMORY),
        ("Segmentation fault", "exit code 139", "exit code 139"),
        ("", "ran past 1800 s", "ran past 1800 s"),
    ],
)
def test_what_a_trial_gives(printed, code, expected, config, tmp_path, monkeypatch):
    def run_program(words, *_, **__):
        assert words[1:5] == ["-m", "zjax.cli.tune_search", str(os.getpid()), "2"]
        assert load_config(words[5]) == config
        text = f"a warning\n{printed}\n"
        return Outcome(*find_result(text, code), text)

    monkeypatch.setattr(tune_search, "run_program", run_program)
    runner = Runner(tmp_path / "tune.log", simulated_devices=2)
    found = runner.measure(describe_config(config))
    assert found == (expected if isinstance(expected, tuple) else ({}, expected))


def test_without_devices_the_reason_is_told(tmp_path, monkeypatch):
    failed = Outcome({}, "exit code 1", "")
    monkeypatch.setattr(tune_search, "run_program", lambda *_, **__: failed)
    with bench_error("devices='jax.devices()' fails: exit code 1; see `zjax report`"):
        Runner(tmp_path / "tune.log").facts()


def test_the_command_line():
    refused = re.escape("--trials=9: 9 is not an integer in the range [1, 8]")
    with pytest.raises(flags.IllegalFlagValueError, match=refused):
        main.TUNE.flags["trials"].parse("9")


SIZES = (1, 2, 4, 8, 16)
REMATS = ("none", "elementwise", "full")
BYTES = {"none": 4, "elementwise": 2, "full": 1}
SECONDS = {"none": 1.0, "elementwise": 1.01, "full": 1.3}


class Predictions:
    """State takes 10 bytes, and a row of a microbatch as many as its policy saves."""

    usable_bytes = 45

    def __init__(self, obstacles=()):
        self.obstacles = obstacles

    def obstacle(self, candidate):
        return "cannot work" if candidate in self.obstacles else ""

    def num_bytes(self, candidate):
        return 10 + candidate.microbatch_size * BYTES[candidate.remat]

    def seconds(self, candidate):
        return SECONDS[candidate.remat] * (1 + 0.1 / candidate.microbatch_size)


RANKED = sorted(
    (Candidate(size, 1, remat) for size in SIZES for remat in REMATS),
    key=Predictions().seconds,
)
GIVEN = Candidate(2, 1, "full")


def done(candidate, speed=None, peak=1.0, failure=""):
    size = Predictions().num_bytes(candidate)
    if failure:
        return search.Outcome(candidate, size, failure=failure)
    speed = speed or 1 / Predictions().seconds(candidate)
    return search.Outcome(candidate, size, speed, peak * size)


def pick(*outcomes, given=GIVEN, predictions=None):
    return next_candidate(RANKED, given, outcomes, predictions or Predictions())


def test_the_given_settings_come_first_then_the_best_by_prediction_that_fits():
    assert pick() == GIVEN
    best = pick(done(GIVEN))
    assert best == Candidate(8, 1, "none")
    assert Predictions().num_bytes(best) <= 45
    assert pick(given=None) == best
    assert pick(given=Candidate(16, 1, "none")) == best  # as given does not fit
    without_it = pick(done(GIVEN), predictions=Predictions([best]))
    assert without_it == Candidate(16, 1, "elementwise")


def test_after_running_out_of_memory_less_is_tried():
    failed = done(Candidate(8, 1, "none"), failure=OUT_OF_MEMORY)
    found = pick(done(GIVEN), failed)
    assert Predictions().num_bytes(found) < failed.predicted_bytes
    assert found == Candidate(8, 1, "elementwise")  # one of 16 takes as much
    other = dataclasses.replace(failed, failure="exit code 2")
    assert pick(done(GIVEN), other) == Candidate(16, 1, "elementwise")


def test_a_measured_peak_lets_more_fit_below_its_prediction_and_less_above_it():
    whole = Candidate(16, 1, "none")  # 74 bytes, of which 45 fit
    assert pick(done(GIVEN, peak=0.71)) != whole
    roomy = Predictions()
    roomy.usable_bytes = 60
    assert pick(done(GIVEN), predictions=roomy) == Candidate(8, 1, "none")
    assert pick(done(GIVEN, peak=0.8), predictions=roomy) == whole
    # Peaks far below are of other parts of the program.
    assert pick(done(GIVEN, peak=0.1)) != whole
    assert pick(done(GIVEN, peak=1.2)) == Candidate(8, 1, "elementwise")


def test_then_neighbours_of_the_fastest_are_tried_until_none_promises_more():
    best = done(Candidate(8, 1, "none"), speed=9.0)
    first = pick(done(GIVEN), best)
    assert first == Candidate(8, 1, "elementwise")
    second = pick(done(GIVEN), best, done(first, speed=8.0))
    assert second == Candidate(4, 1, "none")
    third = pick(done(GIVEN), best, done(first, speed=8.0), done(second, speed=7.0))
    assert third is None  # full is predicted to take 30 % more
    faster = pick(done(GIVEN), best, done(first, speed=10.0))
    assert faster == Candidate(16, 1, "elementwise")


def test_the_fastest_is_the_one_that_ran():
    failed = done(Candidate(8, 1, "none"), failure=OUT_OF_MEMORY)
    assert fastest([failed]) is None
    slow, fast = done(GIVEN, speed=1.0), done(Candidate(4, 1, "none"), speed=2.0)
    assert fastest([failed, fast, slow]) is fast
