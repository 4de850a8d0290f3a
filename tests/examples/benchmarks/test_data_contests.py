"""The contests of buckets, curricula and dropped tokens: small ones to the end."""

import json
import sys

import numpy as np
import pytest
from contests.contest import load_contest

from tests.support.benchmarks import FOLDER, load
from zjax.data.prepare import prepare
from zjax.schedule.training import TrainingSchedule

TINY = (
    "global_batch_size=8",
    "optimizer.schedule.num_warmup_steps=1",
    "precision.compute_dtype=float32",
    "model.num_layers=1",
    "model.embed_size=16",
    "model.num_heads=2",
    "model.max_length=16",
)


@pytest.fixture
def text(tmp_path):
    lines = tmp_path / "lines.jsonl"
    words = ["one two three", "three four", "five six", "seven eight nine"]
    texts = [f"{words[i % 4]} " * (4 + i) for i in range(60)]
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepare([lines], tmp_path / "text", validation_fraction=0.3)
    return tmp_path / "text"


@pytest.fixture
def measure(text, monkeypatch, capsys):
    """Runs a program, changed by `change`, and returns its result."""

    def run(name, *flags, change=lambda module: None):
        module = load(name)
        monkeypatch.setattr(module, "use_program_cache", lambda: None)
        change(module)
        options = [flag for flag in flags if flag.startswith("--")]
        settings = [*TINY, *(flag for flag in flags if flag not in options)]
        words = ["program.py", f"--text={text}", *options, *settings]
        monkeypatch.setattr(sys, "argv", words)
        module.main()
        return json.loads(capsys.readouterr().out.removeprefix("RESULT "))

    return run


def metric_of(contest):
    (row,) = load_contest(FOLDER / f"{contest}.py").rows
    return row.cases[0].metric


def test_buckets_and_joined_rows_are_measured(measure):
    found = measure("bucket_speed", "--steps=2", "buckets.shortest=8")
    speed = found["tokens_per_second"]
    assert found[metric_of("length_buckets")]["n"] == 5
    assert speed["joined"]["min"] > 0 < speed["buckets"]["min"]


def test_curricula_are_measured(measure, tmp_path, monkeypatch):
    """Finished runs are not run again."""

    def change(module):
        first = staticmethod(lambda loss, losses: min(losses))
        monkeypatch.setattr(module.quality_records, "reach", first)

    directory = tmp_path / "runs"
    flags = (f"--directory={directory}", "--seeds=0", "num_steps=10")
    flags += ("--methods=shuffled,voc", "evaluation.num_batches=1")
    for _ in range(2):
        found = measure("curriculum_quality", *flags, change=change)
    assert found["best"] == "voc"
    assert found[metric_of("curriculum_tokens")]["median"] == 1.0
    assert (directory / "curves.png").exists()
    assert len((directory / "runs.jsonl").read_text().splitlines()) == 2


@pytest.mark.slow
def test_growing_contexts_are_measured(measure, tmp_path):
    """All rows of the contest; finished runs are not run again."""
    methods = ["plain", "window", "composed", "hot_plain", "hot_window"]
    flags = (f"--directory={tmp_path / 'runs'}", f"--methods={','.join(methods)}")
    flags += ("--seeds=0", "num_steps=5")
    small = "evaluation.num_batches=1", "sequence_warmup.pacing.start=8"
    small += ("sequence_warmup.pacing.multiple=8", "model.num_layers=3")
    for _ in range(2):
        found = measure("efficiency_quality", *flags, *small)
    assert found["window_programs"]["median"] == 1
    rows = load_contest(FOLDER / "data_efficiency.py").rows
    assert all(found[row.cases[0].metric]["n"] == 1 for row in rows)
    assert len((tmp_path / "runs/runs.jsonl").read_text().splitlines()) == 5


def test_unstable_steps_are_counted(measure):
    count = load("efficiency_quality").count_unstable
    assert count(np.array([4.0, 3.0, 3.5, 3.7, 2.0, np.nan, 2.5])) == 3


def test_where_a_loss_is_reached_is_interpolated(measure):
    reach = load("quality_records").reach
    losses = {100: 5.0, 200: 4.0, 300: 4.5, 400: 3.0}
    assert reach(4.5, losses) == 150
    assert reach(6.0, losses) == 100
    assert reach(3.75, losses) == 350
    assert reach(2.0, losses) is None
    assert reach(float("nan"), losses) is None
    assert reach(4.5, {100: float("nan"), 200: 4.0}) == 200


def record_of(losses):
    return {"losses": [*losses.items()], "seconds": [*losses], "tokens": [*losses]}


RUN = record_of({100: 5.0, 200: 3.9, 300: 4.1, 400: 4.0})
"""The final loss is reached before the end."""
NAN = record_of({100: float("nan"), 200: float("nan")})


def test_a_run_needs_as_much_as_itself(measure):
    """Fails if one side ends at its first crossing, and the other with the run."""
    assert load("quality_records").shares([RUN], [RUN], by="tokens") == [1.0]
    assert load("efficiency_quality").speedups([RUN], [RUN]) == [1.0]


def test_losses_that_are_no_number_reach_nothing(measure):
    shares = load("quality_records").shares([NAN, RUN], [RUN, NAN], by="tokens")
    assert shares == [None, None]
    assert load("efficiency_quality").speedups([RUN, NAN], [NAN, RUN]) == [0.0, 0.0]


def test_curricula_whose_losses_are_no_number_end_with_a_message(measure):
    """Not with a KeyError."""
    module = load("curriculum_quality")

    class Records:
        def read_all(self, method, seeds):
            return {"shuffled": [RUN], "seqtru": [NAN]}.get(method)

    with pytest.raises(SystemExit) as error:
        module.compare(Records(), [0])
    assert str(error.value) == (
        "no curriculum reaches the loss of the others: {'seqtru': [None]}"
    )


def test_a_run_is_found_again_though_its_setup_holds_tuples(tmp_path):
    make = load("quality_records").Records
    records = make(tmp_path / "runs.jsonl", {"plain": [(0.5, 1)], "other": [(0.5, 2)]})
    records.write("plain", 0, losses={8: 2.0})
    assert records.read()["plain", 0]["losses"] == [[8, 2.0]]
    changed = make(tmp_path / "runs.jsonl", {"plain": [(0.5, 3)]})
    assert changed.read() == {}


SIZES = ("num_layers=3", "embed_size=16", "num_heads=2", "vocab_size=61", "length=16")


def metrics_of(row):
    (row,) = [x for x in load_contest(FOLDER / "random_ltd.py").rows if x.id == row]
    return {case.metric for case in row.cases}


@pytest.mark.slow
def test_steps_are_measured(monkeypatch, capsys):
    module = load("dropping_steps")
    small = {"ROUNDS": 2, "STEPS_PER_ROUND": 2, "LAYER_DROP_STEPS": 2}
    for name, value in small.items():
        monkeypatch.setattr(module, name, value)
    words = [f"--{word}" for word in (*SIZES, "microbatch_size=2")]
    monkeypatch.setattr(sys, "argv", ["dropping_steps.py", *words])
    module.main()
    found = json.loads(capsys.readouterr().out.removeprefix("RESULT "))
    assert metrics_of("random_ltd_step") | metrics_of("pld_step") <= found.keys()
    assert metrics_of("random_ltd_vs_deepspeed") <= found.keys()
    assert set(found["step_seconds"]) == {"whole", "layerwise 8", "span 8"}
    assert found["layerwise"]["n"] == 2


def test_the_mean_step_is_that_of_the_runs_of_quality():
    """Fails if one drops tokens longer, or its sizes have another mean."""
    schedule, quality = load("kept_schedule"), load("random_ltd_quality")
    config = quality.make_config("layerwise", "data.path=x")
    kept, length = TrainingSchedule(config), config.data.length
    steps = range(1, config.num_steps + 1)
    share = sum(kept.at(step).num_kept for step in steps) / len(steps) / length
    sizes = schedule.kept_tokens(2048)
    assert sizes == [1024]
    assert schedule.mean_of_run(sizes, 2048) == pytest.approx(share, abs=1e-3)


def test_losses_are_compared_seed_by_seed():
    module = load("random_ltd_quality")

    class Records:
        def read(self):
            losses = {"plain": (2.0, 4.0), "layerwise": (2.2, 4.0), "span": (1.0, 4.0)}
            return {
                (method, seed): {"losses": [[0, 9.0], [8, each[seed]]]}
                for method, each in losses.items()
                for seed in (0, 1)
            }

    found = module.compare(Records(), [0, 1])
    assert metrics_of("random_ltd_quality") == found.keys()
    assert found["layerwise"]["max"] == pytest.approx(1.1)
    assert found["span"]["median"] == 0.75
