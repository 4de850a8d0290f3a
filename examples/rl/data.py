"""Files of a task: solved traces, prompts, held-out prompts, and pairs of texts.

python examples/rl/data.py --task=sums --output=runs/rl/sums/data
"""

import argparse
import json
import pathlib
import random
import shutil
import sys

from zjax.data.prepare import prepare
from zjax.rl import tasks

SIZES = {"num_traces": 20_000, "num_prompts": 5_000, "num_held_out": 100}
"""Sizes of `write_data` that a user does not give."""
VALIDATION_FRACTION = 0.05
ERROR_RATE = 0.65
"""Share of traces in which the teacher errs."""


def find_data(task, folder, sizes):
    """Writes the files of a task where there are none; refuses files of other sizes.

    Args:
        task: Module of `zjax.rl.tasks`.
        folder: Directory of the files.
        sizes: Sizes of `write_data` that a user gave.
    """
    if not folder.exists():
        write_data(task, folder, **SIZES | sizes)
        return
    for name, size in sizes.items():
        path = folder / f"{name.removeprefix('num_')}.jsonl"
        if size != (number := len(read_lines(path))):
            remedy = "leave it out, or name another --directory"
            sys.exit(f"--{name}={size} is not the {number} rows of {path}: {remedy}")


def write_data(
    task, folder, *, num_traces, num_prompts, num_held_out, error_rate=ERROR_RATE
):
    """Writes the files of a task, each by a seed of its own: all of them or none.

    Args:
        task: Module of `zjax.rl.tasks`.
        folder: Directory for `traces.jsonl`, completions of a teacher, with their
            tokens in `traces`; `prompts.jsonl`, to be rewarded; and `held_out.jsonl`,
            prompts of operands that occur together in no other file.
        num_traces: Number of completions.
        num_prompts: Number of prompts to be rewarded.
        num_held_out: Number of held-out prompts.
        error_rate: Share of traces in which the teacher errs, 0 to 1.
    """
    if folder.exists() and any(folder.iterdir()):
        sys.exit(f"{folder} exists already: remove it, or name another")
    # A stage reads what is there: a program that was stopped must leave no part.
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    traces = make_traces(task, num_traces, error_rate)
    write_examples(partial / "traces", traces, "completions")
    write_lines(partial / "prompts.jsonl", task.rows(num_prompts, seed=1))
    held_out = task.rows(num_held_out, seed=2, held_out=True)
    write_lines(partial / "held_out.jsonl", held_out)
    partial.rename(folder)


def make_traces(task, number, error_rate):
    """Makes the traces of a teacher that errs.

    Where the teacher errs, a trace goes on, from a random line, with the solution of
    another prompt. Who learns from it imitates a solver of this error rate, however
    long the training: what is above is left to the rewards.
    """
    draws = random.Random(number)
    rows = zip(task.rows(number, seed=0), task.rows(number, seed=3), strict=True)
    return [
        {
            "prompt": row["prompt"],
            "completion": _lose_thread(task.trace(row), task.trace(other), draws)
            if draws.random() < error_rate
            else task.trace(row),
        }
        for row, other in rows
    ]


def _lose_thread(trace, other, draws):
    """Goes on with another trace from a random line."""
    lines, others = trace.split("\n"), other.split("\n")
    place = draws.randrange(len(lines))
    return "\n".join(lines[:place] + others[min(place, len(others) - 1) :])


def write_pairs(folder, texts):
    """Writes a right and a wrong text of each prompt that has both, as `pairs`.

    Args:
        folder: Directory of the task's files.
        texts: Pairs of a prompt and its texts, each with whether it is right.
    """
    pairs = []
    for prompt, found in texts:
        right, wrong = ([x for x, solved in found if solved == y] for y in (1, 0))
        if right and wrong:
            pairs.append({"prompt": prompt, "chosen": right[0], "rejected": wrong[0]})
    if not pairs:
        sys.exit("no prompt has a right and a wrong text: train the start for longer")
    write_examples(folder / "pairs", pairs, "pairs")


def write_examples(path, rows, kind):
    """Writes records, and their tokens as `zjax data prepare --examples` does."""
    write_lines(path.with_suffix(".jsonl"), rows)
    prepare(
        [path.with_suffix(".jsonl")],
        path,
        examples=kind,
        validation_fraction=VALIDATION_FRACTION,
    )


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def add_sizes(parser):
    """Adds the sizes of `write_data` to the arguments of a program."""
    for name, size in SIZES.items():
        parser.add_argument(f"--{name}", type=int, help=f"default: {size}")


def sizes_of(given):
    """Returns the sizes that a user gave."""
    return {name: x for name in SIZES if (x := getattr(given, name)) is not None}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", choices=tasks.__all__, default="sums")
    parser.add_argument("--output", type=pathlib.Path, default="runs/rl/sums/data")
    add_sizes(parser)
    given = parser.parse_args()
    write_data(getattr(tasks, given.task), given.output, **SIZES | sizes_of(given))


if __name__ == "__main__":
    main()
