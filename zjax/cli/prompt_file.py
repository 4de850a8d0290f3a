"""Prompts that a command line names: one, or each line or record of a file."""

import io
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from absl import flags

from zjax.config.flags import refuse_flags
from zjax.data import tables
from zjax.data.conversations import OPTIONAL, Conversation, read_conversation
from zjax.data.documents import (
    JSON_SUFFIXES,
    read_conversations,
    read_documents,
    read_records,
)
from zjax.data.prompts import as_talk
from zjax.errors import ConfigError, Problem
from zjax.files import local_path, read_text
from zjax.rl.rollouts import row_problem

Prompt = str | Conversation
Row = Mapping[str, Any]
"""Fields of a record besides the prompt."""
RECORD_SUFFIXES = (*JSON_SUFFIXES, *tables.SUFFIXES)
"""Suffixes of files that hold records instead of lines."""


class PromptFile:
    """Prompts of a file of records, which each loop reads anew: any number fits.

    Args:
        read: Function that reads all prompts in order, alone or with more of a record.

    Raises:
        ConfigError: A record is no prompt.
        DataError: The file cannot be read.
    """

    def __init__(self, read: Callable[[], Iterator[Any]]):
        self._read = read
        # Whatever is wrong is told now, before the weights are read.
        self._number = sum(1 for _ in read())

    def __len__(self) -> int:
        return self._number

    def __iter__(self) -> Iterator[Any]:
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


def rows_given(
    given: flags.FlagValues,
) -> Sequence[tuple[Prompt, Row]] | PromptFile:
    """Reads prompts, each with the further fields of the record.

    With `--chat` the prompt of a record may be a text, the message of a user, or a list
    of messages; a record without `--text_field` has them as `messages`.
    """
    path = pathlib.Path(local_path("file", given.file)) if given.file else None
    if path is None or path.suffix.lower() not in RECORD_SUFFIXES:
        prompts = chats_given(given) if given.chat else texts_given(given)
        return [(prompt, {}) for prompt in prompts]
    problem = "has no effect with --chat, whose template has them"
    refuse_flags(given, ["special_tokens"] if given.chat else [], problem)
    refuse_flags(given, ["prompt"], "has no effect with --file")
    has_chat = bool(given.chat)
    return PromptFile(lambda: _read_rows(path, given.text_field, has_chat=has_chat))


def _read_rows(
    path: pathlib.Path, field: str, *, has_chat: bool
) -> Iterator[tuple[Prompt, Row]]:
    """Yields the prompt of each record, and the fields that are no prompt."""
    for where, record in read_records(path):
        name = "messages" if has_chat and field not in record else field
        row = {key: value for key, value in record.items() if key != name}
        if problem := row_problem(row):
            _refuse(path, where, problem, "name the field otherwise, or make it JSON")
        given = record.get(name)
        if has_chat and isinstance(given, str | list):
            yield _as_talk(given, row, path, where), row
        elif isinstance(given, str):
            yield given, row
        else:
            problem = f"has no text{' or messages' * has_chat} as {name!r}"
            _refuse(path, where, problem, "choose another --text_field")


def _as_talk(
    given: str | list, row: Row, path: pathlib.Path, where: str
) -> Conversation:
    """Makes a conversation of the message of a user, or of messages."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    record = {key: row.get(key) for key in OPTIONAL} | {"messages": given}
    return read_conversation(record, path, where)


def _refuse(path: pathlib.Path, where: str, problem: str, remedy: str) -> NoReturn:
    """Raises a ConfigError that names the file and the record."""
    raise ConfigError(Problem("--file", str(path), f"{problem} in {where}", remedy))


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
