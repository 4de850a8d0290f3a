"""The example of reinforcement learning: its files, its configs, and a tiny run."""

import json
import os
import runpy
import subprocess
import sys

import pytest

import zjax
from tests.support.benchmarks import ROOT
from zjax.config import check_config
from zjax.data import store
from zjax.rl import tasks

FOLDER = ROOT / "examples" / "rl"
STAGES = ("supervised", "grpo", "dpo", "reward_model", "ppo")
TINY = (
    "--num_traces=60",
    "--num_prompts=16",
    "--num_held_out=4",
    "model.num_layers=1",
    "model.embed_size=16",
    "model.num_heads=2",
    "num_steps=2",
    "optimizer.schedule.num_warmup_steps=1",
    "evaluation.num_batches=1",
)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("stage", STAGES)
def test_each_config_can_work(stage):
    check_config(zjax.load_config(FOLDER / f"{stage}.py"), num_devices=1)


@pytest.mark.parametrize("name", tasks.__all__)
def test_traces_are_right_and_held_out_operands_are_new(name, tmp_path):
    task = getattr(tasks, name)
    sizes = {"num_traces": 60, "num_prompts": 50, "num_held_out": 20}
    example = runpy.run_path(str(FOLDER / "data.py"))
    example["write_data"](task, tmp_path, **sizes)
    traces = lines(tmp_path / "traces.jsonl")
    solved = task.rows(60, seed=0)
    for trace, row in zip(traces, solved, strict=True):
        assert trace["prompt"] == row["prompt"]
        assert task.reward(completion=trace["completion"], **row) == 1
    prompts, held_out = (
        lines(tmp_path / f"{x}.jsonl") for x in ("prompts", "held_out")
    )
    known = {x for row in [*solved, *prompts] for x in row["operands"]}
    assert not known & {x for row in held_out for x in row["operands"]}
    assert (len(prompts), len(held_out)) == (50, 20)
    assert store.read_meta(str(tmp_path / "traces")).has_answers


def test_pairs_are_of_prompts_with_a_right_and_a_wrong_text(tmp_path):
    """Fails if a wrong text is preferred, or a prompt without a choice is a pair."""
    mixed = [(f"{n}+1\n", [("no", 0.0), (f"{n + 1}", 1.0)]) for n in range(30)]
    all_right, all_wrong = ("2+2\n", [("4", 1.0)] * 2), ("3+3\n", [("4", 0.0)] * 2)
    example = runpy.run_path(str(FOLDER / "data.py"))
    with pytest.raises(SystemExit, match="train the start for longer"):
        example["write_pairs"](tmp_path, [all_right, all_wrong])
    assert not [*tmp_path.iterdir()]
    example["write_pairs"](tmp_path, [*mixed, all_right, all_wrong])
    first, *_ = pairs = lines(tmp_path / "pairs.jsonl")
    assert first == {"prompt": "0+1\n", "chosen": "1", "rejected": "no"}
    assert len(pairs) == 30


def test_pass_rates_count_texts_and_prompts():
    report = runpy.run_path(str(FOLDER / "report.py"))
    texts = [("a", [("", 1.0), ("", 0.0)]), ("b", [("", 0.0), ("", 0.0)])]
    assert report["pass_rates"](texts) == (0.25, 0.5)


@pytest.mark.slow
def test_the_example_runs_to_its_report_card(tmp_path):
    command = [
        sys.executable,
        str(FOLDER / "train.py"),
        f"--directory={tmp_path}",
        *TINY,
    ]
    result = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    card = result.stdout.partition("held-out prompts")[2].splitlines()
    assert card[0].split() == ["pass@1", "pass@8"]
    assert [line.split()[0] for line in card[1:3]] == ["supervised", "grpo"]
    assert sum(line.startswith("grpo, ") for line in card) == 3
    assert (tmp_path / "sums" / "grpo" / "checkpoints" / "2").is_dir()
