"""Reads documents from text, JSON Lines, Parquet and Arrow files, in bounded memory."""

import codecs
import itertools
import json
import os
import pathlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

from absl import logging

from zjax.data import tables
from zjax.data.conversations import (
    FIELDS,
    Conversation,
    read_conversation,
    without_nulls,
)
from zjax.errors import DataError, Problem
from zjax.reading import parse_json
from zjax.remedies import find_fault

BLOCK_BYTES = 64 << 10
"""Longer text files are read in blocks of about this size, cut at line ends."""
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
MAX_LINE_BYTES = 1 << 28
"""Longest line of a JSON Lines file."""
NUM_NAMED = 10
"""Most fields or columns that a message lists."""


class Document(NamedTuple):
    """One text, or a block of a long one.

    Args:
        text: The text; of a conversation, its messages.
        num_bytes: Size in the file.
        talk: The conversation, if it is one.
        begins: Whether the text begins here, and does not continue the block before.
        ends: Whether the text ends here, and does not go on in the next block.
    """

    text: str
    num_bytes: int
    talk: Conversation | None = None
    begins: bool = True
    ends: bool = True


def list_files(inputs: Sequence[str | pathlib.Path]) -> list[pathlib.Path]:
    """Lists files, and the files of directories, sorted by name and not empty.

    Of a directory that the `datasets` library saved it lists the files of rows.

    Raises:
        DataError: A path is missing, a given file is empty, a directory holds no text
            or several splits.
    """
    files: list[pathlib.Path] = []
    problems = []
    for given in map(pathlib.Path, inputs):
        if os.path.isdir(given):
            non_empty = [path for path in _files_in(given) if path.stat().st_size]
            files += non_empty
            if not non_empty:
                problems.append(_problem(given, "holds no text", "give some"))
        elif fault := find_fault(given):
            problems.append(_problem(given, fault, "check the path"))
        elif not given.stat().st_size:
            problems.append(_problem(given, "is empty", "leave it out"))
        else:
            files.append(given)
    if problems:
        raise DataError(*problems)
    return files


def _files_in(folder: pathlib.Path) -> list[pathlib.Path]:
    """All files, sorted; of a dataset that `datasets` saved, those of its rows."""
    if (files := tables.saved_files(folder)) is not None:
        return files
    found = []
    for path in sorted(folder.iterdir()):
        if path.is_file():
            found.append(path)
        elif path.is_dir() and not path.is_symlink():
            found += _files_in(path)
    return found


def read_conversations(path: pathlib.Path, told: set[str]) -> Iterator[Document]:
    """Reads conversations of JSON Lines, Parquet or Arrow files.

    Args:
        path: The file, whose records have a layout of `zjax.data.conversations`.
        told: Names of fields that the log has told as not read; gets more.

    Yields:
        Each, with its messages as text.

    Raises:
        DataError: Another kind of file, a broken line, or other fields; with its
            position.
    """
    suffix = path.suffix.lower()
    if suffix in tables.SUFFIXES:
        records, kind = _read_rows(path, told), "row"
    elif suffix in JSON_SUFFIXES:
        records, kind = _read_records(path), "line"
    else:
        problem, remedy = "is no file of conversations", "use JSON Lines or Parquet"
        raise DataError(_problem(path, problem, remedy))
    for number, record, num_bytes in records:
        talk = read_conversation(record, path, f"{kind} {number}")
        _tell_unread(path, talk.unread, told)
        text = json.dumps(talk.messages, default=str)
        yield Document(text, num_bytes, talk)


def _read_rows(
    path: pathlib.Path, told: set[str]
) -> Iterator[tuple[int, dict[str, Any], int]]:
    with tables.open_table(path) as table:
        columns = [name for name in table.names if name in FIELDS]
        if not columns:
            problem = f"has no column of a conversation, only {_named(table.names)}"
            raise DataError(_problem(path, problem, "name one 'messages'"))
        _tell_unread(path, [n for n in table.names if n not in FIELDS], told)
        rows = (row for batch in table.batches(columns) for row in batch)
        for number, row in enumerate(rows, start=1):
            yield number, without_nulls(row), table.row_bytes


def _tell_unread(path: pathlib.Path, names: Sequence[str], told: set[str]) -> None:
    if new := [name for name in names if name not in told]:
        told.update(new)
        logging.warning("%s has fields that are not read: %s", path, _named(new))


def read_documents(path: pathlib.Path, text_field: str) -> Iterator[Document]:
    """Reads JSON Lines, Parquet, Arrow or else plain text, by the file's suffix.

    Raises:
        DataError: Not UTF-8, a broken line, no such field or column; with its position.
    """
    suffix = path.suffix.lower()
    if suffix in JSON_SUFFIXES:
        return _read_json_lines(path, text_field)
    if suffix in tables.SUFFIXES:
        return _read_table(path, text_field)
    return _read_text(path)


def _problem(path: pathlib.Path, problem: str, remedy: str) -> Problem:
    return Problem("input", str(path), problem, remedy)


def _read_text(path: pathlib.Path) -> Iterator[Document]:
    """Reads a text file in blocks, of which the first begins the text."""
    offset, remainder = 0, b""
    with open(path, "rb") as file:
        while block := remainder + file.read(BLOCK_BYTES - len(remainder)):
            is_last = not file.peek(1)
            size = len(block) if is_last else _block_end(block)
            text = _decode(block[:size], path, offset)
            yield Document(text, size, begins=not offset, ends=is_last)
            offset, remainder = offset + size, block[size:]


def _block_end(block: bytes) -> int:
    """Finds the end of a block: after the last line, else before a torn character."""
    after_line = block.rfind(b"\n") + 1
    if after_line > len(block) // 2:
        return after_line
    _, consumed = codecs.utf_8_decode(block, "replace", False)
    return consumed


def _decode(block: bytes, path: pathlib.Path, offset: int) -> str:
    """Decodes a block at byte `offset`; drops the byte order mark of a file."""
    try:
        return block.decode("utf-8" if offset else "utf-8-sig")
    except UnicodeDecodeError as error:
        problem = f"is not UTF-8 at byte {offset + error.start}"
        remedy = "convert it (iconv -t UTF-8) or leave it out"
        raise DataError(_problem(path, problem, remedy)) from error


def _read_json_lines(path: pathlib.Path, text_field: str) -> Iterator[Document]:
    for number, record, num_bytes in _read_records(path):
        yield Document(_text_of(record, path, number, text_field), num_bytes)


def _read_records(path: pathlib.Path) -> Iterator[tuple[int, dict[str, Any], int]]:
    """Number, content and bytes of each line that is not blank."""
    offset = 0
    with open(path, "rb") as file:
        lines = iter(lambda: file.readline(MAX_LINE_BYTES + 1), b"")
        for number, line in enumerate(lines, start=1):
            if len(line) > MAX_LINE_BYTES:
                problem = f"has more than {MAX_LINE_BYTES:,} bytes on line {number}"
                raise DataError(
                    _problem(path, problem, "write one JSON object per line")
                )
            text = _decode(line, path, offset)
            if text.strip():
                yield number, _parse(text, path, number), len(line)
            offset += len(line)


def _parse(line: str, path: pathlib.Path, number: int) -> dict[str, Any]:
    try:
        record = parse_json(line)
    except ValueError as error:
        problem = f"has broken JSON on line {number} ({error.args[0]})"
        remedy = "write one JSON object per line"
        raise DataError(_problem(path, problem, remedy)) from error
    if not isinstance(record, dict):
        problem = f"has no object on line {number}, but a {type(record).__name__}"
        raise DataError(_problem(path, problem, "write one JSON object per line"))
    return record


def _text_of(
    record: dict[str, Any], path: pathlib.Path, number: int, text_field: str
) -> str:
    if text_field not in record:
        problem = f"has no field {text_field!r} on line {number}, only {_named(record)}"
        raise DataError(_problem(path, problem, "choose another text_field"))
    return _check_text(record[text_field], path, f"line {number}", text_field)


def _read_table(path: pathlib.Path, text_field: str) -> Iterator[Document]:
    with tables.open_table(path) as table:
        if text_field not in table.names:
            problem = f"has no column {text_field!r}, only {_named(table.names)}"
            raise DataError(_problem(path, problem, "choose another text_field"))
        rows = (row for batch in table.batches([text_field]) for row in batch)
        for number, row in enumerate(rows, start=1):
            text = _check_text(row[text_field], path, f"row {number}", text_field)
            yield Document(text, table.row_bytes)


def _named(names: Collection[str]) -> str:
    if not names:
        return "none"
    shown = ", ".join(itertools.islice(names, NUM_NAMED))
    others = len(names) - NUM_NAMED
    return f"{shown} and {others} more" if others > 0 else shown


def _check_text(value: object, path: pathlib.Path, where: str, text_field: str) -> str:
    if not isinstance(value, str):
        problem = f"has a {type(value).__name__} as {text_field!r} in {where}"
        raise DataError(_problem(path, problem, "make it a string or leave it out"))
    try:
        value.encode()
    except UnicodeEncodeError as error:
        problem = f"has half a character (a lone surrogate) in {where}"
        raise DataError(_problem(path, problem, "write whole characters")) from error
    return value
