"""Commands that read checkpoints: evaluate, export, rewind and check.

`zjax generate`, `serve`, `evaluate` and `export` use the weights of `--part` at
`--step`, by default the evaluation weights of the newest checkpoint, and print which.
`--run` names the directory of a run, whose checkpoints hold the settings.
"""

import argparse
import itertools
import json
import math
import os
import sys
from typing import Any, NamedTuple, NoReturn

import jax
from absl import flags, logging

from zjax.checkpoint import steps
from zjax.checkpoint.export import export_huggingface, export_peft, export_safetensors
from zjax.checkpoint.export_gguf import export_gguf
from zjax.checkpoint.start import names_huggingface, saved_parts, settings_of_weights
from zjax.checkpoint.store import Store
from zjax.checkpoint.verify import describe_verdicts, exit_status, inspect_steps
from zjax.cli.usage import (
    Command,
    OwnFlag,
    choice,
    flag,
    integer,
    switch,
)
from zjax.config.flags import (
    FILE_FLAGS,
    changes_given,
    config_from_flags,
    refuse_flags,
    settings_given,
)
from zjax.config.load import load_config
from zjax.data.prompts import make_prompts
from zjax.errors import ConfigError, Problem
from zjax.files import local_path
from zjax.generation.dtypes import CACHE_DTYPES
from zjax.generation.generator import Generator
from zjax.generation.loading import settings_of_huggingface
from zjax.observe.progress import describe_values
from zjax.ops.narrow import WEIGHT_DTYPES
from zjax.processes import hold
from zjax.rl import rollout_files
from zjax.rl.preference_trainer import PreferenceTrainer
from zjax.run.ending import lowest_evaluation
from zjax.run.trainer import Trainer
from zjax.run.weights import fits_unsplit, open_run, without_start
from zjax.settings.convert import current
from zjax.settings.preference import Preference
from zjax.settings.schema import Config
from zjax.stack.forward import AUXILIARY_LOSS
from zjax.train.average import PARTS, Part, choose_part, parts_of, with_part
from zjax.weights.gguf_file import TYPES
from zjax.weights.quantized import NAMES

DTYPES = ("float32", "bfloat16", "float16")
RUN = flag("run", "Directory of a run, which has its settings.")
MODEL = flag("model", "Directory of a Hugging Face checkpoint, or a GGUF file.")
MAX_ROWS = integer("max_rows", "Texts that a data shard writes at once.", 64)
MAX_LENGTH = integer(
    "max_length", "Tokens of a prompt with a text; 0 is what the model allows.", 0
)
WEIGHT_DTYPE = choice(
    "weight_dtype",
    "Codes of matrices of blocks; compute stores them as they are.",
    "compute",
    enum_values=WEIGHT_DTYPES,
)
CACHE_DTYPE = choice(
    "cache_dtype", "Dtype of keys and values.", "compute", enum_values=CACHE_DTYPES
)
NUM_DRAFTS = integer(
    "num_drafts",
    "Tokens that repeating texts read ahead in a pass, up to 15; 0 is none.",
    0,
)
DTYPES_STORED = "weight_dtype", "cache_dtype"
"""Flags of how a generator stores weights and keys."""
PART = choice(
    "part", "Which weights; auto takes averaged ones.", "auto", enum_values=PARTS
)
STEP = flag("step", "Checkpoint: latest, best or a number.", "latest")
SPECIAL_TOKENS = switch(
    "special_tokens", "Names of special tokens in a text are these tokens."
)
_MAX_DIGITS = 18
"""Digits of a step that fits an int64."""
_MAX_EXPONENT = 700
"""Bound of losses whose exponential is a finite number."""


def chat_flag(text: str) -> OwnFlag:
    """Describes `--chat`, whose value may be left out, by a help text."""
    settings = {"parser": flags.ArgumentParser(), "boolean": True}
    return flag("chat", text, define=flags.DEFINE, **settings)


def settings(given: flags.FlagValues) -> Config:
    """Reads the settings of the run that `--run`, or `--config` with others, names."""
    if not given.run:
        return config_from_flags(given)
    refuse_flags(given, FILE_FLAGS, "has no effect with --run, which has settings")
    directory = local_path("run", given.run)
    store = open_store(directory)
    step = chosen_step(store, given.step)
    saved = store.extra(step).get("config")
    if not saved:
        remedy = "give its settings by --config"
        raise ConfigError(Problem("run", directory, "holds no settings", remedy))
    # The folder may have moved, and the run may have had more or fewer devices.
    here = {"directory": directory, "checkpoint.resume": "auto", "microbatch_size": 0}
    return load_config(current(saved), here, *changes_given(given))


def settings_to_evaluate(given: flags.FlagValues) -> Config:
    """Reads settings as `settings` does, or makes some for Hugging Face weights."""
    if not names_huggingface(given.run):
        return settings(given)
    problem = "has no effect on the checkpoint that --run names"
    refuse_flags(given, FILE_FLAGS, problem)
    refuse_flags(given, ["step", "part"], problem)
    directory = local_path("run", given.run)
    start = settings_of_weights(directory)
    # Evaluation updates nothing: a rule without moments needs the least memory.
    start |= {"optimizer.rule": {"kind": "sgd", "b1": 0.0}}
    return load_config({}, start, *changes_given(given))


def chosen_step(store: Store, given: str) -> int:
    """Step of the checkpoint that `--step` names: latest, best or a number."""
    if given == "latest":
        return store.resolve(None)
    if given == "best":
        best = store.best()
        if best is None:
            directory = str(store.directory)
            problem = f"has no checkpoint in {directory} with a held-out loss"
            remedy = "use latest, or a number"
            raise ConfigError(Problem("--step", given, problem, remedy))
        _report_unsaved_best(store, best)
        return best
    if not (given.isascii() and given.isdigit() and len(given) <= _MAX_DIGITS):
        remedy = "use latest, best or a number"
        raise ConfigError(Problem("--step", given, "is not a step", remedy))
    return int(given)


def _report_unsaved_best(store: Store, best: int) -> None:
    """Warns if an evaluation had a lower loss than every stored checkpoint."""
    lowest = lowest_evaluation(store.extra())
    if lowest is None or lowest[0] == best or jax.process_index() != 0:
        return
    text = "--step=best takes step %s, the best checkpoint that is kept: the lowest "
    text += "eval_loss of the run was %.6g at step %s, which was not saved or not "
    text += "kept; set evaluation.early_stopping, which saves at each new best, or "
    text += "make checkpoint.every_steps divide evaluation.every_steps"
    logging.warning(text, best, lowest[1], lowest[0])


def open_store(directory: str) -> Store:
    """Opens the checkpoints of the run in a directory."""
    return Store(os.path.join(directory, "checkpoints"))


def trainer_of(preference: Preference | None) -> type[Trainer]:
    """Returns the trainer that reads an objective."""
    return Trainer if preference is None else PreferenceTrainer


def restored(config: Config, given: flags.FlagValues) -> tuple[Trainer, str]:
    """Restores a trainer from a checkpoint, and picks the kind of weights to use."""
    # A trainer with a given step creates no directory.
    if names_huggingface(given.run):
        trainer = trainer_of(config.preference)(config, step=0)
    else:
        step = chosen_step(open_store(config.directory), given.step)
        kind = trainer_of(config.preference)
        # A reference that is no longer stored is computed from the start of the run.
        if config.preference is None or not config.preference.reads_reference:
            config = without_start(config)
        trainer = kind(config, step=step)
    part = choose_part(given.part, parts_of(trainer.state))
    report_weights(part, trainer.step)
    return trainer, part


def report_weights(part: Part, step: int) -> None:
    """Prints which weights of a checkpoint a command uses."""
    if jax.process_index() == 0:
        print(f"weights: {part} of step {step}", file=sys.stderr)


def generating_settings(given: flags.FlagValues) -> Config:
    """Reads the settings of a run that writes text, or of a Hugging Face checkpoint."""
    if not given.model:
        return settings(given)
    named = ["run", "part", "step", *FILE_FLAGS, *settings_given(given)]
    refuse_flags(given, named, "has no effect with --model")
    return settings_of_huggingface(local_path("model", given.model))


class Weights(NamedTuple):
    """Name of the weights that write texts, and the steps of the training."""

    name: str
    step: int = 0


def open_generator(
    given: flags.FlagValues, config: Config, chat: str = ""
) -> tuple[Generator, Weights]:
    """Opens a generator of a run, or of a Hugging Face checkpoint; names the weights.

    `chat` is a directory with a chat template, in place of the template of a run.
    """
    dtypes = {x: given[x].value for x in DTYPES_STORED}
    # Texts of other dtypes are other texts.
    changed = {name: x for name, x in dtypes.items() if x != "compute"}
    narrow = "".join(f", {name}={x}" for name, x in changed.items())
    names = "max_rows", "max_length", "num_drafts"
    how: dict[str, Any] = {x: given[x].value for x in names} | dtypes
    if given.num_drafts and jax.process_index() == 0:
        print(describe_drafts(given.num_drafts), file=sys.stderr)
    if given.model:
        directory = local_path("model", given.model)
        return Generator(directory, **how), Weights(f"{directory}{narrow}")
    prompts = make_prompts(config.data, config.model.vocab_size, chat)
    if fits_unsplit(config):
        step = chosen_step(open_store(config.directory), given.step)
        opened, part = open_run(config, given.part, step, prompts)
        report_weights(part, step)
        generator = Generator(opened, **how)
    else:  # the executor of a run splits weights, or stores them off the devices
        trainer, part = restored(config, given)
        step, state = trainer.step, with_part(trainer.state, part)
        generator = Generator(trainer.run, state, prompts=prompts, **how)
    name = f"{part} of step {step} in {config.directory}{narrow}"
    return generator, Weights(name, step)


def describe_drafts(num_drafts: int) -> str:
    """Tells what `--num_drafts` does."""
    return (
        f"drafts: a pass reads up to {num_drafts} more tokens of each text, copied "
        "from the text or from others of the prompt, while texts repeat; the texts "
        "are those without drafts, but for rounding"
    )


EVALUATE_FLAGS = (
    flag("run", "Directory of a run, or of a Hugging Face checkpoint; or a GGUF file."),
    PART,
    STEP,
)


def evaluate(config: Config, given: flags.FlagValues) -> None:
    """Prints loss and metrics of a checkpoint on the evaluation data.

    Perplexity is exp(cross-entropy) in nats per token. It is printed for decoders
    without `model.z_loss` and `preference`, and the auxiliary loss of the router is
    subtracted first.
    """
    if not config.evaluation.num_batches:
        problem, remedy = "evaluates nothing", "use a number of batches, or -1 for all"
        raise ConfigError(Problem("evaluation.num_batches", 0, problem, remedy))
    trainer, part = restored(config, given)
    values = trainer.evaluate(part)
    entropy = values["eval_loss"] - values.get(f"eval_{AUXILIARY_LOSS}", 0.0)
    is_of_text = config.model.kind == "decoder" and not config.model.z_loss
    is_of_text &= config.preference is None
    if is_of_text and entropy < _MAX_EXPONENT:
        values["eval_perplexity"] = math.exp(entropy)
    if jax.process_index() == 0:
        of = f"weights {part} of step {trainer.step}"
        print("  ".join([of, *describe_values(values)]))
        print(json.dumps({"part": part, "step": trainer.step, **values}))


_FORMATS = {
    "safetensors": ("model.safetensors", export_safetensors),
    "hf": ("huggingface", export_huggingface),
    "gguf": ("model.gguf", export_gguf),
    "peft": ("adapter", export_peft),
}
"""Default name of the output, and the function that writes it, by format."""
_QUANTIZED = {"hf": NAMES, "gguf": TYPES}
"""Layouts of quantised matrices, by format."""


def export(given: flags.FlagValues) -> None:
    """Writes the weights of a checkpoint for transformers, llama.cpp, PEFT or zjax."""
    check_layout(given.format, given.quantize)
    config = settings(given)
    name, write = _FORMATS[given.format]
    output = local_path("output", given.output or os.path.join(config.directory, name))
    store = open_store(config.directory)
    step = chosen_step(store, given.step)
    part = choose_part(given.part, saved_parts(store.source(step).entries))
    how = {"part": part, "step": step, "dtype": given.dtype}
    if given.quantize:
        how["quantize"] = given.quantize
    size = write(store, output, **how)
    print(f"wrote {output}, {size:,} bytes: weights {part} of step {step}")


def check_layout(kind: str, quantize: str) -> None:
    """Refuses a layout of quantised matrices that a format of exports lacks."""
    known = _QUANTIZED.get(kind, ())
    if quantize and quantize not in known:
        problem = f"is no layout of --format={kind}"
        remedy = "use --format=hf, or leave it out"
        if known:
            remedy = f"use one of {', '.join(known)}"
        raise ConfigError(Problem("--quantize", quantize, problem, remedy))


EXPORT = Command(
    export,
    "Writes the weights of a checkpoint as safetensors.",
    "zjax export --config=quickstart --output=model.safetensors",
    (
        RUN,
        PART,
        STEP,
        flag("output", "File or folder to write; in the folder of the run by default."),
        choice(
            "dtype",
            "Dtype of the weights; theirs by default.",
            enum_values=["", *DTYPES],
        ),
        choice(
            "format",
            "One file with the names of zjax, a folder for transformers, or one file "
            "for llama.cpp; peft has adapters alone.",
            "safetensors",
            enum_values=[*_FORMATS],
        ),
        choice(
            "quantize",
            "Layout of quantised matrices; none by default.",
            enum_values=["", *dict.fromkeys(itertools.chain(*_QUANTIZED.values()))],
        ),
    ),
)


class Parser(argparse.ArgumentParser):
    """Argument parser that raises errors as `ConfigError`."""

    def error(self, message: str) -> NoReturn:
        """Raises the parser's message as a `ConfigError`."""
        usage = self.format_usage().partition(": ")[2].strip()
        problem = f"cannot be read ({message})"
        raise ConfigError(Problem("command", self.prog, problem, f"use {usage}"))


def rewind(given: flags.FlagValues) -> None:
    """Sets aside the checkpoints of a run after a chosen step."""
    directory = local_path("run", given.run)
    store = open_store(directory)
    if given.step == "latest":
        problem = "is where a run goes on already"
        raise ConfigError(Problem("--step", "latest", problem, "use best or a number"))
    step = chosen_step(store, given.step)
    extra = store.extra(step)  # raises if there is no such step
    with hold(directory):
        moved = steps.set_aside(store.directory, step)
        moved += rollout_files.set_aside(store.directory.parent, step)
    for path in moved:
        print(f"set aside: {path}")
    command = "rl" if current(extra.get("config", {})).get("rl") else "train"
    print(f"`zjax {command}` goes on from step {step}; remove what you do not need")


REWIND = Command(
    rewind,
    "Sets later checkpoints aside, so that a run goes on from a chosen one.",
    "zjax rewind --run=runs/quickstart --step=1000",
    (RUN, flag("step", "Checkpoint to go on from: best or a number.", "latest")),
    has_settings=False,
)


def check(given: flags.FlagValues) -> None:
    """Verifies the checkpoints of a run, and exits with a status by the verdict."""
    parser = Parser("zjax check", allow_abbrev=False)
    parser.add_argument("directory", help="of a run, or its checkpoints")
    verdicts = inspect_steps(parser.parse_args(sys.argv[2:]).directory)
    verdicts = [*map(rollout_files.inspect, verdicts)]
    print(describe_verdicts(verdicts))
    sys.exit(exit_status(verdicts))


CHECK = Command(
    check,
    "Says whether the checkpoints of a run are as they were saved.",
    "zjax check runs/quickstart",
    arguments="DIRECTORY",
)
