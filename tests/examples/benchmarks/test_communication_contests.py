"""The contests of communication, small, to the end."""

import dataclasses
import json
import sys

import jax
import pytest
from contests.contest import load_contest

import zjax
from tests.support.benchmarks import FOLDER, load
from zjax.config import load_config
from zjax.data.prepare import prepare
from zjax.schedule.exchange import make_exchanges
from zjax.settings import schema

TINY = (
    "num_steps=4",
    "global_batch_size=8",
    "optimizer.schedule.num_warmup_steps=1",
    "precision.compute_dtype=float32",
    "evaluation.num_batches=1",
    "model.num_layers=2",
    "model.embed_size=16",
    "model.num_heads=2",
    "model.max_length=16",
)


@pytest.fixture
def program(monkeypatch):
    module = load("method_quality")
    monkeypatch.setattr(module, "use_program_cache", lambda: None)
    return module


@pytest.fixture
def text(tmp_path):
    lines = tmp_path / "lines.jsonl"
    words = ["one two three", "three four", "five six", "seven eight nine"]
    lines.write_text("".join(json.dumps({"text": f"{w} " * 40}) + "\n" for w in words))
    prepare([lines], tmp_path / "text", validation_fraction=0.3)
    return tmp_path / "text"


@pytest.fixture
def measure(program, text, tmp_path, monkeypatch, capsys):
    """Runs the program; returns its result and what it trained."""

    def run(*flags):
        words = [f"--text={text}", f"--directory={tmp_path / 'runs'}", *flags, *TINY]
        monkeypatch.setattr(sys, "argv", ["method_quality.py", *words])
        program.main()
        printed = capsys.readouterr()
        trained = [x for x in printed.err.splitlines() if ", seed " in x]
        return json.loads(printed.out.removeprefix("RESULT ")), trained

    return run


@pytest.mark.parametrize("num_devices", [2, 4])
def test_methods_and_twins_differ_in_what_they_send_alone(program, num_devices):
    """Fails if a method has other learning rates, tokens or weights than its twin."""
    sent = {
        "communication": schema.Communication(),
        "zero": schema.Zero(),
        "mesh": schema.Mesh(),
    }
    vocabulary = {"data.source": "synthetic", "model.vocab_size": 50_257}
    for method, twin in program.TWINS.items():
        ours, exact = (program.make_config(name, vocabulary) for name in (method, twin))
        zjax.check_config(ours, num_devices)
        zjax.check_config(exact, num_devices)
        names = {ours.optimizer.rule.kind, exact.optimizer.rule.kind}
        assert len(names) == 1 or method.startswith(("onebit", "zero_one"))
        same = dataclasses.replace(ours.optimizer, rule=exact.optimizer.rule)
        stored = ours.model.layers_per_scan
        exact = zjax.load_config(exact, {"model.layers_per_scan": stored})
        ours = dataclasses.replace(ours, optimizer=same)
        assert ours != exact or len(names) == 2
        assert dataclasses.replace(ours, **sent) == dataclasses.replace(exact, **sent)


def test_the_contest_has_a_case_for_each_method(program):
    rows = load_contest(FOLDER / "communication_quality.py").rows
    cases = [case for row in rows for case in row.cases]
    assert {case.metric: case.peer_name for case in cases} == program.TWINS
    assert len(cases) == len(program.TWINS)
    assert {case.must for case in cases} == {1.01}


def test_an_unknown_method_is_named(program, capsys):
    with pytest.raises(SystemExit):
        program.parse(["--methods=adam,sgd"])
    assert "methods=sgd is unknown; use adam, " in capsys.readouterr().err


@pytest.mark.slow
def test_finished_runs_are_not_run_again(measure, program, tmp_path, monkeypatch):
    """Fails if a program that is killed loses its finished runs."""
    local = {"communication.local_steps.num_steps": 2}
    monkeypatch.setitem(program.METHODS, "diloco", local)
    monkeypatch.setitem(program.TWINS, "diloco", "adam")
    found, trained = measure("--methods=adam,diloco", "--seeds=0")
    assert len(trained) == 2 and found["diloco"]["n"] == 1
    again, trained = measure("--methods=adam,diloco", "--seeds=0,1")
    assert len(trained) == 2 and again["diloco"]["n"] == 2
    first, second = again["diloco"]["min"], again["diloco"]["max"]
    assert found["diloco"]["median"] in (first, second) and first < second
    assert "onebit_adam" not in again
    assert (tmp_path / "runs" / "curves.png").stat().st_size > 10_000
    monkeypatch.setitem(
        program.METHODS, "diloco", {"communication.local_steps.num_steps": 1}
    )
    _, trained = measure("--methods=adam,diloco", "--seeds=0")
    assert len(trained) == 1 and trained[0].startswith("diloco")
    _, trained = measure("--methods=adam", "--seeds=0", "optimizer.rule.b1=0.8")
    assert len(trained) == 1


@pytest.fixture
def printed(monkeypatch, capsys):
    """What a program prints for a short round and few numbers."""

    def run(contestant):
        script, *flags = contestant.command[1:]
        module = load(script.rpartition("/")[2].removesuffix(".py"))
        monkeypatch.setattr(module.call_timing, "ROUND_SECONDS", 0)
        few = [flag for flag in flags if not flag.startswith("--num_floats=")]
        monkeypatch.setattr(sys, "argv", [script, *few, "--num_floats=8192"])
        module.main()
        return json.loads(capsys.readouterr().out.removeprefix("RESULT "))

    return run


def test_codecs_are_measured_against_a_copy(printed):
    contest = load_contest(FOLDER / "compress_overhead.py")
    ours, copy = map(printed, contest.contestants)
    for case in contest.rows[0].cases:
        for metric, found in ((case.metric, ours), (case.peer_metric, copy)):
            assert found[metric]["n"] == 7
            assert 0 < found[metric]["min"] <= found[metric]["median"]


def test_all_numbers_are_in_whole_blocks():
    """Fails if a codec pads, or the copy is of another size."""
    contest = load_contest(FOLDER / "compress_overhead.py")
    sizes = {
        int(word.partition("=")[2])
        for contestant in contest.contestants
        for word in contestant.command
        if word.startswith("--num_floats=")
    }
    (size,) = sizes
    assert size % 4096 == 0
    assert size == pytest.approx(1.5e9, rel=0.01)


SMALL = (
    "num_steps=64",
    "global_batch_size=4",
    "microbatch_size=2",
    "communication.local_steps.num_steps=8",
    "communication.local_steps.num_fragments=2",
    "communication.local_steps.delay=1",
    "model.num_layers=2",
    "model.embed_size=32",
    "model.num_heads=2",
    "model.vocab_size=64",
    "model.max_length=16",
    "data.length=16",
    "optimizer.schedule.num_warmup_steps=1",
)


@pytest.fixture
def module():
    return load("streaming_rounds")


@pytest.fixture
def contest():
    return load_contest(FOLDER / "streaming_exposed.py")


def test_rounds_are_measured_against_local_steps(
    module, contest, monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(module, "WARM_UP_ROUNDS", 1)
    devices = jax.devices()[:2]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    words = contest.contestants[0].command[1:]
    small = (*SMALL, f"directory={tmp_path}")
    monkeypatch.setattr(sys, "argv", [*words, *small])
    module.main()
    line, *table = capsys.readouterr().out.splitlines()
    found = json.loads(line.removeprefix("RESULT "))
    (case,) = contest.rows[0].cases
    assert found["num_devices"] == 2
    assert found["step_seconds"]["n"] == found["local_step_seconds"]["n"] == 5
    mean = found["step_seconds"]["median"]
    assert found[case.metric] == found["exposed_seconds"] / mean > 0
    assert table[0].split("  ")[0] == "milliseconds per step"


def test_what_exchanges_add_is_the_mean_over_a_round(module):
    rounds = module.Rounds(num_local_steps=8, num_fragments=2, delay=1)
    seconds = [1, 1, 1.5, 2, 1, 1, 1.5, 2]
    assert module.added_by_exchanges(rounds, seconds) == pytest.approx(3 / 8)


def test_the_row_is_about_four_fragments_in_int4_on_two_replicas(contest, module):
    """Fails if the other run exchanges anything while it is timed."""
    path, *settings = contest.contestants[0].command[2:]
    config = load_config(path, *settings)
    communication = config.communication
    assert (communication.codec, communication.local_steps.num_fragments) == ("int4", 4)
    assert communication.local_steps.delay > 0
    assert config.mesh.replica == 2
    exchanges = make_exchanges(module.without_exchange(config))
    number = module.WARM_UP_ROUNDS + module.TIMED_ROUNDS
    steps = range(1, number * communication.local_steps.num_steps + 1)
    assert not any(exchanges.at(step).sent is not None for step in steps)
