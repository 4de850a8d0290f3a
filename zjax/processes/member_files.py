"""Files of the processes of a run: the lock, and a record of each process."""

import contextlib
import dataclasses
import datetime
import errno
import fcntl
import functools
import itertools
import json
import os
import pathlib
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, get_origin, get_type_hints

import jax
from absl import logging

from zjax.errors import CHOOSE_DIRECTORY, Problem, ProcessError, find_remedy
from zjax.files import make_directory, parse_json, read_text
from zjax.processes.barrier import barrier

LOCK_FILE = "lock.json"
# Errors of flock on file systems without locks.
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_held: dict[pathlib.Path, tuple[int, int]] = {}
"""File descriptor and nesting depth, by lock file."""
_holds = itertools.count(1)
"""Counts calls of `hold`, equally in all processes, to name barriers."""


@contextlib.contextmanager
def hold(directory: str) -> Iterator[None]:
    """Locks the run's directory during the enclosed work; process 0 does so for all.

    Nests: this process may hold the lock already. If another run holds it, all
    processes raise.
    """
    with barrier(f"zjax-hold-{next(_holds)}"):
        path = None if jax.process_index() else acquire(directory)
    try:
        yield
    finally:
        if path is not None:
            _release(path)


def acquire(directory: str) -> pathlib.Path:
    """Locks the run's directory, created if missing, until this process ends.

    Returns the path of the lock file.
    """
    path = pathlib.Path(directory).resolve() / LOCK_FILE
    # A second flock by this process, on a new descriptor, would conflict with the
    # first.
    if path in _held:
        descriptor, depth = _held[path]
        _held[path] = descriptor, depth + 1
        return path
    try:
        make_directory(path.parent)
        # Not truncated: the file still names the current holder.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise _unusable(directory, error) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        problem = f"is in use by another run ({_describe_holder(path)})"
        remedy = "wait until it ends, or use another directory"
        raise ProcessError(Problem("directory", directory, problem, remedy)) from error
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            os.close(descriptor)
            raise _unusable(directory, error) from error
        logging.warning(
            "directory=%r is on a file system without locks (%s): a second run in it "
            "would not be noticed",
            directory,
            error.strerror,
        )
    _write_holder(descriptor)
    _held[path] = descriptor, 1
    return path


def _release(path: pathlib.Path) -> None:
    """Undoes one `acquire`; the last one unlocks."""
    descriptor, depth = _held.pop(path)
    if depth > 1:
        _held[path] = descriptor, depth - 1
        return
    with contextlib.suppress(OSError):  # must not hide the error that ended the run
        os.truncate(descriptor, 0)
    os.close(descriptor)


def _unusable(directory: str, error: OSError) -> ProcessError:
    """Error for a directory that cannot be created or written."""
    problem = f"cannot be used ({error.strerror})"
    remedy = find_remedy(error, elsewhere=CHOOSE_DIRECTORY)
    return ProcessError(Problem("directory", directory, problem, remedy))


def _write_holder(descriptor: int) -> None:
    """Writes host, process id and time of the holder into the lock file."""
    since = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    holder = {"host": socket.gethostname(), "pid": os.getpid(), "since": since}
    with contextlib.suppress(OSError):  # the lock works on a full disk, too
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(holder).encode(), 0)


def _describe_holder(path: pathlib.Path) -> str:
    """Describes the holder of a lock by the lock file."""
    try:
        holder = parse_json(read_text(path))
        return f"host {holder['host']}, pid {holder['pid']}, since {holder['since']}"
    # Between flock and the write, the file is empty.
    except (OSError, ValueError, KeyError, TypeError):
        return f"which has just locked {path}"


def _forget() -> None:
    """Closes the locks in a forked child, so that a lock ends with the parent."""
    for descriptor, _ in _held.values():
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget)


MEMBERS_VARIABLE = "ZJAX_MEMBERS_DIRECTORY"
"""Environment variable with the directory of member files that a parent process
watches."""
T = TypeVar("T")
_MAX_LISTED = 3


@dataclasses.dataclass(frozen=True)
class Member:
    """A process of a run."""

    process_id: int
    host: str
    pid: int
    directory: str
    gpus: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class End:
    """How a process ended.

    Args:
        rank: Order of causes before consequences: 0 killed or hung, 1 failed in Python,
            2 lost its peers, 3 aborted by the runtime.
        reason: Text for the user.
        at_seconds: Time, in seconds since 1970.
    """

    process_id: int
    rank: int
    reason: str
    at_seconds: float = dataclasses.field(default_factory=time.time)

    @property
    def is_cause(self) -> bool:
        """Whether the end is not a consequence of another process's end."""
        return self.rank < 2


def name_processes(process_ids: Sequence[int]) -> str:
    """Names the first few of some processes, for a message.

    Example:
        >>> name_processes([1]), name_processes([1, 2, 5, 6, 7])
        ('process 1', 'processes 1, 2, 5 and 2 more')
    """
    if len(process_ids) == 1:
        return f"process {process_ids[0]}"
    shown = ", ".join(map(str, process_ids[:_MAX_LISTED]))
    more = len(process_ids) - _MAX_LISTED
    return f"processes {shown}" + (f" and {more} more" if more > 0 else "")


def shared_directory(directory: str) -> pathlib.Path:
    """Directory of the member files of a run, shared by all processes."""
    return pathlib.Path(directory).absolute() / "processes"


def watched_directory() -> pathlib.Path | None:
    """Directory of member files that the parent process watches; None without one."""
    watched = os.environ.get(MEMBERS_VARIABLE)
    return pathlib.Path(watched) if watched else None


def write_member(member: Member, directory: pathlib.Path) -> None:
    """Writes a member file, and deletes the end of the process in an earlier run."""
    _write(directory / f"{member.process_id}.member.json", member)
    (directory / f"{member.process_id}.end.json").unlink(missing_ok=True)


def write_end(end: End, member: Member | None, directory: pathlib.Path) -> None:
    """Writes how a process ended to the directory of the parent.

    The run's directory gets a copy if the process took part in the run: a process that
    was refused must not report into another run.
    """
    paths = [directory]
    if member is not None:
        shared = shared_directory(member.directory)
        paths += [shared] * (read_members(shared).get(member.process_id) == member)
    for path in paths:
        _write(path / f"{end.process_id}.end.json", end)


def _write(target: pathlib.Path, record: Member | End) -> None:
    """Writes a record atomically."""
    target.parent.mkdir(parents=True, exist_ok=True)
    # By process id: parent and child may write the record at once.
    partial = target.with_name(f"{target.name}.{os.getpid()}")
    partial.write_text(json.dumps(dataclasses.asdict(record)))
    os.replace(partial, target)


def read_members(path: pathlib.Path) -> dict[int, Member]:
    """Reads the member files of a directory, by process number."""

    def member(record: dict) -> Member:
        return Member(**{**record, "gpus": tuple(record.get("gpus", ()))})

    return {found.process_id: found for found in _read(path, "member", member)}


def read_ends(path: pathlib.Path, since_seconds: float) -> list[End]:
    """Reads the ends since `since_seconds`, the most likely cause first."""
    ends = _read(path, "end", lambda record: End(**record))
    fresh = [end for end in ends if end.at_seconds >= since_seconds]
    # Causes first, then the earliest.
    return sorted(fresh, key=lambda end: (end.rank, end.at_seconds))


def last_checkpoint(directory: str) -> int | None:
    """Step of a run's newest checkpoint, or None."""
    path = pathlib.Path(directory) / "checkpoints"
    steps = [int(p.name) for p in path.glob("*") if p.name.isdigit()]
    return max(steps, default=None)


def _read(path: pathlib.Path, kind: str, make: Callable[[dict], T]) -> list[T]:
    """Reads the valid records of one kind in a directory."""
    records = []
    for file in sorted(path.glob(f"*.{kind}.json")):
        try:
            record = make(parse_json(read_text(file)))
            _check_types(record)
        except FileNotFoundError:  # replaced just now
            continue
        except (ValueError, TypeError, AttributeError):
            _warn_once(file)
            continue
        records.append(record)
    return records


@functools.cache
def _warn_once(file: pathlib.Path) -> None:
    """Warns of a file that is no valid record, once per file."""
    logging.warning("%s is not a record of this version and is ignored", file)


def _check_types(record: Any) -> None:
    """Raises TypeError if a field of a record has another type than declared."""
    hints = get_type_hints(type(record))
    for name, value in vars(record).items():
        kind = get_origin(hints[name]) or hints[name]
        if not isinstance(value, (int, float) if kind is float else kind):
            raise TypeError(name)
