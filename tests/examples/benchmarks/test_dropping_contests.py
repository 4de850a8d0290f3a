"""The contests of dropped tokens and layers: a small one to the end, and ratios."""

import json
import sys

import pytest
from contests.contest import load_contest

from tests.support.benchmarks import FOLDER, load
from zjax.schedule.training import TrainingSchedule

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
