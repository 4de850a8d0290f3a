"""A supervised start, then learning from rewards, then a report card.

python examples/rl/train.py --task=sums --method=grpo

A method is `grpo`; `dpo`, on pairs of right and wrong texts; or `ppo`, judged by a
reward model of these pairs. Stages that are finished are read, not run again.
"""

import argparse
import pathlib
from typing import Any

import data
import report

import zjax
from zjax.rl import PreferenceTrainer, Trainer, tasks

HERE = pathlib.Path(__file__).parent
STAGES = {
    "grpo": ("grpo",),
    "dpo": ("dpo",),
    "ppo": ("reward_model", "ppo"),
}
"""Configs that follow the supervised start, by method."""
TRAINERS = {"supervised": zjax.Trainer, "grpo": Trainer, "ppo": Trainer}
"""Trainers other than of pairs."""


def load(stage, task, folder, *settings):
    """Loads the config of a stage, with the files of a task."""
    files = folder / "data"
    changes: dict[str, Any] = {"directory": str(folder / stage)}
    if stage in ("supervised", "dpo", "reward_model"):
        name = "traces" if stage == "supervised" else "pairs"
        changes["data.path"] = str(files / name)
    else:
        changes["data.path"] = str(files / "traces")
        changes["rl.prompts"] = str(files / "prompts.jsonl")
    if stage != "supervised":
        changes["checkpoint.init_from"] = str(folder / "supervised")
    if stage == "grpo":
        changes["rl.evaluation_prompts"] = str(files / "held_out.jsonl")
        changes["rl.rewards"] = [{"function": f"zjax.rl.tasks.{task}:reward"}]
    if stage == "ppo":
        judge = {"kind": "run", "directory": str(folder / "reward_model")}
        changes["rl.rewards"] = [judge]
    return zjax.load_config(HERE / f"{stage}.py", changes, *settings)


def run(stage, task, folder, *settings):
    """Trains a stage to its end; returns the trainer."""
    print(f"\n{stage}", flush=True)
    make = TRAINERS.get(stage, PreferenceTrainer)
    trainer = make(load(stage, task, folder, *settings))
    trainer.fit()
    trainer.close()
    return trainer


def learn(name, method, folder, *, sizes, settings=(), num_drawn=1_000):
    """Runs all stages of a task; returns verified held-out texts by stage.

    Args:
        name: Name of the task.
        method: Name of the method.
        folder: Directory of the task.
        sizes: Sizes of `data.write_data`.
        settings: Settings of all stages.
        num_drawn: Prompts whose texts are pairs of a right and a wrong one.
    """
    task, files = getattr(tasks, name), folder / "data"
    if not files.exists():
        data.write_data(task, files, **sizes)
    held_out = data.read_lines(files / "held_out.jsonl")
    trainer = run("supervised", name, folder, *settings)
    cards = {"supervised": report.solve(trainer, task, held_out)}
    if method != "grpo" and not (files / "pairs").exists():
        prompts = data.read_lines(files / "prompts.jsonl")[:num_drawn]
        data.write_pairs(files, report.solve(trainer, task, prompts))
    for stage in STAGES[method]:
        trainer = run(stage, name, folder, *settings)
    cards[method] = report.solve(trainer, task, held_out)
    return cards


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--task", choices=tasks.__all__, default="sums")
    parser.add_argument("--method", choices=STAGES, default="grpo")
    parser.add_argument("--directory", type=pathlib.Path, default="runs/rl")
    parser.add_argument("--num_traces", type=int, default=500)
    parser.add_argument("--num_prompts", type=int, default=5_000)
    parser.add_argument("--num_held_out", type=int, default=100)
    parser.add_argument("settings", nargs="*", help="such as model.num_layers=4")
    given = parser.parse_args(words)
    cards = learn(
        given.task,
        given.method,
        given.directory / given.task,
        sizes={
            "num_traces": given.num_traces,
            "num_prompts": given.num_prompts,
            "num_held_out": given.num_held_out,
        },
        settings=given.settings,
    )
    report.show(cards)


if __name__ == "__main__":
    main()
