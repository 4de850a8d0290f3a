"""Commands that read checkpoints: `zjax generate`, `evaluate`, `export` and `check`.

The first three use the weights of `--part` at `--step`, by default the evaluation
weights of the newest checkpoint, and print which.
"""

import argparse
import json
import pathlib
import sys
from typing import NoReturn

import jax
from absl import flags

from zjax.checkpoint.average import saved_parts
from zjax.checkpoint.export import export_safetensors
from zjax.checkpoint.inspect import describe_verdicts, inspect_steps, is_intact
from zjax.checkpoint.store import Store
from zjax.config.flags import config_from_flags
from zjax.config.load import load_config
from zjax.config.paths import local_path
from zjax.config.schema import Config
from zjax.errors import ConfigError, Problem
from zjax.huggingface.export import export_huggingface
from zjax.observe.progress import describe_values
from zjax.train.average import choose_part, parts_of
from zjax.trainer import Trainer


def restored(config: Config) -> tuple[Trainer, str]:
    """A trainer restored from a checkpoint, and the kind of weights to use."""
    config = load_config(config, "checkpoint.resume=required")
    trainer = Trainer(config, step=flags.FLAGS.step)
    part = choose_part(flags.FLAGS.part, parts_of(trainer.state))
    if jax.process_index() == 0:
        print(f"weights: {part} of step {trainer.step}", file=sys.stderr)
    return trainer, part


def generate() -> None:
    """Continues the prompt with a checkpoint."""
    trainer, part = restored(config_from_flags())
    text = trainer.generate(
        flags.FLAGS.prompt,
        max_new_tokens=flags.FLAGS.max_new_tokens,
        temperature=flags.FLAGS.temperature,
        part=part,
    )
    print(text)


def evaluate(config: Config) -> None:
    """Prints loss and metrics of a checkpoint on the evaluation data.

    Raises:
        ConfigError: The config evaluates nothing, or the checkpoint lacks the weights.
    """
    if not config.evaluation.num_batches:
        problem, remedy = "evaluates nothing", "use a number of batches, or -1 for all"
        raise ConfigError(Problem("evaluation.num_batches", 0, problem, remedy))
    trainer, part = restored(config)
    values = trainer.evaluate(part)
    if jax.process_index() == 0:
        of = f"weights {part} of step {trainer.step}"
        print("  ".join([of, *describe_values(values)]))
        print(json.dumps({"part": part, "step": trainer.step, **values}))


def export() -> None:
    """Writes the weights of a checkpoint as safetensors, or for transformers."""
    config = config_from_flags()
    folder = pathlib.Path(config.directory)
    name, write = "model.safetensors", export_safetensors
    if flags.FLAGS.format == "hf":
        name, write = "huggingface", export_huggingface
    output = local_path("output", flags.FLAGS.output or folder / name)
    store = Store(str(folder / "checkpoints"))
    step, dtype = flags.FLAGS.step, flags.FLAGS.dtype
    part = choose_part(flags.FLAGS.part, saved_parts(store.entries(step)))
    size = write(store, output, part=part, step=step, dtype=dtype)
    step = store.latest() if step is None else step
    print(f"wrote {output}, {size:,} bytes: weights {part} of step {step}")


class Parser(argparse.ArgumentParser):
    """An argument parser that reports errors as zjax does."""

    def error(self, message: str) -> NoReturn:
        """Raises the parser's message as a `ConfigError`."""
        usage = self.format_usage().partition(": ")[2].strip()
        problem = f"cannot be read ({message})"
        raise ConfigError(Problem("command", self.prog, problem, f"use {usage}"))


def check() -> None:
    """Reads the checkpoints of a run; exits with status 1 unless all are intact."""
    parser = Parser("zjax check", allow_abbrev=False)
    parser.add_argument("directory", help="of a run, or its checkpoints")
    verdicts = inspect_steps(parser.parse_args(sys.argv[2:]).directory)
    print(describe_verdicts(verdicts))
    sys.exit(0 if is_intact(verdicts) else 1)
