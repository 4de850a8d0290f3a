"""Report card: how many texts of held-out prompts are right, with samples."""

import json
import zlib

import zjax
from zjax.files import new_file

NUM_SAMPLES = 8
NUM_SHOWN = 3
MAX_NEW_TOKENS = 40
"""Tokens of the longest solution, which are those of countdown."""
MAX_ROWS = 1024
"""Texts at once: rows of a small model cost next to nothing on a GPU."""


def draw(trainer, prompts, *, seed=0, num_samples=NUM_SAMPLES):
    """Draws several texts of each prompt from the weights of a trainer.

    Each prompt has draws of its own, the same for all weights.

    Returns:
        List of texts by prompt.
    """
    sampling = zjax.Sampling(
        max_new_tokens=MAX_NEW_TOKENS,
        temperature=1.0,
        num_samples=num_samples,
    )
    seeds = [zlib.crc32(f"{seed} {number}".encode()) for number in range(len(prompts))]
    max_rows = min(MAX_ROWS, num_samples * len(prompts))
    with zjax.Generator(trainer.run, trainer.state, max_rows=max_rows) as generator:
        texts = generator.generate(prompts, sampling, seeds=seeds)
    found = [[] for _ in prompts]
    for text in texts:
        found[text.prompt].append(text.text)
    return found


def solve(trainer, task, rows, **options):
    """Draws texts of the prompts of a task, and verifies them.

    Returns:
        Pairs of a prompt and its texts, each with a reward of 1 or 0.
    """
    drawn = draw(trainer, [row["prompt"] for row in rows], **options)
    return [
        (row["prompt"], [(text, task.reward(completion=text, **row)) for text in texts])
        for row, texts in zip(rows, drawn, strict=True)
    ]


def pass_rates(texts):
    """Share of texts that are right, and of prompts with one right text or more."""
    solved = [[reward for _, reward in found] for _, found in texts]
    flat = [reward for found in solved for reward in found]
    return sum(flat) / len(flat), sum(map(max, solved)) / len(solved)


class Card:
    """Rates of each stage with some samples, in a file of JSON.

    A stage that the file has is not examined again.

    Args:
        path: The file.
        task: Module of `zjax.rl.tasks`.
        rows: Held-out rows of the task.
    """

    def __init__(self, path, task, rows):
        self._path, self._task, self._rows = path, task, rows
        self.stages = json.loads(path.read_text()) if path.exists() else {}

    def examine(self, stage, trainer):
        """Draws texts of the held-out prompts, and writes what they show."""
        if stage in self.stages:
            return
        texts = solve(trainer, self._task, self._rows)
        each, any_of = pass_rates(texts)
        samples = [(prompt, *found[0]) for prompt, found in texts[:NUM_SHOWN]]
        self.stages[stage] = {
            "pass_at_1": each,
            f"pass_at_{NUM_SAMPLES}": any_of,
            "samples": samples,
        }
        # A program that is stopped leaves the card before, and no part of one.
        with new_file(self._path) as partial:
            partial.write_text(json.dumps(self.stages, indent=1))

    def show(self):
        """Prints the rates of each stage, and the first text of some prompts."""
        print(f"\n{'held-out prompts':24}  pass@1  pass@{NUM_SAMPLES}")
        for stage, found in self.stages.items():
            rates = found["pass_at_1"], found[f"pass_at_{NUM_SAMPLES}"]
            print(f"{stage:24}  {rates[0]:6.1%}  {rates[1]:6.1%}")
        for stage, found in self.stages.items():
            for prompt, text, reward in found["samples"]:
                print(f"{stage}, {'right' if reward else 'wrong'}: {prompt + text!r}")
