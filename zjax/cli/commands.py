"""Commands that read checkpoints: generate, evaluate, export, rewind and check.

`zjax generate`, `evaluate` and `export` use the weights of `--part` at `--step`, by
default the evaluation weights of the newest checkpoint, and print which. `--run` names
the directory of a run, whose checkpoints hold the settings.
"""

import argparse
import json
import math
import os
import pathlib
import sys
from typing import NoReturn

import jax
from absl import flags, logging

from zjax.checkpoint import steps
from zjax.checkpoint.export import export_huggingface, export_peft, export_safetensors
from zjax.checkpoint.start import names_huggingface, saved_parts, settings_of_weights
from zjax.checkpoint.store import Store
from zjax.checkpoint.verify import describe_verdicts, exit_status, inspect_steps
from zjax.cli.usage import (
    NO_VALUE,
    Command,
    OwnFlag,
    choice,
    flag,
    integer,
    number,
    switch,
)
from zjax.config.flags import (
    FILE_FLAGS,
    changes_given,
    config_from_flags,
    refuse_flags,
)
from zjax.config.load import load_config
from zjax.data import tables
from zjax.data.conversations import ANSWERS, Conversation
from zjax.data.documents import JSON_SUFFIXES, read_conversations
from zjax.data.prompts import as_talk
from zjax.errors import ConfigError, Problem
from zjax.files import local_path, read_text
from zjax.observe.progress import describe_values
from zjax.processes import hold
from zjax.run.ending import lowest_evaluation
from zjax.run.resume import STARTED_FROM
from zjax.run.trainer import Trainer
from zjax.settings.choices import value_at
from zjax.settings.convert import current
from zjax.settings.schema import Config
from zjax.stack.forward import AUXILIARY_LOSS
from zjax.train.average import PARTS, choose_part, parts_of

DTYPES = ("float32", "bfloat16", "float16")
RUN = flag("run", "Directory of a run, which has its settings.")
PART = choice(
    "part", "Which weights; auto takes averaged ones.", "auto", enum_values=PARTS
)
STEP = flag("step", "Checkpoint: latest, best or a number.", "latest")
SPECIAL_TOKENS = switch(
    "special_tokens", "Names of special tokens in a text are these tokens."
)
CONVERSATION_SUFFIXES = (*JSON_SUFFIXES, *tables.SUFFIXES)
"""Suffixes of files that hold conversations instead of texts."""
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


def restored(config: Config, given: flags.FlagValues) -> tuple[Trainer, str]:
    """Restores a trainer from a checkpoint, and picks the kind of weights to use."""
    # A trainer with a given step creates no directory.
    if names_huggingface(given.run):
        trainer = Trainer(config, step=0)
    else:  # the initial weights of the run may be gone
        step = chosen_step(open_store(config.directory), given.step)
        # A setting of adapters would turn them on in a run without adapters.
        start = {x: unset for x, unset in STARTED_FROM.items() if value_at(config, x)}
        trainer = Trainer(load_config(config, start), step=step)
    part = choose_part(given.part, parts_of(trainer.state))
    if jax.process_index() == 0:
        print(f"weights: {part} of step {trainer.step}", file=sys.stderr)
    return trainer, part


def generate(given: flags.FlagValues) -> None:
    """Continues a prompt, or answers a message, with the weights of a checkpoint.

    Each prompt of a file gives one line of JSON, `{"prompt": ..., "text": ...}` or
    `{"messages": ...}` with the answer. The results do not depend on the number of
    prompts.
    """
    check_sampling(given.temperature, given.top_p)
    prompts = chats_given(given) if given.chat else texts_given(given)
    is_named = given.chat not in ("", NO_VALUE)
    chat = local_path("chat", given.chat) if is_named else ""
    trainer, part = restored(settings(given), given)
    # All prompts are checked before any text is written.
    encoded = trainer.encode_prompts(
        prompts, chat=chat, special_tokens=given.special_tokens
    )
    for prompt, ids in zip(prompts, encoded, strict=True):
        text = trainer.generate(
            ids,
            chat=chat,
            max_new_tokens=given.max_new_tokens,
            temperature=given.temperature,
            top_k=given.top_k,
            top_p=given.top_p,
            seed=given.seed,
            part=part,
        )
        print(describe_text(prompt, text, as_json=bool(given.file)), flush=True)


GENERATE = Command(
    generate,
    "Continues a prompt with the weights of a checkpoint.",
    'zjax generate --config=quickstart --prompt="def "\n'
    "zjax generate --run=runs/quickstart --file=prompts.txt\n"
    'zjax generate --run=runs/chat --chat --prompt="Who are you?"',
    (
        RUN,
        PART,
        STEP,
        flag("prompt", "Text to continue.", "def "),
        flag("file", "Text with a prompt a line; prints a line of JSON for each."),
        chat_flag(
            "Takes prompts for messages, and answers them through the chat template of "
            "the data, or of this checkpoint."
        ),
        SPECIAL_TOKENS,
        integer("max_new_tokens", "Tokens to add; 0 fills the context.", 0),
        number("temperature", "0 takes the most likely token.", 0.8),
        integer(
            "top_k", "Most likely tokens to draw from; 0 is all.", 40, lower_bound=0
        ),
        number("top_p", "Probability of the tokens to draw from.", 1.0),
        integer("seed", "Seed of the draws.", 0, lower_bound=0),
    ),
)


def texts_given(given: flags.FlagValues) -> list[str]:
    """Reads the texts to continue: the lines of `--file`, or `--prompt`."""
    if not given.file:
        return [given.prompt]
    refuse_flags(given, ["prompt"], "has no effect with --file")
    return read_prompts(given.file)


def chats_given(given: flags.FlagValues) -> list[Conversation]:
    """Reads the conversations to answer.

    `--prompt`, or each line of a text file, is the message of a user. JSON Lines and
    tables hold conversations of several messages.
    """
    problem = "has no effect with --chat, whose template has them"
    refuse_flags(given, ["special_tokens"], problem)
    if not given.file and not given["prompt"].present:
        remedy = "write it as --prompt, or several in a --file"
        raise ConfigError(Problem("--chat", given.chat, "has no message", remedy))
    if pathlib.Path(given.file).suffix.lower() in CONVERSATION_SUFFIXES:
        refuse_flags(given, ["prompt"], "has no effect with --file")
        documents = read_conversations(
            pathlib.Path(local_path("file", given.file)), set()
        )
        return [document.talk for document in documents if document.talk is not None]
    return [as_talk([{"role": "user", "content": text}]) for text in texts_given(given)]


def describe_text(given: str | Conversation, text: str, *, as_json: bool) -> str:
    """Formats a prompt with the generated text, as plain text or as a line of JSON."""
    if isinstance(given, Conversation):
        answer = {"role": ANSWERS, "content": text}
        shown, record = text, {"messages": [*given.messages, answer]}
    else:
        shown, record = given + text, {"prompt": given, "text": given + text}
    return json.dumps(record, ensure_ascii=False) if as_json else shown


def read_prompts(path: str) -> list[str]:
    """Reads the prompts of `--file`, one on each line; no line may be empty."""
    path = local_path("file", path)
    try:
        lines = read_text(path).splitlines()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        problem, remedy = f"cannot be read ({why})", "give a text with a prompt a line"
        raise ConfigError(Problem("--file", path, problem, remedy)) from error
    empty = [number for number, line in enumerate(lines, 1) if not line.strip()]
    if empty or not lines:
        problem = f"has no prompt on line {empty[0] if empty else 1}"
        raise ConfigError(Problem("--file", path, problem, "write one, or remove it"))
    return lines


def check_sampling(temperature: float, top_p: float) -> None:
    """Refuses sampling flags out of range, before weights are read."""
    problems = []
    if not 0 <= temperature < math.inf:
        remedy = "use 0 or more"
        problems += [Problem("--temperature", temperature, "is out of range", remedy)]
    if not 0 < top_p <= 1:
        remedy = "use more than 0, and at most 1"
        problems += [Problem("--top_p", top_p, "is out of range", remedy)]
    if problems:
        raise ConfigError(*problems)


EVALUATE_FLAGS = (
    flag("run", "Directory of a run, or of a Hugging Face checkpoint."),
    PART,
    STEP,
)


def evaluate(config: Config, given: flags.FlagValues) -> None:
    """Prints loss and metrics of a checkpoint on the evaluation data.

    Perplexity is exp(cross-entropy) in nats per token. It is printed for decoders
    without `model.z_loss`, and the auxiliary loss of the router is subtracted first.
    """
    if not config.evaluation.num_batches:
        problem, remedy = "evaluates nothing", "use a number of batches, or -1 for all"
        raise ConfigError(Problem("evaluation.num_batches", 0, problem, remedy))
    trainer, part = restored(config, given)
    values = trainer.evaluate(part)
    entropy = values["eval_loss"] - values.get(f"eval_{AUXILIARY_LOSS}", 0.0)
    is_of_text = config.model.kind == "decoder" and not config.model.z_loss
    if is_of_text and entropy < _MAX_EXPONENT:
        values["eval_perplexity"] = math.exp(entropy)
    if jax.process_index() == 0:
        of = f"weights {part} of step {trainer.step}"
        print("  ".join([of, *describe_values(values)]))
        print(json.dumps({"part": part, "step": trainer.step, **values}))


_FORMATS = {
    "safetensors": ("model.safetensors", export_safetensors),
    "hf": ("huggingface", export_huggingface),
    "peft": ("adapter", export_peft),
}
"""Default name of the output, and the function that writes it, by format."""


def export(given: flags.FlagValues) -> None:
    """Writes the weights of a checkpoint: safetensors, for transformers or for PEFT."""
    config = settings(given)
    name, write = _FORMATS[given.format]
    output = local_path("output", given.output or os.path.join(config.directory, name))
    store = open_store(config.directory)
    step = chosen_step(store, given.step)
    part = choose_part(given.part, saved_parts(store.source(step).entries))
    size = write(store, output, part=part, step=step, dtype=given.dtype)
    print(f"wrote {output}, {size:,} bytes: weights {part} of step {step}")


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
            "One file with the names of zjax, or a folder for transformers; "
            "peft has adapters alone.",
            "safetensors",
            enum_values=[*_FORMATS],
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
    store.extra(step)  # raises if there is no such step
    with hold(directory):
        moved = steps.set_aside(store.directory, step)
    for path in moved:
        print(f"set aside: {path}")
    print(f"`zjax train` goes on from step {step}; remove what you do not need")


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
    print(describe_verdicts(verdicts))
    sys.exit(exit_status(verdicts))


CHECK = Command(
    check,
    "Says whether the checkpoints of a run are as they were saved.",
    "zjax check runs/quickstart",
    arguments="DIRECTORY",
)
