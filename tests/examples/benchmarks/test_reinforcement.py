"""The programs and the contest of reinforcement learning, on small models."""

import dataclasses
import json
import math
import sys

import numpy as np
import pytest
from contests.contest import load_contest

from tests.support.benchmarks import FOLDER, load
from zjax.rl import Trainer

FEW = "--num_prompts=2", "--num_given=5", "--num_new=6", "--microbatch_size=8"
BRIEF = "--num_warm_ups=0", "--num_steps=1"


def printed(module, monkeypatch, capfd, *flags):
    """What a program prints for its contest, on one layer."""
    shapes = sys.modules["rl_cases"].SHAPES
    for name in ("tiny", "tiny_moe"):
        small = dataclasses.replace(shapes[name], num_layers=1)
        monkeypatch.setitem(shapes, name, small)
    # Fewer programs to compile: texts are drawn one after another.
    monkeypatch.setattr("zjax.rl.sampler.MAX_ROWS", 1)
    monkeypatch.setattr(sys, "argv", ["program.py", *FEW, *flags])
    module.main()
    return json.loads(capfd.readouterr().out.rpartition("RESULT ")[2])


GRPO = (
    "zjax GRPO",
    "zjax GRPO at temperature 1",
    "zjax GRPO in exact mode",
    "zjax GRPO of 16 prompts",
)
"""Contestants that the program runs as it is."""


def metrics_of(*contestants):
    """Metrics that the contest asks of programs, but for the memory of a device."""
    for row in load_contest(FOLDER / "reinforcement.py").rows:
        for case in row.cases:
            sides = case.ours, case.peer if isinstance(case.peer, tuple) else ()
            for name in contestants:
                if any(name in side for side in sides) and "bytes" not in case.metric:
                    yield case.metric


def test_steps_are_timed_and_tokens_compared(monkeypatch, capfd):
    """Fails if a step takes no text, or the log-probabilities are of other weights."""
    module, seen = load("rl_ours"), []
    compare = module.compare

    def watch(trainer, batch):
        assert isinstance(trainer, Trainer)
        assert trainer.config.rl.rollout.temperature == 0.5
        before = trainer.state
        seen.append({k: np.asarray(x) for k, x in batch["rl"].items()})
        found = compare(trainer, batch)
        assert trainer.state is before and trainer.step == 1
        return found

    monkeypatch.setattr(module, "compare", watch)
    flags = "--shape=tiny", "--num_warm_ups=1", "--num_steps=1", "--temperature=0.5"
    found = printed(module, monkeypatch, capfd, *flags)
    wanted = {*metrics_of(*GRPO)}
    assert wanted == {
        "sampler_kl",
        "largest_ratio",
        "step_seconds",
        "texts_per_second",
    }
    assert wanted <= {*found}
    assert 0 < found["num_compared"] == found["new_tokens"] <= 2 * 8 * 6
    assert 0 < found["largest_gap"] < 0.1
    assert found["largest_ratio"] == pytest.approx(math.exp(found["largest_gap"]))
    assert found["sampler_kl"] < found["largest_gap"] ** 2
    halves = found["rollout_seconds"]["median"] + found["update_seconds"]["median"]
    assert found["step_seconds"] == pytest.approx(
        {"median": halves, "min": halves, "max": halves, "n": 1}
    )
    assert found["texts_per_second"]["median"] == pytest.approx(16 / halves)
    [arrays] = seen
    assert arrays["advantages"].any()


def test_supervised_steps_have_the_shape_of_those_on_texts(monkeypatch, capfd):
    module = load("rl_ours")
    flags = "--shape=tiny", "--supervised", *BRIEF
    found = printed(module, monkeypatch, capfd, *flags)
    assert found["new_tokens"] == 2 * 8 * (5 + 6)
    assert "sampler_kl" not in found


@pytest.mark.parametrize("flag", ["--exact", "--reference"])
def test_a_flag_is_a_setting_of_the_run(flag, tmp_path, monkeypatch):
    """Fails if both sides of a comparison are one run."""
    module, made = load("rl_ours"), []
    monkeypatch.setattr(module, "Trainer", lambda config, **_: made.append(config))
    parser = module.cases.make_parser("tiny")
    given = parser.parse_args([*FEW])
    for name in ("exact", "reference", "supervised"):
        setattr(given, name, f"--{name}" == flag)
    module.make_trainer(given, str(tmp_path))
    [config] = made
    assert config.precision.batch_invariant == (flag == "--exact")
    assert (config.rl.reference is not None) == (flag == "--reference")


def test_experts_are_replayed_or_chosen_by_the_routers(monkeypatch, capfd):
    """Fails if both ways are one, or if tokens have no record."""
    module, drawn = load("rl_replay_ours"), []
    make = module.make_trainer

    def make_once(*given):
        """The same texts for both ways, by the programs of one trainer."""
        if not drawn:
            trainer = make(*given)
            batch = next(trainer.loader)
            drawn.extend([trainer, batch])
            monkeypatch.setattr(trainer, "close", lambda: None)
            monkeypatch.setattr(type(trainer.loader), "__next__", lambda self: batch)
        return drawn[0]

    monkeypatch.setattr(module, "make_trainer", make_once)
    flags = "--shape=tiny_moe", *BRIEF
    ways = {
        way: printed(module, monkeypatch, capfd, *flags, f"--ways={way}")
        for way in module.WAYS
    }
    trainer, batch = drawn
    Trainer.close(trainer)
    assert {*metrics_of("zjax with replay", "zjax without replay")} <= {*ways["replay"]}
    recorded = (np.asarray(batch["segment_ids"]) > 0).sum() - 16
    share = recorded / batch["segment_ids"].size
    assert {x["recorded_share"] for x in ways.values()} == {share}
    assert ways["replay"]["num_compared"] == ways["routers"]["num_compared"] > 0
    gaps = [ways[way]["largest_gap"] for way in module.WAYS]
    assert gaps[0] <= gaps[1]


def test_the_peer_has_the_tokens_the_shape_and_the_texts_of_ours():
    """Fails if a number of one side is changed alone."""
    cases, contest = load("rl_cases"), load_contest(FOLDER / "reinforcement.py")
    words = {x.name: x.command for x in contest.contestants}
    few = words["TRL"][2:]
    assert few and few == words["zjax GRPO of 16 prompts"][2:]
    assert words["TRL"][1] == "examples/benchmarks/rl_trl.py"
    assert words["zjax GRPO"][1:] == ("examples/benchmarks/rl_ours.py",)
    workload, shape = cases.Workload(), cases.SHAPES["1p5b"]
    assert (workload.num_texts, workload.length) == (512, 640)
    assert shape.matmul_params == pytest.approx(1.54e9, rel=0.01)
    assert shape.head_size == 128
    prompts = workload.prompts(shape.vocab_size, 3)
    ids = [list(map(int, each.split())) for each in prompts]
    assert len({*prompts}) == 3 * 64
    assert {len(each) for each in ids} == {128}
    # The last token of the vocabulary ends a text.
    assert max(map(max, ids)) < shape.vocab_size - 1
    assert cases.reward("1", "2 3 4 5") == 0.5
