"""Files and directories that get their names once they are complete and on disk."""

import contextlib
import fcntl
import os
import pathlib
import re
import shutil
import uuid
from collections.abc import Iterator


def sync_directory(path: pathlib.Path) -> None:
    """Syncs the names in a directory to disk."""
    _sync(path)


def sync_tree(path: pathlib.Path) -> None:
    """Syncs all files and names below a directory to disk."""
    for folder, _, names in os.walk(path):
        for name in (*names, "."):
            _sync(pathlib.Path(folder, name))


def make_directory(path: pathlib.Path) -> None:
    """Creates a directory, durably: a crash leaves it, and its parents, in place.

    Args:
        path: Directory; missing parents are created.

    Raises:
        OSError: It cannot be created.
    """
    missing = _missing(path)
    path.mkdir(parents=True, exist_ok=True)
    for each in missing:
        sync_directory(each.parent)


@contextlib.contextmanager
def new_file(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields the path of a file to write, which replaces `path` once it is on disk.

    Args:
        path: The file; missing parents are created.

    Yields:
        A path beside it, removed if the enclosed work raises.

    Raises:
        OSError: The file system refuses it.
    """
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

    Args:
        path: The directory, missing or empty; missing parents are created.

    Yields:
        A directory beside it, removed if the enclosed work raises, as are the parents
        that were created.

    Raises:
        OSError: The file system refuses it.
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
