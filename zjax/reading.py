"""Files of others, read within bounds: their size, their nesting and what they are.

A device or a pipe in place of a file would be read for ever, a damaged file may claim
any size, and JSON nested deeper than the stack ends the parser.
"""

import json
import os
import stat
from typing import Any

MOST_TEXT_BYTES = 1 << 20
"""Of a file that people write."""
MOST_INDEX_BYTES = 1 << 28
"""Of a file that lists what others hold."""


def read_text(path: str | os.PathLike[str], most_bytes: int = MOST_TEXT_BYTES) -> str:
    """Reads a text file whole.

    Args:
        path: A regular file, or a link to one.
        most_bytes: More than that are refused.

    Returns:
        Its text.

    Raises:
        OSError: It is missing, no file, or cannot be read.
        ValueError: It is larger, or not UTF-8.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(None, "it is no file")
    with open(path, "rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"it has more than {most_bytes:,} bytes")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError("it is not UTF-8 text") from error


def parse_json(text: str | bytes) -> Any:
    """Reads JSON.

    Args:
        text: Of any nesting.

    Returns:
        What it says.

    Raises:
        ValueError: It is no JSON, or nested deeper than can be read.

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
