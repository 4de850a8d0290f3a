"""Prompts that a command line names: one, or each line or record of a file."""

import io
import pathlib
from collections.abc import Callable, Iterator, Sequence

from absl import flags

from zjax.config.flags import refuse_flags
from zjax.data import tables
from zjax.data.conversations import Conversation
from zjax.data.documents import JSON_SUFFIXES, read_conversations, read_documents
from zjax.data.prompts import as_talk
from zjax.errors import ConfigError, Problem
from zjax.files import local_path, read_text

Prompt = str | Conversation
RECORD_SUFFIXES = (*JSON_SUFFIXES, *tables.SUFFIXES)
"""Suffixes of files that hold records instead of lines."""


class PromptFile:
    """Prompts of a file of records, which each loop reads anew: any number fits.

    Args:
        read: Function that reads all prompts in order.

    Raises:
        ConfigError: A record is no prompt.
        DataError: The file cannot be read.
    """

    def __init__(self, read: Callable[[], Iterator[Prompt]]):
        self._read = read
        # Whatever is wrong is told now, before the weights are read.
        self._number = sum(1 for _ in read())

    def __len__(self) -> int:
        return self._number

    def __iter__(self) -> Iterator[Prompt]:
        return self._read()


Prompts = Sequence[Prompt] | PromptFile
"""Prompts that may be read more than once, in order."""


def texts_given(given: flags.FlagValues) -> Sequence[str] | PromptFile:
    """Reads the texts to continue: of `--file`, or `--prompt`."""
    if not given.file:
        return [given.prompt]
    refuse_flags(given, ["prompt"], "has no effect with --file")
    path = pathlib.Path(local_path("file", given.file))
    if path.suffix.lower() not in RECORD_SUFFIXES:
        return read_prompts(given.file)
    return PromptFile(lambda: _read_texts(path, given.text_field))


def _read_texts(path: pathlib.Path, field: str) -> Iterator[str]:
    """Yields the texts of a field of records."""
    for document in read_documents(path, field):
        if document.tokens is not None:
            problem = f"has token ids in {field!r}"
            remedy = "choose another --text_field"
            raise ConfigError(Problem("--file", str(path), problem, remedy))
        yield document.text


def chats_given(given: flags.FlagValues) -> Sequence[Conversation] | PromptFile:
    """Reads the conversations to answer.

    `--prompt`, or each line of a text file, is the message of a user. JSON Lines and
    tables hold conversations of several messages.
    """
    problem = "has no effect with --chat, whose template has them"
    refuse_flags(given, ["special_tokens"], problem)
    if not given.file and not given["prompt"].present:
        remedy = "write it as --prompt, or several in a --file"
        raise ConfigError(Problem("--chat", given.chat, "has no message", remedy))
    if pathlib.Path(given.file).suffix.lower() in RECORD_SUFFIXES:
        refuse_flags(given, ["prompt"], "has no effect with --file")
        path = pathlib.Path(local_path("file", given.file))
        told = set[str]()  # fields that are not read are logged once

        def read() -> Iterator[Conversation]:
            documents = read_conversations(path, told)
            return (x.talk for x in documents if x.talk is not None)

        return PromptFile(read)
    return [as_talk([{"role": "user", "content": text}]) for text in texts_given(given)]


def read_prompts(path: str) -> list[str]:
    """Reads the prompts of `--file`, one on each line; no line may be empty."""
    path = local_path("file", path)
    try:
        # Not `splitlines`, for which other characters than newlines end a line.
        lines = [x.rstrip("\n") for x in io.StringIO(read_text(path), newline=None)]
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        problem, remedy = f"cannot be read ({why})", "give a text with a prompt a line"
        raise ConfigError(Problem("--file", path, problem, remedy)) from error
    empty = [number for number, line in enumerate(lines, 1) if not line.strip()]
    if empty or not lines:
        problem = f"has no prompt on line {empty[0] if empty else 1}"
        raise ConfigError(Problem("--file", path, problem, "write one, or remove it"))
    return lines
