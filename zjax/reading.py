"""Reads untrusted files with bounds on size, nesting and file type, and cut-off lines.

A device or pipe would be read for ever, a damaged file may claim any size, and deeply
nested JSON overflows the parser's stack.
"""

import json
import os
import pathlib
import stat
from typing import Any

from absl import logging

MAX_TEXT_BYTES = 1 << 20
"""Maximum size of a file written by a person."""
MAX_INDEX_BYTES = 1 << 28
"""Maximum size of an index of other files."""


def read_text(path: str | os.PathLike[str], max_bytes: int = MAX_TEXT_BYTES) -> str:
    """Reads a whole UTF-8 file of at most `max_bytes`.

    Raises:
        OSError: It is missing, not a regular file, or cannot be read.
        ValueError: It is larger, or not UTF-8.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(None, "it is not a regular file")
    with open(path, "rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"it has more than {max_bytes:,} bytes")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError("it is not UTF-8 text") from error


def read_lines(
    path: str | os.PathLike[str], max_bytes: int = MAX_TEXT_BYTES
) -> list[str]:
    """Reads the lines of a file, and warns of a last line that was cut off.

    Raises:
        OSError: It is missing, not a regular file, or cannot be read.
        ValueError: It is larger, or not UTF-8.
    """
    *lines, torn = read_text(path, max_bytes).split("\n")
    if torn:
        logging.warning("%s: the last line was cut off and is left out", path)
    return lines


def append_line(path: pathlib.Path, line: str) -> None:
    """Adds a line to a file, in place of a last line that was cut off.

    Raises:
        OSError: It cannot be written.
    """
    with path.open("a+b") as file:
        file.seek(0)
        size = sum(len(each) for each in file if each.endswith(b"\n"))
        file.truncate(size)
        file.write(line.encode() + b"\n")


def parse_json(text: str | bytes) -> Any:
    """Parses JSON.

    Raises:
        ValueError: It is not JSON, or nested too deep.

    Example:
        >>> parse_json("[1]")
        [1]
        >>> parse_json("[" * 100_000)
        Traceback (most recent call last):
        ValueError: it is nested too deep
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
