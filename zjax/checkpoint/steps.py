"""The directories of steps: what makes one complete, and how it comes and goes.

A step is written under a name that starts with a dot, and gets its own by one rename
once all its files are kept by the file system. It goes by a rename, too, before the
first of its files does.
"""

import itertools
import os
import pathlib
import shutil
from typing import Any

from zjax.checkpoint import sums
from zjax.checkpoint.sums import SUMS_FILE
from zjax.reading import MOST_INDEX_BYTES, parse_json, read_text

STATE, INDEX = "state", "index/metadata"
"""What a step holds: what Orbax wrote, and what JSON can hold."""
FORMAT, WITHOUT_SUMS = 2, 1
"""Of the index; steps of the older form have no checksums."""
_SAVING, _DELETED = ".saving-", ".deleted-"
_saves = itertools.count(1)
"""Numbers of the saves of this process, by any store."""
_OF_ORBAX = "*.orbax-checkpoint-tmp*"
_OLD_FILES = (f"{STATE}/_METADATA", f"{STATE}/manifest.ocdbt", INDEX)


def named_steps(directory: pathlib.Path) -> list[int]:
    """The steps that have directories, complete or not.

    Args:
        directory: Where they lie; it need not exist.

    Returns:
        Their numbers, ascending.
    """
    if not directory.is_dir():
        return []
    names = (path.name for path in directory.iterdir() if path.is_dir())
    numbers = [int(name) for name in names if name.isascii() and name.isdigit()]
    return sorted(number for number in numbers if (directory / str(number)).is_dir())


def find_missing(path: pathlib.Path) -> str:
    """Looks for every file of a step, without reading it.

    Args:
        path: The directory of the step.

    Returns:
        What it lacks; empty if it is complete.
    """
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
        form = read_index(path)["format"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""  # those who ask for what is in it say what is wrong
    return f"{SUMS_FILE} is missing" if form == FORMAT else ""


def has_sums(path: pathlib.Path) -> bool:
    """Whether a step has checksums.

    Args:
        path: The directory of the step.

    Returns:
        False for those that were saved without, and those whose checksums are lost.
    """
    return (path / SUMS_FILE).exists()


def read_index(path: pathlib.Path) -> Any:
    """What JSON holds of a step.

    Args:
        path: The directory of the step.

    Returns:
        It, as it is.

    Raises:
        OSError: It cannot be read.
        ValueError: It is no JSON, or larger than any that was written.
    """
    return parse_json(read_text(path / INDEX, MOST_INDEX_BYTES))


def partial_path(directory: pathlib.Path, step: int) -> pathlib.Path:
    """Where a step is while it is being written.

    Args:
        directory: Where the steps lie.
        step: The number of the step.

    Returns:
        Its directory, the same in all processes and another one at each call: threads
        of a save that failed may still write into theirs.
    """
    return directory / f"{_SAVING}{step}-{next(_saves)}"


def begin(path: pathlib.Path) -> None:
    """Makes the directory into which a step is written; removes what others left.

    Args:
        path: Of `partial_path`; the directory above is made where it is missing.

    Raises:
        OSError: It cannot be made.
    """
    directory = path.parent
    new = [at for at in (directory, *directory.parents) if not at.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for at in new:
        sync_directory(at.parent)
    clear(directory)
    (path / STATE).mkdir(parents=True)
    (path / INDEX).parent.mkdir()


def clear(directory: pathlib.Path) -> None:
    """Removes what is left of steps that were being written or deleted.

    Args:
        directory: Where the steps lie.
    """
    for links in (directory / sums.LINKED).glob("*"):
        if not (directory / links.name).is_dir():
            shutil.rmtree(links, ignore_errors=True)
    patterns = (f"{_SAVING}*", f"{_DELETED}*", _OF_ORBAX)
    for path in itertools.chain(*map(directory.glob, patterns)):
        shutil.rmtree(path, ignore_errors=True)


def commit(path: pathlib.Path, step: int) -> None:
    """Gives a step its name, once the file system keeps all of it.

    Args:
        path: Of `partial_path`; its files are kept already.
        step: The number of the step.

    Raises:
        OSError: The file system does not say that it keeps them.
    """
    for folder, _, _ in os.walk(path):
        sync_directory(pathlib.Path(folder))
    target = path.parent / str(step)
    if target.exists():  # incomplete, or this save would have been refused
        remove(target)
    os.rename(path, target)
    sync_directory(path.parent)


def remove(path: pathlib.Path) -> None:
    """Deletes a step; its name goes before the first of its files.

    Args:
        path: The directory of the step.

    Raises:
        OSError: It cannot be renamed.
    """
    gone = path.with_name(f"{_DELETED}{path.name}")
    shutil.rmtree(gone, ignore_errors=True)
    os.rename(path, gone)
    sync_directory(path.parent)
    shutil.rmtree(gone, ignore_errors=True)
    shutil.rmtree(old_links(path), ignore_errors=True)


def old_links(path: pathlib.Path) -> pathlib.Path:
    """Where steps without checksums have the files of arrays on disks.

    Args:
        path: The directory of the step.

    Returns:
        A directory beside it.
    """
    return path.parent / sums.LINKED / path.name


def kept(losses: dict[int, float | None], last: int, best: int) -> set[int]:
    """Which of some steps are to be kept.

    Args:
        losses: Validation losses by step; None where there is none.
        last: Newest steps kept.
        best: Steps of lowest loss kept; of equal ones the older.

    Returns:
        Their numbers.

    Example:
        >>> kept({1: 0.5, 2: None, 3: 0.7, 4: 0.9}, last=1, best=1)
        {1, 4}
    """
    known = {step: loss for step, loss in losses.items() if loss is not None}
    ranked = sorted(known, key=lambda step: (known[step], step))
    return {*sorted(losses)[-last:], *ranked[:best]}


def sync_directory(path: pathlib.Path) -> None:
    """Has the file system keep the names in a directory.

    Args:
        path: The directory.

    Raises:
        OSError: It does not say that it does.
    """
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
