"""Reads documents from text, JSON, Parquet and Arrow files, in bounded memory."""

import bz2
import codecs
import contextlib
import functools
import gzip
import itertools
import json
import lzma
import os
import pathlib
import zlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple

from absl import logging

from zjax.data import conversations, examples, tables
from zjax.data.tables import REFUSED, BrokenRecords
from zjax.errors import DataError, Problem, find_fault
from zjax.files import parse_json

BLOCK_BYTES = 64 << 10
"""Size in bytes of the blocks of text files, cut at line ends."""
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
MAX_LINE_BYTES = 1 << 28
"""Maximum bytes of a line of a JSON Lines file, or of a JSON array."""
_BLANK = b"\xef\xbb\xbf \t\r\n"
"""Bytes of a byte order mark and white space, before the first record."""
_DECOMPRESSORS = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_NOT_READ = {
    ".zst": "zstd -d",
    ".lz4": "lz4 -d",
    ".zip": "unzip",
    ".tar": "tar -xf",
    ".tgz": "tar -xf",
    ".7z": "7z x",
}
"""Commands that decompress files of unsupported forms, by suffix."""
NUM_NAMED = 10
"""Maximum number of fields or columns that a message lists."""


class Document(NamedTuple):
    """One text, or a block of a long one.

    Args:
        text: Text; the messages as JSON for a conversation.
        num_bytes: Bytes of the file that hold the document.
        talk: Conversation, or None for a text.
        begins: Whether the text begins here, and does not continue the block before.
        ends: Whether the text ends here, and does not go on in the next block.
        tokens: Ids that the file holds instead of text. In a block of a stream, where
            `begins` and `ends` are false, end tokens end documents.
        example: Completions of a prompt, or None.
    """

    text: str
    num_bytes: int
    talk: conversations.Conversation | None = None
    begins: bool = True
    ends: bool = True
    tokens: tables.TokenIds | None = None
    example: examples.Example | None = None

    @property
    def size(self) -> int:
        """Number of characters, or of ids."""
        return len(self.text) if self.tokens is None else len(self.tokens.ids)


def list_files(inputs: Sequence[str | pathlib.Path]) -> list[pathlib.Path]:
    """Lists files, and the files of directories, sorted by name and not empty.

    For a directory of `Dataset.save_to_disk`, these are the files of rows.
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
    """Lists all files of a directory, sorted; only row files of a saved dataset."""
    if (files := tables.saved_files(folder)) is not None:
        return files
    found = []
    for path in sorted(folder.iterdir()):
        if path.is_file():
            found.append(path)
        # A linked directory could contain itself.
        elif path.is_dir() and not path.is_symlink():
            found += _files_in(path)
    return found


def read_conversations(
    path: pathlib.Path, told: set[str], broken: BrokenRecords = REFUSED
) -> Iterator[Document]:
    """Reads conversations of JSON Lines, Parquet or Arrow files.

    `told` are field names that the log has reported as not read, and grows.
    """
    problem, remedy = "has no column of a conversation", "name one 'messages'"
    need = _Need(conversations.FIELDS, "conversations", problem, remedy)
    for where, record, num_bytes in _read_objects(path, told, broken, need):
        talk = broken.read(conversations.read_conversation, record, path, where)
        if talk is None:
            continue
        _tell_unread(path, talk.unread, told)
        text = json.dumps(talk.messages, default=str)
        yield Document(text, num_bytes, talk)


def read_examples(
    path: pathlib.Path,
    kind: str,
    has_template: bool,
    told: set[str],
    broken: BrokenRecords = REFUSED,
) -> Iterator[Document]:
    """Reads examples of a kind from JSON Lines, Parquet or Arrow files.

    `told` are field names that the log has reported as not read, and grows.
    """
    layout = examples.LAYOUTS[kind]
    remedy = f"name the columns {', '.join(layout.needed)}"
    need = _Need(layout.fields, "examples", f"has no column of {kind}", remedy)
    read = functools.partial(
        examples.read_example, kind=kind, has_template=has_template
    )
    for where, record, num_bytes in _read_objects(path, told, broken, need):
        example = broken.read(read, record, path, where)
        if example is None:
            continue
        _tell_unread(path, example.unread, told)
        yield Document(_text_of(example), num_bytes, example=example)


def read_records(path: pathlib.Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Reads all fields of JSON Lines, Parquet or Arrow files, with the position."""
    suffix = _form_of(path)
    if suffix in tables.SUFFIXES:
        with tables.open_table(path) as table:
            rows = (row for batch in table.batches(table.names) for row in batch)
            yield from ((f"row {number}", row) for number, row in enumerate(rows, 1))
        return
    for where, record, _ in _read_records(path, REFUSED):
        yield where, record


def _text_of(example: examples.Example) -> str:
    """Text of all sequences, for the size of an example and for a BPE to learn from."""
    texts = [
        sequence.prompt * (not number) + sequence.completion
        if isinstance(sequence, examples.Text)
        else json.dumps(sequence.messages, default=str)
        for number, sequence in enumerate(example.sequences)
    ]
    return "\n".join(texts)


class _Need(NamedTuple):
    """Fields that a reader of records takes, and the refusal of a file without any."""

    fields: Collection[str]
    content: str
    problem: str
    remedy: str


def _read_objects(
    path: pathlib.Path, told: set[str], broken: BrokenRecords, need: _Need
) -> Iterator[tuple[str, dict[str, Any], int]]:
    """Yields position, record and bytes of each record of a table or a JSON file."""
    suffix = _form_of(path)
    if suffix in tables.SUFFIXES:
        return _read_rows(path, told, need)
    if suffix in JSON_SUFFIXES:
        return _read_records(path, broken)
    problem, remedy = f"is no file of {need.content}", "use JSON Lines or Parquet"
    raise DataError(_problem(path, problem, remedy))


def _read_rows(
    path: pathlib.Path, told: set[str], need: _Need
) -> Iterator[tuple[str, dict[str, Any], int]]:
    """Yields position, record and bytes of each row of a table."""
    with tables.open_table(path) as table:
        columns = [name for name in table.names if name in need.fields]
        if not columns:
            problem = f"{need.problem}, only {_named(table.names)}"
            raise DataError(_problem(path, problem, need.remedy))
        _tell_unread(path, [n for n in table.names if n not in need.fields], told)
        rows = (row for batch in table.batches(columns) for row in batch)
        for number, row in enumerate(rows, start=1):
            # Tables have every key in every row, filled with nulls.
            yield f"row {number}", conversations.without_nulls(row), table.row_bytes


def _tell_unread(path: pathlib.Path, names: Sequence[str], told: set[str]) -> None:
    if new := [name for name in names if name not in told]:
        told.update(new)
        logging.warning("%s has fields that are not read: %s", path, _named(new))


def read_documents(
    path: pathlib.Path, text_field: str, broken: BrokenRecords = REFUSED
) -> Iterator[Document]:
    """Reads JSON, Parquet, Arrow or else plain text, by the file's suffix.

    `text_field` is the field or column with the text or the token ids.
    """
    suffix = _form_of(path)
    if suffix in JSON_SUFFIXES:
        return _read_json(path, text_field, broken)
    if suffix in tables.SUFFIXES:
        return _read_table(path, text_field, broken)
    if suffix == tables.STREAM_SUFFIX:
        return _read_stream(path)
    return _read_text(path)


def _problem(path: pathlib.Path, problem: str, remedy: str) -> Problem:
    return Problem("input", str(path), problem, remedy)


def _form_of(path: pathlib.Path) -> str:
    """Suffix that says how a file is read, without the suffix of a compression."""
    # Two suffixes: of the form, and of a compression.
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]] or [""]
    # The second to last one, too: a .tar.gz holds headers of an archive, not text.
    if unread := [suffix for suffix in suffixes if suffix in _NOT_READ]:
        remedy = f"decompress it ({_NOT_READ[unread[0]]}) or leave it out"
        raise DataError(_problem(path, "is compressed in a form not read", remedy))
    if suffixes[-1] not in _DECOMPRESSORS:
        return suffixes[-1]
    if suffixes[0] in tables.SUFFIXES:
        problem = "is compressed as a whole, and is read at several places"
        raise DataError(_problem(path, problem, "decompress it"))
    return suffixes[0] if suffixes[1:] else ""


class _Content:
    """Decompressed bytes of an open file, and the position in the file itself."""

    def __init__(self, raw: BinaryIO, file: Any):
        self._raw, self.file = raw, file
        self._position = 0

    def advance(self) -> int:
        """Counts the bytes of the file that were read since the last call."""
        # Of the raw file, as the progress bar counts bytes on disk.
        before, self._position = self._position, self._raw.tell()
        return self._position - before


@contextlib.contextmanager
def _open(path: pathlib.Path) -> Iterator[_Content]:
    """Opens a file, and decompresses the content while reading."""
    decompress = _DECOMPRESSORS.get(path.suffix.lower())
    with open(path, "rb") as raw:
        if decompress is None:
            yield _Content(raw, raw)
            return
        try:
            with decompress(raw) as file:
                yield _Content(raw, file)
        except (gzip.BadGzipFile, EOFError, zlib.error, lzma.LZMAError) as error:
            problem = f"is a damaged {path.suffix} file ({error})"
            raise DataError(_problem(path, problem, "copy it again")) from error


def _read_text(path: pathlib.Path) -> Iterator[Document]:
    """Reads a text file in blocks, of which the first begins the text."""
    offset, remainder = 0, b""
    with _open(path) as content:
        file = content.file
        while block := remainder + file.read(BLOCK_BYTES - len(remainder)):
            is_last = not file.peek(1)  # the last block may be full
            size = len(block) if is_last else _block_end(block)
            text = _decode(block[:size], path, offset)
            yield Document(text, content.advance(), begins=not offset, ends=is_last)
            offset, remainder = offset + size, block[size:]


def _block_end(block: bytes) -> int:
    """Finds the end of a block: after the last line, else before a torn character."""
    after_line = block.rfind(b"\n") + 1
    # A line end in the first half would give many small blocks.
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


def _read_json(
    path: pathlib.Path, text_field: str, broken: BrokenRecords
) -> Iterator[Document]:
    """Reads the documents of a JSON file."""
    for where, record, num_bytes in _read_records(path, broken):
        document = broken.read(_document_of, record, path, where, text_field, num_bytes)
        if document is not None:
            yield document


def _document_of(
    record: dict[str, Any],
    path: pathlib.Path,
    where: str,
    text_field: str,
    num_bytes: int,
) -> Document:
    """Makes a document of a record; the field is text or a list of token ids."""
    if text_field not in record:
        problem = f"has no field {text_field!r} in {where}, only {_named(record)}"
        raise DataError(_problem(path, problem, "choose another text_field"))
    value = record[text_field]
    if isinstance(value, list):
        tokens = tables.read_ids(record, text_field, path, where)
        return Document("", num_bytes, tokens=tokens)
    return Document(_check_text(value, path, where, text_field), num_bytes)


def _read_stream(path: pathlib.Path) -> Iterator[Document]:
    """Reads a file of token ids in blocks."""
    for ids in tables.read_stream(path):
        tokens = tables.TokenIds(ids)
        yield Document("", 2 * len(ids), begins=False, ends=False, tokens=tokens)


def _read_records(
    path: pathlib.Path, broken: BrokenRecords
) -> Iterator[tuple[str, dict[str, Any], int]]:
    """Reads the objects of the lines, or of one array over the whole file.

    Yields position, such as `line 3`, object, and bytes read since the object before.
    """
    offset, is_array = 0, None
    with _open(path) as content:
        # One byte more than allowed tells a long line, in bounded memory.
        lines = iter(lambda: content.file.readline(MAX_LINE_BYTES + 1), b"")
        for number, line in enumerate(lines, start=1):
            # The first visible character tells an array from JSON Lines.
            if is_array is None and (start := line.lstrip(_BLANK)):
                is_array = start.startswith(b"[")
            if is_array:
                yield from _read_array(path, content, line, broken)
                return
            if len(line) > MAX_LINE_BYTES:
                problem = f"has more than {MAX_LINE_BYTES:,} bytes in line {number}"
                raise DataError(
                    _problem(path, problem, "write one JSON object per line")
                )
            where = f"line {number}"
            if line.strip():
                record = broken.read(_parse_line, line, path, where, offset)
                if record is not None:
                    yield where, record, content.advance()
            offset += len(line)


def _parse_line(
    line: bytes, path: pathlib.Path, where: str, offset: int
) -> dict[str, Any]:
    text = _decode(line, path, offset).rstrip("\r\n")
    return _object_of(_parse(text, path, where), path, where)


def _read_array(
    path: pathlib.Path, content: _Content, start: bytes, broken: BrokenRecords
) -> Iterator[tuple[str, dict[str, Any], int]]:
    """Reads the objects of one array that begins with the line `start`."""
    whole = start + content.file.read(MAX_LINE_BYTES + 1 - len(start))
    if len(whole) > MAX_LINE_BYTES:
        problem = f"is a JSON array of more than {MAX_LINE_BYTES:,} bytes"
        remedy = "write one JSON object per line (jq -c '.[]')"
        raise DataError(_problem(path, problem, remedy))
    for number, item in enumerate(_parse(_decode(whole, path, 0), path), start=1):
        where = f"item {number}"
        record = broken.read(_object_of, item, path, where)
        if record is not None:
            yield where, record, content.advance()


def _parse(text: str, path: pathlib.Path, where: str = "its array") -> Any:
    """Parses JSON of a file; names the position of a fault."""
    try:
        return parse_json(text)
    except ValueError as error:
        problem = f"has broken JSON in {where} ({error.args[0]})"
        remedy = "write one JSON object per line, or an array of objects"
        raise DataError(_problem(path, problem, remedy)) from error


def _object_of(value: Any, path: pathlib.Path, where: str) -> dict[str, Any]:
    """Refuses a JSON value that is no object."""
    if not isinstance(value, dict):
        problem = f"has no object in {where}, but a {type(value).__name__}"
        remedy = "write one JSON object per line, or an array of objects"
        raise DataError(_problem(path, problem, remedy))
    return value


def _read_table(
    path: pathlib.Path, text_field: str, broken: BrokenRecords
) -> Iterator[Document]:
    """Reads the documents of a table, with labels and masks beside ids."""
    with tables.open_table(path) as table:
        if text_field not in table.names:
            problem = f"has no column {text_field!r}, only {_named(table.names)}"
            raise DataError(_problem(path, problem, "choose another text_field"))
        beside = [n for n in (tables.LABELS, tables.MASK) if n in table.names]
        # A repeated name would select the column twice.
        columns = [text_field, *(name for name in beside if name != text_field)]
        rows = (row for batch in table.batches(columns) for row in batch)
        for number, row in enumerate(rows, start=1):
            where, num_bytes = f"row {number}", table.row_bytes
            document = broken.read(
                _document_of, row, path, where, text_field, num_bytes
            )
            if document is not None:
                yield document


def _named(names: Collection[str]) -> str:
    """Lists the first few names, for a message."""
    if not names:
        return "none"
    shown = ", ".join(itertools.islice(names, NUM_NAMED))
    others = len(names) - NUM_NAMED
    return f"{shown} and {others} more" if others > 0 else shown


def _check_text(value: object, path: pathlib.Path, where: str, text_field: str) -> str:
    """Refuses a field that is no text, or has half a character."""
    if not isinstance(value, str):
        problem = f"has a {type(value).__name__} as {text_field!r} in {where}"
        raise DataError(_problem(path, problem, "make it a string or leave it out"))
    try:
        # JSON can spell a lone surrogate, which no tokenizer can encode.
        value.encode()
    except UnicodeEncodeError as error:
        problem = f"has half a character (a lone surrogate) in {where}"
        raise DataError(_problem(path, problem, "write whole characters")) from error
    return value
