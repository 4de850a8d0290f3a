"""Directory and metric files of a run; damaged lines are skipped and counted."""

import csv
import json
import math
import os
import pathlib
import stat
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from absl import logging

from zjax.errors import CHOOSE_DIRECTORY, ConfigError, Problem, find_remedy
from zjax.files import make_directory, parse_json
from zjax.observe.metrics import Value, Values
from zjax.settings.ranges import MAX_STEPS


def check_directory(directory: str) -> None:
    """Creates the run's directory and checks that files can be created in it."""
    try:
        make_directory(pathlib.Path(directory))
        # Tried, since rights alone do not tell of a full disk or a quota.
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        problem = f"cannot be used ({error.strerror})"
        remedy = find_remedy(error, elsewhere=CHOOSE_DIRECTORY)
        raise ConfigError(Problem("directory", directory, problem, remedy)) from error


HISTORY = "metrics.jsonl"
"""Name of the JSON lines file in a run's directory."""
MAX_BYTES = 1 << 32
_MAX_LINE_BYTES = 1 << 20
"""Longest line in memory; a longer line is damaged."""


class Table(NamedTuple):
    """CSV file of metrics; every row has "step"."""

    columns: list[str]
    rows: list[dict[str, str]]
    num_damaged: int


def read_history(path: str | os.PathLike[str]) -> list[Values]:
    """Reads the rows of the `jsonl` sink, and warns of damaged lines.

    A missing file is an empty history. Numbers are floats, except "step".
    """
    rows, num_damaged = read_json_lines(pathlib.Path(path))
    if num_damaged:
        logging.warning("%s: %d lines cannot be read", path, num_damaged)
    return rows


def read_json_lines(path: pathlib.Path) -> tuple[list[Values], int]:
    """Reads as `read_history`, but returns the number of damaged lines, too."""
    parsed = [_row(line) for line in _complete_lines(path)]
    rows = [row for row in parsed if row is not None]
    return rows, len(parsed) - len(rows)


def json_line(row: Mapping[str, Value]) -> str:
    """Formats a row as a line of JSON; NaN and infinities are written as texts."""
    spell = {math.inf: "Infinity", -math.inf: "-Infinity"}
    finite = {
        name: x if isinstance(x, list) or math.isfinite(x) else spell.get(x, "NaN")
        for name, x in row.items()
    }
    # Strict: bare NaN is no JSON for most readers.
    return json.dumps(finite, allow_nan=False) + "\n"


def replace_text(path: pathlib.Path, text: str) -> None:
    """Replaces a text file by a rename, so that a crash leaves a whole file."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, "utf-8")
    partial.replace(path)


def read_csv(path: pathlib.Path) -> Table:
    """Reads the table of the `csv` sink; a missing file is an empty table."""
    lines = [_cells(line) for line in _complete_lines(path)]
    if not lines:
        return Table(["step"], [], 0)
    columns = lines[0]
    # With a damaged header, no cell has a name.
    if columns[:1] != ["step"] or len(set(columns)) != len(columns):
        return Table(["step"], [], len(lines))
    rows = [
        dict(zip(columns, cells, strict=True))
        for cells in lines[1:]
        if len(cells) == len(columns) and _is_step(cells[0])
    ]
    return Table(columns, rows, len(lines) - 1 - len(rows))


def _row(line: bytes) -> Values | None:
    """Parses a line of JSON; None if the line is damaged."""
    try:
        row = parse_json(line)
        step = row.pop("step")
        values = {name: _value(x) for name, x in row.items()}
    # A damaged line may still be JSON of any kind.
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return None
    is_step = type(step) is int and 0 <= step <= MAX_STEPS
    return {"step": step, **values} if is_step else None


def _value(x: Any) -> Value:
    """Converts a JSON value to a float, or checks nested lists of integers."""
    if not isinstance(x, list):
        return float(x)
    kind = np.asarray(x).dtype.kind  # fails for rows of different lengths
    if kind != "i":  # totals are integers
        raise TypeError(kind)
    return x


def _cells(line: bytes) -> list[str]:
    """Splits a line of CSV; empty if the line is damaged."""
    try:
        return next(csv.reader([line.decode()], strict=True))
    except (ValueError, csv.Error, StopIteration):
        return []


def _is_step(text: str) -> bool:
    # Cut: Python refuses to convert thousands of digits.
    return text.isascii() and text.isdigit() and int(text[:11]) <= MAX_STEPS


def _complete_lines(path: pathlib.Path) -> Iterator[bytes]:
    """Yields lines that end in a newline; a line over the limit comes in pieces."""
    if not path.exists():
        return
    status = path.stat()
    # A pipe or a device might never end.
    if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
        raise OSError(None, f"it is not a regular file of up to {MAX_BYTES:,} bytes")
    with path.open("rb") as file:
        for line in iter(lambda: file.readline(_MAX_LINE_BYTES), b""):
            # A last line without newline was cut short by a crash.
            if line.endswith(b"\n") or len(line) == _MAX_LINE_BYTES:
                yield line
