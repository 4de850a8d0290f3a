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
from zjax.run.compiler import use_program_cache

HERE = pathlib.Path(__file__).parent
STAGES = {
    "grpo": ("grpo",),
    "dpo": ("dpo",),
    "ppo": ("reward_model", "ppo"),
}
"""Configs that follow the supervised start, by method."""
NAMES = ("supervised", *sorted({x for names in STAGES.values() for x in names}))
EARLY = "supervised, four fifths"
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


def run(stage, task, folder, settings=(), look=None):
    """Trains a stage to its end; returns the trainer.

    Args:
        stage: Name of the stage.
        task: Name of the task.
        folder: Directory of the task.
        settings: Settings of all stages, and, as `grpo:num_steps=20`, of one.
        look: `look(trainer, step)` is called after each step.
    """
    print(f"\n{stage}", flush=True)
    make = TRAINERS.get(stage, PreferenceTrainer)
    after_step = [lambda step, *_: look(trainer, step)] if look else []
    config = load(stage, task, folder, *of_stage(stage, settings))
    trainer = make(config, after_step=after_step)
    trainer.fit()
    trainer.close()
    return trainer


def of_stage(stage, settings):
    """Selects the settings of a stage."""
    pairs = [setting.partition(":") for setting in settings]
    return [
        rest if name == stage else setting
        for setting, (name, _, rest) in zip(settings, pairs, strict=True)
        if name == stage or name not in NAMES
    ]


def learn(name, method, folder, *, sizes, settings=(), num_drawn=500):
    """Runs all stages of a task; returns the report card.

    The supervised start is examined after four fifths of its steps, too: a start that
    still rises was stopped too early.

    Args:
        name: Name of the task.
        method: Name of the method.
        folder: Directory of the task.
        sizes: Sizes of `data.write_data` that a user gave.
        settings: Settings of `run`.
        num_drawn: Prompts whose texts are pairs of a right and a wrong one.
    """
    task, files = getattr(tasks, name), folder / "data"
    data.find_data(task, files, sizes)
    card = report.Card(
        folder / "card.json", task, data.read_lines(files / "held_out.jsonl")
    )

    def look(trainer, step):
        if step == 4 * trainer.config.num_steps // 5:
            card.examine(EARLY, trainer)

    trainer = run("supervised", name, folder, settings, look)
    card.examine("supervised", trainer)
    if method != "grpo" and not (files / "pairs").exists():
        prompts = data.read_lines(files / "prompts.jsonl")[:num_drawn]
        data.write_pairs(files, report.solve(trainer, task, prompts))
    for stage in STAGES[method]:
        trainer = run(stage, name, folder, settings)
    card.examine(method, trainer)
    return card


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--task", choices=tasks.__all__, default="sums")
    parser.add_argument("--method", choices=STAGES, default="grpo")
    parser.add_argument("--directory", type=pathlib.Path, default="runs/rl")
    parser.add_argument("--num_drawn", type=int, default=500, help="prompts of pairs")
    data.add_sizes(parser)
    parser.add_argument(
        "settings", nargs="*", help="such as model.num_layers=4, and grpo:num_steps=20"
    )
    given = parser.parse_args(words)
    use_program_cache()
    card = learn(
        given.task,
        given.method,
        given.directory / given.task,
        sizes=data.sizes_of(given),
        settings=given.settings,
        num_drawn=given.num_drawn,
    )
    card.show()


if __name__ == "__main__":
    main()
