"""Member files: small records of the host and the end of each process of a run.

The files outlive the processes. The runtime ends the survivors of a dead process from a
C++ thread, which Python cannot catch; member files tell what happened.
"""

import dataclasses
import functools
import json
import os
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, get_origin, get_type_hints

from absl import logging

from zjax.files import parse_json, read_text

MEMBERS_VARIABLE = "ZJAX_MEMBERS_DIRECTORY"
"""Environment variable with the directory of member files that a parent process
watches."""
T = TypeVar("T")
_MAX_LISTED = 3
"""Maximum number of processes that a message lists."""


@dataclasses.dataclass(frozen=True)
class Member:
    """A process of a run.

    Args:
        process_id: Rank in the run.
        host: Host name.
        pid: Process id on the host.
        directory: Absolute path of the run's directory.
        gpus: Names of the GPUs in use; empty if the process owns all visible GPUs.
    """

    process_id: int
    host: str
    pid: int
    directory: str
    gpus: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class End:
    """How a process ended.

    Args:
        process_id: Rank in the run.
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
