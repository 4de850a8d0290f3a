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

from zjax.errors import ConfigError, OutputError, Problem, ZjaxError, find_remedy

MAX_TEXT_BYTES = 1 << 20
"""Maximum size of a file written by a person."""
MAX_INDEX_BYTES = 1 << 28
META_NAME = "meta.json"
"""File that describes the token files in a folder."""


def read_text(path: str | os.PathLike[str], max_bytes: int = MAX_TEXT_BYTES) -> str:
    """Reads a whole UTF-8 file of at most `max_bytes`.

    Raises:
        OSError: The file is missing, not a regular file, or cannot be read.
        ValueError: The file is larger, or not UTF-8.
    """
    # Opening a FIFO would wait forever.
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(None, "it is not a regular file")
    with open(path, "rb") as file:
        content = file.read(max_bytes + 1)  # one more tells that the file is too large
    if len(content) > max_bytes:
        raise ValueError(f"it has more than {max_bytes:,} bytes")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError("it is not UTF-8 text") from error


def read_lines(
    path: str | os.PathLike[str], max_bytes: int = MAX_TEXT_BYTES
) -> list[str]:
    """Reads the lines of a file, and warns of a last line that was truncated."""
    *lines, torn = read_text(path, max_bytes).split("\n")
    if torn:
        logging.warning("%s: the last line was cut off and is left out", path)
    return lines


def append_line(path: pathlib.Path, line: str) -> None:
    """Appends a line to a file, in place of a last line that was truncated."""
    with path.open("a+b") as file:
        file.seek(0)
        size = sum(len(each) for each in file if each.endswith(b"\n"))
        # A crash may leave half a line, which would join the new line.
        file.truncate(size)
        file.write(line.encode() + b"\n")


def parse_json(text: str | bytes) -> Any:
    """Parses JSON.

    Raises:
        ValueError: The text is not JSON, or nested too deep.
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
    """Creates a directory and missing parents durably: all outlive a crash."""
    missing = _missing(path)
    path.mkdir(parents=True, exist_ok=True)
    for each in missing:
        # The name of a directory is an entry of the parent.
        sync_directory(each.parent)


@contextlib.contextmanager
def new_file(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a path to write beside `path`, which replaces `path` once it is on disk.

    The written file is removed if the enclosed work raises.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        make_directory(path.parent)
        yield partial
        # Before the rename: else a crash could leave `path` empty.
        _sync(partial)
        os.replace(partial, path)
        sync_directory(path.parent)
    except BaseException:  # also where the user interrupts
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


@contextlib.contextmanager
def writing(path: pathlib.Path) -> Iterator[None]:
    """Turns an OSError of the enclosed work into an `OutputError`."""
    try:
        yield
    except OSError as error:
        problem = f"cannot be written ({path.name}: {error.strerror or error})"
        remedy = f"{find_remedy(error)}, and run again"
        raise OutputError(
            Problem("directory", str(path.parent), problem, remedy)
        ) from error


@contextlib.contextmanager
def new_directory(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a directory to fill, which becomes `path` once it is on disk.

    `path` is missing or empty. First removes directories that killed processes left
    beside `path`; a lock tells dead from live processes, also on other hosts. If the
    enclosed work raises, the directory and the created parents are removed.
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
    except BaseException:  # also where the user interrupts
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)
        for folder in missing:
            with contextlib.suppress(OSError):  # another process may use it by now
                folder.rmdir()
        raise


def _missing(path: pathlib.Path) -> list[pathlib.Path]:
    """Lists a directory and the parents that do not exist, innermost first."""
    return [each for each in (path, *path.parents) if not os.path.lexists(each)]


@contextlib.contextmanager
def _locked_directory(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a new directory beside `path`, locked while it is filled."""
    while True:
        # A random name, as several processes may fill directories for one path.
        partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
        partial.mkdir()
        with _opened(partial) as folder:
            # NFS grants only shared locks on descriptors open for reading.
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
                # Fails, and suppresses the removal, while a live process holds the
                # shared lock.
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
    "zero.offload.nvme_paths",
    "data.path",
    "checkpoint.init_from",
    "lora.init_from",
    "distill.teacher",
    "curriculum.metrics.index",
    "rl.prompts",
    "rl.evaluation_prompts",
    "rl.critic.init_from",
    "rl.rewards.directory",
)
"""Settings that are paths; each entry of a tuple is named without a number."""
OPTIONAL = (
    "data.path",
    "checkpoint.init_from",
    "lora.init_from",
    "rl.prompts",
    "rl.evaluation_prompts",
    "rl.critic.init_from",
)
"""Settings of `SETTINGS` that may be empty."""
CHECKED_LATER = ("curriculum.metrics.index", "rl.rewards.directory")
"""Settings of `SETTINGS` whose checks name the file that is missing."""

# Linux allows 255 bytes a name and 4,096 a path.
_MAX_NAME, _MAX_PATH = 255, 4_000
_SCHEME = re.compile(r"\s*[A-Za-z](:/|[A-Za-z0-9+.-]+:)/")
"""Start of a URL, also with one slash, as `pathlib` drops the second; not `c:/`."""
_VARIABLE = re.compile(r"\$(?:([A-Za-z_][A-Za-z0-9_]*)|\{([^}]*)\})")


def local_path(
    field: str,
    path: str | os.PathLike[str],
    error: type[ZjaxError] = ConfigError,
    *,
    creates: bool = False,
) -> str:
    """Expands `~`, `~user`, `$VAR` and `${VAR}`, and refuses URLs and impossible paths.

    `field` names the setting in errors; `creates` means that the caller creates the
    path and reports if it is too long.
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
    """Lists variables that are unset or empty, or that name another variable."""
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
    """Describes why the operating system refuses a path; empty for a valid path."""
    if "\0" in path:
        return "holds a NUL"
    try:
        encoded = os.fsencode(path)
    except UnicodeEncodeError:
        return "holds half a character (a lone surrogate)"
    longest = max(map(len, encoded.split(b"/")))
    is_long = longest > _MAX_NAME or len(encoded) > _MAX_PATH
    return "is too long" if is_long and not creates else ""
