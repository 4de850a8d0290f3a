"""Files and paths: read within bounds, written completely or not at all."""

import contextlib
import fcntl
import json
import os
import pathlib
import re
import shutil
import stat
import uuid
from collections.abc import Iterator
from typing import Any

from absl import logging

from zjax.errors import ConfigError, Problem, ZjaxError

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
    """Reads the lines of a file, and warns of a last line that was cut off."""
    *lines, torn = read_text(path, max_bytes).split("\n")
    if torn:
        logging.warning("%s: the last line was cut off and is left out", path)
    return lines


def append_line(path: pathlib.Path, line: str) -> None:
    """Adds a line to a file, in place of a last line that was cut off."""
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


def sync_directory(path: pathlib.Path) -> None:
    """Syncs the names in a directory to disk."""
    _sync(path)


def sync_tree(path: pathlib.Path) -> None:
    """Syncs all files and names below a directory to disk."""
    for folder, _, names in os.walk(path):
        for name in (*names, "."):
            _sync(pathlib.Path(folder, name))


def make_directory(path: pathlib.Path) -> None:
    """Creates a directory, durably: a crash leaves it, and its parents, in place."""
    missing = _missing(path)
    path.mkdir(parents=True, exist_ok=True)
    for each in missing:
        sync_directory(each.parent)


@contextlib.contextmanager
def new_file(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields the path of a file to write, which replaces `path` once it is on disk."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        make_directory(path.parent)
        yield partial
        _sync(partial)
        os.replace(partial, path)
        sync_directory(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


@contextlib.contextmanager
def new_directory(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a directory to fill, which becomes `path` once it is on disk.

    First removes what killed processes have left of the same directory. A lock tells
    them from processes that live, also on other hosts.
    """
    missing, partial = _missing(path.parent), None
    try:
        make_directory(path.parent)
        _remove_leftovers(path)
        with _locked_directory(path) as partial:
            yield partial
            sync_tree(partial)
            os.replace(partial, path)
        sync_directory(path.parent)
    except BaseException:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)
        for folder in missing:
            with contextlib.suppress(OSError):  # another process may use it by now
                folder.rmdir()
        raise


def _missing(path: pathlib.Path) -> list[pathlib.Path]:
    """Lists a directory and those of its parents that do not exist, innermost first."""
    return [each for each in (path, *path.parents) if not os.path.lexists(each)]


@contextlib.contextmanager
def _locked_directory(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a new directory beside `path`, locked while it is filled."""
    while True:
        partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
        partial.mkdir()
        with _opened(partial) as folder:
            # NFS gives a shared lock alone to what is open for reading.
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(folder, fcntl.LOCK_SH)
            if os.path.lexists(partial):  # else removed before it was locked
                yield partial
                return


def _remove_leftovers(path: pathlib.Path) -> None:
    """Removes directories of `new_directory` whose process no longer lives."""
    pattern = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]+\.partial")
    for other in path.parent.iterdir():
        if pattern.fullmatch(other.name) and other.is_dir():
            with contextlib.suppress(OSError), _opened(other) as folder:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(other, ignore_errors=True)


@contextlib.contextmanager
def _opened(path: pathlib.Path) -> Iterator[int]:
    """Opens a file or directory for reading."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _sync(path: pathlib.Path) -> None:
    """Syncs a file, or the names in a directory, to disk."""
    with _opened(path) as descriptor:
        os.fsync(descriptor)


SETTINGS = (
    "directory",
    "zero.nvme_paths",
    "data.path",
    "checkpoint.init_from",
    "lora.init_from",
    "distill.teacher",
    "curriculum.metrics.index",
)
"""Settings that are paths; those of each entry of a tuple are named without its number.
"""
OPTIONAL = (
    *("data.path", "checkpoint.init_from", "lora.init_from"),
    "distill.teacher",
)
"""Settings among them that may be empty."""
CHECKED_LATER = ("curriculum.metrics.index",)
"""Settings among them whose checks name the file that is missing."""

_MAX_NAME, _MAX_PATH = 255, 4_000
_SCHEME = re.compile(r"\s*[A-Za-z](:/|[A-Za-z0-9+.-]+:)/")
"""Also with one slash, as `pathlib` drops the second; `c:/` does not match."""
_VARIABLE = re.compile(r"\$(?:([A-Za-z_][A-Za-z0-9_]*)|\{([^}]*)\})")


def local_path(
    field: str,
    path: str | os.PathLike[str],
    error: type[ZjaxError] = ConfigError,
    *,
    creates: bool = False,
) -> str:
    """Expands `~`, `~user`, `$VAR` and `${VAR}`, and refuses what is no path of a disk.

    Example:
        >>> local_path("directory", "runs/a")
        'runs/a'
        >>> local_path("directory", "gs://bucket/a")
        Traceback (most recent call last):
        zjax.errors.ConfigError: directory='gs://bucket/a' is not a path of a file \
system; give one on a disk, or where the bucket is mounted
    """
    given = os.fspath(path)
    if not given:
        raise error(Problem(field, "", "is empty", "give a path; . is this directory"))
    if problems := _variable_problems(field, given):
        raise error(*problems)
    path = _VARIABLE.sub(lambda found: os.environ[found[1] or found[2]], given)
    if _SCHEME.match(path):
        problem = "is not a path of a file system"
        remedy = "give one on a disk, or where the bucket is mounted"
        raise error(Problem(field, given, problem, remedy))
    fault = _fault(path, creates)
    if fault:
        raise error(Problem(field, given, fault, "give a path that can be opened"))
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        home, _, _ = path.partition("/")
        problem = f"begins with {home}, which names no home"
        remedy = "give the whole path, or begin it with ./"
        raise error(Problem(field, given, problem, remedy))
    return expanded


def _variable_problems(field: str, path: str) -> list[Problem]:
    """Refuses variables that are unset or empty, or whose values name others."""
    problems = []
    for found in _VARIABLE.finditer(path):
        name = found[1] or found[2]
        value = os.environ.get(name)
        if not value:
            problem = (
                f"needs ${name}, which is {'not set' if value is None else 'empty'}"
            )
            problems.append(Problem(field, path, problem, "set it, or write the path"))
        elif _VARIABLE.search(value):
            problem = f"needs ${name}, whose value {value!r} names another variable"
            problems.append(Problem(field, path, problem, "write the path in it"))
    return problems


def _fault(path: str, creates: bool) -> str:
    """Why the operating system refuses a path; empty if it does not."""
    if "\0" in path:
        return "holds a NUL"
    try:
        encoded = os.fsencode(path)
    except UnicodeEncodeError:
        return "holds half a character (a lone surrogate)"
    longest = max(map(len, encoded.split(b"/")))
    is_long = longest > _MAX_NAME or len(encoded) > _MAX_PATH
    return "is too long" if is_long and not creates else ""
