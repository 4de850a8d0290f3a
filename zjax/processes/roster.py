"""Who runs where, and who ended how: small files that outlive the processes.

The runtime ends the survivors of a dead process from a C++ thread, with a stack trace
that Python cannot catch. Whoever is left reads here what really happened.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import time
from collections.abc import Iterable

ROSTER_VARIABLE = "ZJAX_ROSTER"
"""Environment variable by which a parent names the directory it watches."""


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


def places(directory: str) -> tuple[pathlib.Path, ...]:
    """Where the files of a run are kept.

    Args:
        directory: The run's directory.

    Returns:
        Its `processes` directory and, under a watching parent, the parent's.
    """
    watched = os.environ.get(ROSTER_VARIABLE)
    shared = pathlib.Path(directory).absolute() / "processes"
    return (shared, pathlib.Path(watched)) if watched else (shared,)


def write(record: Member | End, paths: Iterable[pathlib.Path]) -> None:
    """Writes a record where others look for it, whole or not at all.

    Args:
        record: A member replaces what was there of an earlier run.
        paths: Directories; made where they are missing.
    """
    kind = type(record).__name__.lower()
    for path in paths:
        path.mkdir(parents=True, exist_ok=True)
        target = path / f"{record.process_id}.{kind}.json"
        partial = path / f"{target.name}.{os.getpid()}"
        partial.write_text(json.dumps(dataclasses.asdict(record)))
        os.replace(partial, target)
        if isinstance(record, Member):
            (path / f"{record.process_id}.end.json").unlink(missing_ok=True)


def read_members(path: pathlib.Path) -> dict[int, Member]:
    """The processes that wrote themselves down.

    Args:
        path: A directory of records.

    Returns:
        Members by number.
    """
    found = [Member(**record) for record in _read(path, "member")]
    return {member.process_id: member for member in found}


def read_ends(path: pathlib.Path, since_seconds: float) -> list[End]:
    """The ends that were written down in this run.

    Args:
        path: A directory of records.
        since_seconds: When the run started.

    Returns:
        Ends, the most likely cause first.
    """
    ends = [End(**record) for record in _read(path, "end")]
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


def _read(path: pathlib.Path, kind: str) -> list[dict]:
    records = []
    for file in sorted(path.glob(f"*.{kind}.json")):
        with contextlib.suppress(FileNotFoundError):  # replaced as we look
            records.append(json.loads(file.read_text()))
    return records
