"""Command that continues prompts, or answers messages: `zjax generate`."""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import pathlib
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np
from absl import flags
from jax.experimental import multihost_utils
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from zjax.cli import commands
from zjax.cli.connection import connected
from zjax.cli.prompt_file import (
    Prompt,
    PromptFile,
    Prompts,
    Row,
    chats_given,
    rows_given,
    texts_given,
)
from zjax.cli.rollout_lines import RolloutLines, rollout_sampling
from zjax.cli.text_file import TextFile
from zjax.cli.usage import NO_VALUE, Command, flag, integer, number, switch
from zjax.config.flags import changes_given, refuse_flags
from zjax.data.conversations import ANSWERS, Conversation
from zjax.errors import ConfigError, Problem
from zjax.files import local_path
from zjax.generation.generator import Generator, Text
from zjax.generation.sampling import Sampling
from zjax.generation.scheduler import Metrics
from zjax.generation.worker import Served
from zjax.processes.barrier import barrier

_SAMPLING = (
    "max_new_tokens",
    "min_new_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "num_samples",
    "num_logprobs",
    "prompt_logprobs",
    "seed",
)
"""Flags that are settings of `Sampling` under the same names, besides `stop`."""


def generate(given: flags.FlagValues) -> None:
    """Continues a prompt, or answers a message, with the weights of a checkpoint.

    Each prompt of a file gives one line of JSON, `{"prompt": ..., "text": ...}` or
    `{"messages": ...}` with the answer. The results do not depend on the number of
    prompts.
    """
    # Whatever is wrong must be told before the weights are read.
    sampling = read_sampling(given)
    rows = rows_given(given) if given.rollouts else None
    if rows is not None:
        prompts = PromptFile(lambda: (prompt for prompt, _ in rows))
    else:
        prompts = chats_given(given) if given.chat else texts_given(given)
    chat, config = chat_folder(given), commands.generating_settings(given)
    with connected(config) as info:
        generator, weights = commands.open_generator(given, config, chat)
        with generator:
            if rows is not None and generator.has_experts:
                sampling = dataclasses.replace(sampling, experts=True)
            # All prompts are checked before any text is written.
            with flags_named():
                special = {"special_tokens": given.special_tokens}
                generator.check(prompts, sampling, **special)
            if given.output:
                write_lines(generator, prompts, sampling, given, weights, rows)
            else:
                print_lines(generator, prompts, sampling, given, info.process_id)
            if given.num_drafts and info.process_id == 0:
                print(count_drafts(generator.metrics.scheduler), file=sys.stderr)


def count_drafts(metrics: Metrics) -> str:
    """Tells how many drafts were right."""
    return f"drafts: {metrics.num_accepted_drafts:,} of {metrics.num_drafts:,} accepted"


def print_lines(
    generator: Generator,
    prompts: Prompts,
    sampling: Sampling,
    given: flags.FlagValues,
    process_id: int,
) -> None:
    """Prints the texts of all prompts, in process 0."""
    special = {"special_tokens": given.special_tokens}
    given_prompts, shown = itertools.tee(prompts)  # holds the prompts in flight
    found = generator.generate_each(given_prompts, sampling, **special)
    for prompt, texts in zip(shown, found, strict=True):
        for text in texts if process_id == 0 else ():
            line = describe_text(prompt, text.text, as_json=bool(given.file))
            print(line, flush=True)


def read_sampling(given: flags.FlagValues) -> Sampling:
    """Reads how tokens are chosen, or refuses flags out of range."""
    values: dict[str, Any] = {name: given[name].value for name in _SAMPLING}
    values["stop"] = tuple(given.stop)
    with flags_named():
        make = rollout_sampling if given.rollouts else _sampling_of
        sampling = make(given, values)
        # The vocabulary is known with the weights, and is asked then.
        if problems := sampling.problems(vocab_size=sys.maxsize):
            raise ConfigError(*problems)
    return sampling


def _sampling_of(given: flags.FlagValues, values: dict[str, Any]) -> Sampling:
    """Makes settings of texts that are printed, or written to a file."""
    if not given.output:
        names = ["num_logprobs", "prompt_logprobs"]
        refuse_flags(given, names, "has no effect without --output")
    return Sampling(**values)


@contextlib.contextmanager
def flags_named() -> Iterator[None]:
    """Names settings of `Sampling` in errors as the flags that were typed."""
    try:
        yield
    except ConfigError as error:
        problems = [
            dataclasses.replace(problem, field=f"--{problem.field}")
            if problem.field in (*_SAMPLING, "stop")
            else problem
            for problem in error.problems
        ]
        raise ConfigError(*problems) from error


def chat_folder(given: flags.FlagValues) -> str:
    """Directory of the chat template that `--chat` names; empty if it names none."""
    if given.chat in ("", NO_VALUE):
        return ""
    if given.model:
        problem = "has no effect with --model, which has a chat template"
        remedy = "use --chat without a directory"
        raise ConfigError(Problem("--chat", given.chat, problem, remedy))
    return local_path("chat", given.chat)


def origin_of(
    given: flags.FlagValues, sampling: Sampling, weights: str
) -> dict[str, Any]:
    """Lists all that texts of a file depend on."""
    digest = hashlib.sha256(given.prompt.encode())
    if given.file:
        with open(local_path("file", given.file), "rb") as file:
            digest = hashlib.file_digest(file, "sha256")
    # Texts without a number of tokens go on to the longest text.
    ends = {} if sampling.max_new_tokens else {"max_length": given.max_length}
    return ends | {
        "prompts": digest.hexdigest(),
        "weights": weights,
        "settings": changes_given(given),
        "chat": given.chat,
        "text_field": given.text_field,
        "special_tokens": given.special_tokens,
        **dataclasses.asdict(sampling),
    }


def write_lines(
    generator: Generator,
    prompts: Prompts,
    sampling: Sampling,
    given: flags.FlagValues,
    weights: commands.Weights,
    rows: Iterable[tuple[Prompt, Row]] | None = None,
) -> None:
    """Writes the texts of prompts that `--output` lacks, in process 0.

    `rows` have the fields of the records, which `--rollouts` keeps.
    """
    path = pathlib.Path(local_path("output", given.output))
    origin = origin_of(given, sampling, weights.name)
    special, num_samples = given.special_tokens, sampling.num_samples
    with opened(path, origin, num_samples) as (file, num_done):
        left, shown = itertools.tee(itertools.islice(prompts, num_done, None))
        found = generator.generate_each(left, sampling, special_tokens=special)
        encode = encode_texts
        if rows is not None and file is not None:
            fields = (row for _, row in itertools.islice(rows, num_done, None))
            start = weights.step, num_done, file.last_line
            encode = RolloutLines(fields, sampling, *start).encode
        with Progress(len(prompts), num_done, num_samples) as progress:
            for prompt, texts in zip(shown, found, strict=True):
                if file is not None:
                    for line in encode(prompt, texts):
                        file.write(line)
                progress.advance(generator.metrics)


def encode_texts(prompt: Prompt, texts: list[Text]) -> Iterator[bytes]:
    """Yields the lines of the texts of a prompt in a file."""
    for text in texts:
        line = json.dumps(record_of(prompt, text), ensure_ascii=False)
        yield line.encode() + b"\n"


@contextlib.contextmanager
def opened(
    path: pathlib.Path, origin: dict[str, Any], num_samples: int
) -> Iterator[tuple[TextFile | None, int]]:
    """Opens the file of texts in process 0; tells all how many prompts it has."""
    with contextlib.ExitStack() as stack:
        file = None
        # Raises in all processes if the file is refused.
        with barrier("zjax-texts"):
            if jax.process_index() == 0:
                file = stack.enter_context(TextFile(path, origin, num_samples))
        num_done = file.num_prompts if file else 0
        yield file, int(multihost_utils.broadcast_one_to_all(np.int32(num_done)))


def record_of(prompt: Prompt, text: Text) -> dict[str, Any]:
    """Makes the record of a text in a file."""
    record: dict[str, Any] = {"prompt": prompt}
    if isinstance(prompt, Conversation):
        record = {"messages": [*prompt.messages]}
    record |= {
        "text": text.text,
        "sample": text.sample,
        "ids": text.ids,
        "finish_reason": text.finish_reason,
    }
    if text.logprobs is not None:
        record["logprobs"] = text.logprobs
    if text.best is not None:
        record["best"] = text.best
    if text.prompt_logprobs is not None:
        record["prompt_ids"] = text.prompt_ids
        record["prompt_logprobs"] = text.prompt_logprobs
    if text.prompt_best is not None:
        record["prompt_best"] = text.prompt_best
    return record


class Progress:
    """Progress bar on stderr, if that is a terminal."""

    def __init__(self, num_prompts: int, num_done: int, num_samples: int):
        self._num_left = num_prompts - num_done
        self._num_samples, self._start = num_samples, time.monotonic()
        console = Console(stderr=True)
        self._bar = Bar(
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=console,
            disable=not console.is_terminal or jax.process_index() != 0,
        )
        self._task = self._bar.add_task("", total=num_prompts, completed=num_done)

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(self, *reason: object) -> None:
        self._bar.stop()

    def advance(self, served: Served) -> None:
        """Shows one more prompt, and what was written so far."""
        self._num_left -= 1
        speed = served.num_written / (time.monotonic() - self._start)
        left = self._num_left * self._num_samples
        text = f"{speed:,.0f} tokens/s, {left:,} rows left"
        if served.scheduler.num_drafts:
            text += f", {count_drafts(served.scheduler)}"
        self._bar.update(self._task, advance=1, description=text)


def describe_text(given: Prompt, text: str, *, as_json: bool) -> str:
    """Formats a prompt with the generated text, as plain text or as a line of JSON."""
    if isinstance(given, Conversation):
        answer = {"role": ANSWERS, "content": text}
        shown, record = text, {"messages": [*given.messages, answer]}
    else:
        shown, record = given + text, {"prompt": given, "text": given + text}
    return json.dumps(record, ensure_ascii=False) if as_json else shown


GENERATE = Command(
    generate,
    "Continues prompts with the weights of a checkpoint.",
    'zjax generate --config=quickstart --prompt="def "\n'
    "zjax generate --run=runs/quickstart --file=prompts.txt\n"
    "zjax generate --model=checkpoints/Qwen3-8B --file=a.jsonl --output=b.jsonl\n"
    'zjax generate --run=runs/chat --chat --prompt="Who are you?"',
    (
        commands.RUN,
        commands.PART,
        commands.STEP,
        commands.MODEL,
        flag("prompt", "Text to continue.", "def "),
        flag(
            "file",
            "Text with a prompt a line, JSON Lines or Parquet; prints a line of JSON "
            "for each.",
        ),
        flag("text_field", "Field of the prompt in JSON Lines or Parquet.", "prompt"),
        flag("output", "JSON Lines to write, or to go on with, a line for a text."),
        switch(
            "rollouts",
            "Writes lines that training reads: with log-probabilities, and all fields "
            "of each record.",
        ),
        commands.chat_flag(
            "Takes prompts for messages, and answers them through the chat template of "
            "the data, or of this checkpoint."
        ),
        commands.SPECIAL_TOKENS,
        integer("max_new_tokens", "Tokens to add; 0 fills the context.", 0),
        integer("min_new_tokens", "Tokens before a text may end.", 0),
        number("temperature", "0 takes the most likely token.", 0.8),
        integer(
            "top_k",
            "Most likely tokens to draw from; 0 is all, as with --rollouts.",
            40,
            lower_bound=0,
        ),
        number("top_p", "Probability of the tokens to draw from.", 1.0),
        number("min_p", "Least probability to draw, over the largest.", 0.0),
        number("repetition_penalty", "Above 1 avoids tokens that came before.", 1.0),
        number("presence_penalty", "Taken from logits of tokens in the text.", 0.0),
        number("frequency_penalty", "Taken from logits for each occurrence.", 0.0),
        flag(
            "stop",
            "String that ends a text; may be repeated.",
            [],
            flags.DEFINE_multi_string,
        ),
        integer("num_samples", "Texts of a prompt.", 1),
        integer(
            "num_logprobs",
            "Likely tokens of each place to write beside the chosen one.",
            None,
        ),
        integer(
            "prompt_logprobs",
            "Likely tokens of each place of the prompt to write beside the prompt's "
            "token; --max_new_tokens=0 then writes no text.",
            None,
        ),
        integer("seed", "Seed of the draws.", 0, lower_bound=0),
        commands.MAX_ROWS,
        commands.MAX_LENGTH,
        commands.WEIGHT_DTYPE,
        commands.CACHE_DTYPE,
        commands.NUM_DRAFTS,
    ),
)
