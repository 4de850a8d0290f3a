"""What a run wrote of its numbers, read again: damaged lines cost no others."""

import csv
import os
import pathlib
import stat
from collections.abc import Iterator
from typing import NamedTuple

from absl import logging

from zjax.config.ranges import MOST_STEPS
from zjax.reading import parse_json

HISTORY = "metrics.jsonl"
"""Name of the JSON lines file under a run's directory."""
MOST_BYTES = 1 << 32
_MOST_LINE_BYTES = 1 << 20

Numbers = dict[str, int | float]


class Table(NamedTuple):
    """The rows of a file, each with its "step" as text, and how many were damaged."""

    columns: list[str]
    rows: list[dict[str, str]]
    num_damaged: int


def read_history(path: str | os.PathLike[str]) -> list[Numbers]:
    """Reads what the sink `jsonl` wrote.

    Args:
        path: The file; a missing one is an empty history.

    Returns:
        One dict per line, with "step" as an int and all else as floats. The last line,
        where it was cut short, is left out, and so are damaged ones, which is said.

    Raises:
        OSError: It is no file, is larger than any history, or cannot be read.
    """
    rows, num_damaged = read_json_lines(pathlib.Path(path))
    if num_damaged:
        logging.warning("%s: %d lines cannot be read", path, num_damaged)
    return rows


def read_json_lines(path: pathlib.Path) -> tuple[list[Numbers], int]:
    """Reads a history, without a word.

    Args:
        path: The file; a missing one is an empty history.

    Returns:
        The rows, and how many lines were damaged.

    Raises:
        OSError: It is no file, is larger than any history, or cannot be read.
    """
    found = [_row(line) for line in _whole_lines(path)]
    rows = [row for row in found if row is not None]
    return rows, len(found) - len(rows)


def read_csv(path: pathlib.Path) -> Table:
    """Reads what the sink `csv` wrote.

    Args:
        path: The file; a missing one is an empty table.

    Returns:
        Its columns, "step" first, and its rows.

    Raises:
        OSError: It is no file, is larger than any table, or cannot be read.
    """
    found = [_cells(line) for line in _whole_lines(path)]
    if not found:
        return Table(["step"], [], 0)
    columns = found[0]
    if columns[:1] != ["step"] or len(set(columns)) != len(columns):
        return Table(["step"], [], len(found))
    rows = [
        dict(zip(columns, cells, strict=True))
        for cells in found[1:]
        if len(cells) == len(columns) and _is_step(cells[0])
    ]
    return Table(columns, rows, len(found) - 1 - len(rows))


def _row(line: bytes) -> Numbers | None:
    try:
        row = parse_json(line)
        step = row.pop("step")
        values = {name: float(x) for name, x in row.items()}
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return None
    is_step = type(step) is int and 0 <= step <= MOST_STEPS
    return {"step": step, **values} if is_step else None


def _cells(line: bytes) -> list[str]:
    try:
        return next(csv.reader([line.decode()], strict=True))
    except (ValueError, csv.Error, StopIteration):
        return []


def _is_step(text: str) -> bool:
    return text.isascii() and text.isdigit() and int(text[:11]) <= MOST_STEPS


def _whole_lines(path: pathlib.Path) -> Iterator[bytes]:
    """Lines that end, of bounded length; longer ones come in parts."""
    if not path.exists():
        return
    status = path.stat()
    if not stat.S_ISREG(status.st_mode) or status.st_size > MOST_BYTES:
        raise OSError(None, f"it is no file of up to {MOST_BYTES:,} bytes")
    with path.open("rb") as file:
        for line in iter(lambda: file.readline(_MOST_LINE_BYTES), b""):
            if line.endswith(b"\n") or len(line) == _MOST_LINE_BYTES:
                yield line
