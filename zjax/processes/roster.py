"""Who runs where, and who ended how: small files that outlive the processes.

The runtime ends the survivors of a dead process from a C++ thread, with a stack trace
that Python cannot catch. Whoever is left reads here what really happened.
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

from zjax.reading import parse_json, read_text

ROSTER_VARIABLE = "ZJAX_ROSTER"
"""Environment variable by which a parent names the directory it watches."""
T = TypeVar("T")
_NAMED = 3
"""Processes that a message names one by one."""


@dataclasses.dataclass(frozen=True)
class Member:
    """A process of a run.

    Args:
        process_id: Its number.
        host: Where it runs.
        pid: Its number there.
        directory: The run's directory, absolute.
        gpus: Names of the GPUs it owns; empty where it owns all that it sees.
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
        process_id: Its number.
        rank: How likely it is a cause and not a consequence, 0 the most: 0 killed or
            left, 1 failed in Python, 2 lost its peers, 3 aborted by the runtime.
        reason: What to tell.
        at_seconds: When, in seconds since 1970.
    """

    process_id: int
    rank: int
    reason: str
    at_seconds: float = dataclasses.field(default_factory=time.time)

    @property
    def is_cause(self) -> bool:
        """Whether it did not follow from the end of another."""
        return self.rank < 2


def name_processes(process_ids: Sequence[int]) -> str:
    """Names processes in a message.

    Args:
        process_ids: One number or more.

    Returns:
        The first of them, and how many more there are.

    Example:
        >>> name_processes([1]), name_processes([1, 2, 5, 6, 7])
        ('process 1', 'processes 1, 2, 5 and 2 more')
    """
    if len(process_ids) == 1:
        return f"process {process_ids[0]}"
    shown = ", ".join(map(str, process_ids[:_NAMED]))
    more = len(process_ids) - _NAMED
    return f"processes {shown}" + (f" and {more} more" if more > 0 else "")


def shared_place(directory: str) -> pathlib.Path:
    """Where the processes of a run tell each other who they are.

    Args:
        directory: The run's directory.

    Returns:
        A directory in it.
    """
    return pathlib.Path(directory).absolute() / "processes"


def watched_place() -> pathlib.Path | None:
    """Where the parent of this process looks.

    Returns:
        A directory; None where no parent watches.
    """
    watched = os.environ.get(ROSTER_VARIABLE)
    return pathlib.Path(watched) if watched else None


def write_member(member: Member, directory: pathlib.Path) -> None:
    """Writes down a process where others look for it, in place of one of before.

    Args:
        member: The process.
        directory: That of its parent, or that of its run.
    """
    _write(directory / f"{member.process_id}.member.json", member)
    (directory / f"{member.process_id}.end.json").unlink(missing_ok=True)


def write_end(end: End, member: Member | None, directory: pathlib.Path) -> None:
    """Writes down how a process ended.

    Args:
        end: How it ended.
        member: Who it was, where it wrote itself down.
        directory: That of its parent. The run's directory is told too, if the process
            took part in the run there: one that was turned away has no say in it.
    """
    paths = [directory]
    if member is not None:
        shared = shared_place(member.directory)
        paths += [shared] * (read_members(shared).get(member.process_id) == member)
    for path in paths:
        _write(path / f"{end.process_id}.end.json", end)


def _write(target: pathlib.Path, record: Member | End) -> None:
    """Whole or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.{os.getpid()}")
    partial.write_text(json.dumps(dataclasses.asdict(record)))
    os.replace(partial, target)


def read_members(path: pathlib.Path) -> dict[int, Member]:
    """The processes that wrote themselves down.

    Args:
        path: A directory of records.

    Returns:
        Members by number.
    """

    def member(record: dict) -> Member:
        return Member(**{**record, "gpus": tuple(record.get("gpus", ()))})

    return {found.process_id: found for found in _read(path, "member", member)}


def read_ends(path: pathlib.Path, since_seconds: float) -> list[End]:
    """The ends that were written down in this run.

    Args:
        path: A directory of records.
        since_seconds: When the run started.

    Returns:
        Ends, the most likely cause first.
    """
    ends = _read(path, "end", lambda record: End(**record))
    fresh = [end for end in ends if end.at_seconds >= since_seconds]
    return sorted(fresh, key=lambda end: (end.rank, end.at_seconds))


def last_checkpoint(directory: str) -> int | None:
    """The newest checkpoint of a run.

    Args:
        directory: The run's directory.

    Returns:
        Its step, or None where there is none.
    """
    path = pathlib.Path(directory) / "checkpoints"
    steps = [int(p.name) for p in path.glob("*") if p.name.isdigit()]
    return max(steps, default=None)


def _read(path: pathlib.Path, kind: str, make: Callable[[dict], T]) -> list[T]:
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
    logging.warning("%s is no record of this version: it is left out", file)


def _check_types(record: Any) -> None:
    hints = get_type_hints(type(record))
    for name, value in vars(record).items():
        kind = get_origin(hints[name]) or hints[name]
        if not isinstance(value, (int, float) if kind is float else kind):
            raise TypeError(name)
