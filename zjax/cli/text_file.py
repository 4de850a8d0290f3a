"""File of texts: a line of JSON for each, which goes on where an earlier call ended."""

import contextlib
import fcntl
import json
import pathlib
from collections.abc import Mapping
from typing import Any, BinaryIO

from absl import logging

from zjax.errors import ConfigError, Problem
from zjax.files import make_directory, new_file, parse_json, read_text, writing

ORIGIN_SUFFIX = ".origin.json"
"""Suffix of the file beside the texts that names prompts, weights and settings."""
_REMEDY = "name another file"


class TextFile:
    """Open file of texts, with equally many lines for each prompt.

    Args:
        path: File to write, or to go on with.
        origin: Prompts, weights and settings of the texts, as values of JSON.
        num_samples: Lines of a prompt.

    Attributes:
        num_prompts: Prompts with all lines written by an earlier call.
        last_line: Last line of these prompts; empty without prompts.

    Raises:
        ConfigError: The file holds other texts, is a directory, or is written by
            another command.
        OutputError: The file cannot be written.
    """

    def __init__(
        self, path: pathlib.Path, origin: Mapping[str, Any], num_samples: int = 1
    ):
        self._path = path
        beside = path.with_name(path.name + ORIGIN_SUFFIX)
        if path.is_dir():
            problem = "is a directory"
            raise ConfigError(Problem("--output", str(path), problem, _REMEDY))
        with writing(path), contextlib.ExitStack() as stack:
            make_directory(path.parent)
            self._file = stack.enter_context(path.open("a+b"))
            _lock(self._file, path)
            if path.stat().st_size:
                _check_origin(path, beside, origin)
            else:
                with new_file(beside) as partial:
                    partial.write_text(json.dumps(origin, indent=1) + "\n")
            self.num_prompts = self._cut(num_samples)
            stack.pop_all()

    def __enter__(self) -> "TextFile":
        return self

    def __exit__(self, *reason: object) -> None:
        self._file.close()

    def write(self, line: bytes) -> None:
        """Writes a line, which ends with a newline."""
        with writing(self._path):
            self._file.write(line)
            self._file.flush()

    def _cut(self, num_samples: int) -> int:
        """Cuts lines behind the last whole prompt; returns the number of prompts."""
        self._file.seek(0)
        num_lines = size = kept = 0
        self.last_line = b""
        for line in self._file:
            if not line.endswith(b"\n"):
                break
            num_lines, size = num_lines + 1, size + len(line)
            if num_lines % num_samples == 0:
                kept, self.last_line = size, line
        self._file.truncate(kept)
        return num_lines // num_samples


def _lock(file: BinaryIO, path: pathlib.Path) -> None:
    """Refuses a file that another command writes; the lock ends with the file."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        problem = "is written by another command"
        remedy = "wait until it ends, or name another file"
        raise ConfigError(Problem("--output", str(path), problem, remedy)) from error
    except OSError:  # a file system without locks
        problem = "is on a file system without locks; let one command write to it"
        logging.warning("--output=%r %s", str(path), problem)


def _check_origin(
    path: pathlib.Path, beside: pathlib.Path, origin: Mapping[str, Any]
) -> None:
    """Refuses to go on with texts of another origin."""
    try:
        written = dict(parse_json(read_text(beside)))
    except (OSError, TypeError, ValueError) as error:
        problem = f"holds texts, and {beside.name} does not say of which prompts"
        raise ConfigError(Problem("--output", str(path), problem, _REMEDY)) from error
    given = parse_json(json.dumps(origin))
    problems = [
        Problem(
            "--output",
            str(path),
            f"holds texts of {name}={written.get(name)!r}, not {value!r}",
            _REMEDY,
        )
        for name, value in given.items()
        if written.get(name) != value
    ]
    if problems:
        raise ConfigError(*problems)
