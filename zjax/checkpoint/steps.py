"""Directories of steps: naming, completeness, commit, removal, and errors."""

import functools
import inspect
import itertools
import json
import logging
import os
import pathlib
import shutil
import sys
from collections.abc import Mapping
from typing import Any

import jax

from zjax.checkpoint import sums
from zjax.checkpoint.sums import SUMS_FILE
from zjax.errors import (
    PROCESS_REMEDIES,
    CheckpointError,
    Problem,
    find_errno,
    find_remedy,
)
from zjax.files import (
    MAX_INDEX_BYTES,
    make_directory,
    parse_json,
    read_text,
    sync_directory,
)
from zjax.processes.barrier import describe_error, root_of


@functools.cache
def hide_orbax_errors() -> None:
    """Stops Orbax's threads and tasks from printing errors, until the process ends.

    Such errors may come at any time while training; `Store` raises the errors that
    matter. Warnings, and the output of other packages, are unaffected.
    """
    logging.getLogger("absl").addFilter(_is_not_from_orbax)
    logging.getLogger("asyncio").addFilter(_is_not_from_orbax)
    # Errors of abandoned coroutines reach this hook, not logging.
    before = sys.unraisablehook

    def show(unraisable: Any) -> None:
        if not _is_abandoned(unraisable):
            before(unraisable)

    sys.unraisablehook = show


def _is_not_from_orbax(record: logging.LogRecord) -> bool:
    """Whether a log record is not an error of Orbax."""
    text = logging.Formatter().format(record)
    if record.name == "asyncio":  # an abandoned read names no caller
        return "orbax" not in text and "tensorstore_spec" not in text
    return not (record.exc_info and "orbax" in text)


def _is_abandoned(unraisable: Any) -> bool:
    """Whether a read or write was abandoned after another read or write failed."""
    source, error = unraisable.object, unraisable.exc_value
    if inspect.iscoroutine(source):
        return "orbax" in source.cr_code.co_filename
    closed = isinstance(error, RuntimeError) and str(error) == "Event loop is closed"
    return closed and source is None


def not_a_directory(directory: pathlib.Path) -> CheckpointError:
    """Returns the error for a path that is a file or lies under a file."""
    problem = "is not a directory"
    remedy = "name a directory, or one that can be created"
    return CheckpointError(
        Problem("checkpoint.directory", str(directory), problem, remedy)
    )


def empty(directory: pathlib.Path) -> CheckpointError:
    """Returns the error for a directory without a complete step."""
    problem = "holds no complete checkpoint"
    remedy = "give the directory that a run saved into, or start a new run"
    return CheckpointError(
        Problem("checkpoint.directory", str(directory), problem, remedy)
    )


def step_error(step: int, problem: str, remedy: str) -> CheckpointError:
    """Returns the error about one step."""
    return CheckpointError(Problem("checkpoint.step", step, problem, remedy))


def unsaved_extra(extra: object, error: Exception) -> CheckpointError:
    """Returns the error for values that a checkpoint cannot hold."""
    problem = f"cannot be written as JSON ({error})"
    remedy = "give a dict of numbers, texts, lists and dicts"
    return CheckpointError(Problem("extra", type(extra).__name__, problem, remedy))


def disappeared(directory: pathlib.Path, step: int) -> CheckpointError:
    """Returns the error for a directory that disappeared since the last save."""
    problem = f"could not be written: {directory} is gone"
    remedy = "mount or make the directory again, and run again"
    return step_error(step, problem, remedy)


def unwritten(
    directory: pathlib.Path, step: int, latest: int | None, error: Exception
) -> CheckpointError:
    """Returns the error for a failed save; `latest` is the newest complete step."""
    before = "there is none before it" if latest is None else f"step {latest} is intact"
    remedy = find_remedy(error)
    if isinstance(root_of(error), jax.errors.JaxRuntimeError):
        # JAX's text is about a lost process or device, not about files.
        remedy = "find the process that ended or the device that failed"
    problem = f"could not be written to {directory} ({describe_error(error)})"
    return step_error(step, problem, f"{remedy}, and run again: {before}")


def damaged(
    directory: pathlib.Path, step: int, before: int | None, error: Exception
) -> CheckpointError:
    """Returns the error for unreadable files; `before` is the newest earlier step."""
    # This process may lack rights or descriptors: nothing is to be deleted then.
    may_be_sound = find_errno(error) in PROCESS_REMEDIES
    remedy = (
        f"{find_remedy(error)}, and run again"
        if may_be_sound
        else "there is no step before it: start in another directory"
        if before is None
        else f"delete {directory / str(step)} to go on from step {before}"
    )
    problem = f"cannot be read from {directory} ({describe_error(error)})"
    return step_error(step, problem, remedy)


STATE, INDEX = "state", "index/metadata"
"""Paths inside a step: Orbax's files and the JSON index."""
FORMAT, WITHOUT_SUMS = 2, 1
"""Formats of the index; steps of the older format have no checksums."""
_MAX_DEPTH = 500
"""Nesting of the index that a JSON parser accepts at any depth of the call stack."""
_SAVING, _DELETED = ".saving-", ".deleted-"
_saves = itertools.count(1)
"""Counts the saves of this process, over all stores."""
_ORBAX_PARTIAL = "*.orbax-checkpoint-tmp*"
_OLD_FILES = (f"{STATE}/_METADATA", f"{STATE}/manifest.ocdbt", INDEX)


def named_steps(directory: pathlib.Path) -> list[int]:
    """Numbers of the step directories, complete or not, ascending."""
    if not directory.is_dir():
        return []
    names = (path.name for path in directory.iterdir() if path.is_dir())
    numbers = [int(name) for name in names if name.isascii() and name.isdigit()]
    # Drops a name such as 08, which `path` of a step would not find again.
    return sorted(number for number in numbers if (directory / str(number)).is_dir())


def find_steps(place: pathlib.Path) -> pathlib.Path | None:
    """Directory of a run's steps: the given directory, or `checkpoints` inside."""
    found = (x for x in (place, place / "checkpoints") if named_steps(x))
    return next(found, None)


def find_missing(path: pathlib.Path) -> str:
    """Describes missing or short files of a step, unread; empty if complete."""
    if has_sums(path):
        try:
            return sums.find_missing(path, sums.read_sums(path / SUMS_FILE))
        except (OSError, ValueError) as error:
            return str(error)
    for name in _OLD_FILES:
        try:
            if not os.stat(path / name).st_size:
                return f"{name} is empty"
        except OSError as error:
            return f"{name} is missing ({error.strerror})"
    try:
        index_format = read_index(path)["format"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""  # reading the index raises the error
    return f"{SUMS_FILE} is missing" if index_format == FORMAT else ""


def has_sums(path: pathlib.Path) -> bool:
    """Whether a step has checksums; steps of an older version have none."""
    return (path / SUMS_FILE).exists()


def read_index(path: pathlib.Path) -> Any:
    """Reads the JSON index of a step."""
    return parse_json(read_text(path / INDEX, MAX_INDEX_BYTES))


def format_index(index: Mapping[str, Any]) -> str:
    """Formats the JSON index; a ValueError refuses what `read_index` cannot read."""
    try:
        text = json.dumps(index)
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from error
    values: list[tuple[Any, int]] = [(index, 1)]
    while values:
        value, depth = values.pop()
        if depth > _MAX_DEPTH:
            raise ValueError(f"it is nested deeper than {_MAX_DEPTH} levels")
        if isinstance(value, Mapping):
            for key in value:  # JSON would turn 1 into "1"
                if not isinstance(key, str):
                    raise ValueError(f"the key {key!r} is not a text")
            values += [(x, depth + 1) for x in value.values()]
        elif isinstance(value, list | tuple):
            values += [(x, depth + 1) for x in value]
    if len(text) > MAX_INDEX_BYTES:  # ASCII
        raise ValueError(f"it has more than {MAX_INDEX_BYTES:,} bytes")
    return text


def partial_path(directory: pathlib.Path, step: int) -> pathlib.Path:
    """Directory of a step while it is being written.

    The path is equal in all processes and new at each call, since threads of a failed
    save may still write into the old directory.
    """
    return directory / f"{_SAVING}{step}-{next(_saves)}"


def begin(path: pathlib.Path) -> None:
    """Creates the directory of `partial_path`, and removes leftovers of old saves."""
    directory = path.parent
    make_directory(directory)
    clear(directory)
    (path / STATE).mkdir(parents=True)
    (path / INDEX).parent.mkdir()


def clear(directory: pathlib.Path) -> None:
    """Removes leftovers of unfinished saves and removals."""
    # An interrupted removal leaves the links of an old step behind.
    for links in (directory / sums.LINKED).glob("*"):
        if not (directory / links.name).is_dir():
            shutil.rmtree(links, ignore_errors=True)
    patterns = (f"{_SAVING}*", f"{_DELETED}*", _ORBAX_PARTIAL)
    for path in itertools.chain(*map(directory.glob, patterns)):
        shutil.rmtree(path, ignore_errors=True)


def commit(path: pathlib.Path, step: int) -> None:
    """Syncs the directories of a step with synced files, and renames the step."""
    # Entries before the rename: after a crash, a step with its final name is complete.
    for folder, _, _ in os.walk(path):
        sync_directory(pathlib.Path(folder))
    target = path.parent / str(step)
    if target.exists():  # incomplete, or this save would have been refused
        remove(target)
    os.rename(path, target)
    sync_directory(path.parent)


def set_aside(directory: pathlib.Path, step: int) -> list[pathlib.Path]:
    """Renames the steps after `step`, where a run goes on; returns new paths."""
    moved = []
    # Newest first: an interruption leaves no gap before a later step.
    for later in reversed([n for n in named_steps(directory) if n > step]):
        target = path_aside(directory, later)
        links = old_links(directory / str(later))
        if links.is_dir():  # `clear` removes links without a step
            os.rename(links, old_links(target))
        os.rename(directory / str(later), target)
        moved.append(target)
    sync_directory(directory)
    return moved[::-1]


def path_aside(directory: pathlib.Path, step: int, suffix: str = "") -> pathlib.Path:
    """Returns a free path for what a step leaves behind where a run goes on earlier."""
    names = (f"set-aside-{step}" + f".{n}" * (n > 0) for n in itertools.count())
    paths = (directory / f"{name}{suffix}" for name in names)
    return next(path for path in paths if not path.exists())


def remove(path: pathlib.Path) -> None:
    """Deletes a step; the name disappears before the files do."""
    deleted = path.with_name(f"{_DELETED}{path.name}")
    shutil.rmtree(deleted, ignore_errors=True)
    os.rename(path, deleted)
    sync_directory(path.parent)
    shutil.rmtree(deleted, ignore_errors=True)
    shutil.rmtree(old_links(path), ignore_errors=True)


def old_links(path: pathlib.Path) -> pathlib.Path:
    """Directory of linked files of a step without checksums."""
    return path.parent / sums.LINKED / path.name


def select_kept(losses: dict[int, float | None], last: int, best: int) -> set[int]:
    """Steps to keep: the `last` newest, and the `best` of lowest loss.

    Example:
        >>> select_kept({1: 0.5, 2: None, 3: 0.7, 4: 0.9}, last=1, best=1)
        {1, 4}
    """
    known = {step: loss for step, loss in losses.items() if loss is not None}
    # Of equal losses, the older step is better.
    ranked = sorted(known, key=lambda step: (known[step], step))
    return {*sorted(losses)[-last:], *ranked[:best]}
