"""Finds, verifies and opens complete steps; inspects every step for `zjax check`."""

import dataclasses
import pathlib
import shlex
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from absl import logging
from jax.experimental import multihost_utils

from zjax.checkpoint import steps as directories
from zjax.checkpoint import sums
from zjax.checkpoint.sums import LINKED, SUMS_FILE
from zjax.errors import CheckpointError
from zjax.files import local_path
from zjax.sharding.describe import format_bytes, render_table
from zjax.weights.saved import SavedArrays
from zjax.weights.source import Entry

_KNOWN_FORMATS = directories.WITHOUT_SUMS, directories.FORMAT


class Reader:
    """Finds steps, compares files with checksums, and opens arrays."""

    def __init__(self, directory: pathlib.Path):
        self.directory = directory
        self._verified: set[tuple[int, bool]] = set()
        self._reported: set[int] = set()

    def path(self, step: int) -> pathlib.Path:
        """Directory of a step, existing or not."""
        return self.directory / str(step)

    def steps(self) -> tuple[int, ...]:
        """Complete steps, ascending; warns once about each incomplete step.

        A step is complete if all files exist with the recorded sizes.
        """
        if self.directory.exists() and not self.directory.is_dir():
            raise directories.not_a_directory(self.directory)
        before, named, missing = None, directories.named_steps(self.directory), {}
        while named != before:  # a run may save and delete steps meanwhile
            missing = {x: directories.find_missing(self.path(x)) for x in named}
            before, named = named, directories.named_steps(self.directory)
        for step in named:
            if missing[step] and step not in self._reported:
                self._reported.add(step)
                text = f"{self.path(step)} is not complete and is not used: "
                logging.warning(text + missing[step])
        return tuple(step for step in named if not missing[step])

    def latest(self) -> int | None:
        """Newest complete step; None without steps, an error if all are incomplete."""
        complete = self.steps()
        if complete:
            return complete[-1]
        named = directories.named_steps(self.directory)
        if named:
            missing = directories.find_missing(self.path(named[-1]))
            place = self.directory
            problem = f"is not complete in {place} ({missing}), nor is any other step"
            remedy = "restore its files, or start in another directory"
            raise directories.step_error(named[-1], problem, remedy)
        return None

    def resolve(self, step: int | None) -> int:
        """Number of an existing complete step; None stands for the newest."""
        latest = self.latest()
        if latest is None:
            raise directories.empty(self.directory)
        if step is None:
            return latest
        steps = self.steps()
        if step not in steps:
            problem = f"is not a checkpoint in {self.directory}"
            remedy = f"use one of {', '.join(map(str, steps))}"
            raise directories.step_error(step, problem, remedy)
        return step

    def verify(self, step: int | None, *, shared: bool) -> int:
        """Resolves a step, and compares files with checksums the first time.

        With `shared`, all processes call this and each reads a share of the files. A
        step of an older version has no checksums, which logs a warning.
        """
        step = self.resolve(step)
        # Shared reading is collective: processes that verified alone take part, too.
        shared = shared and jax.process_count() > 1
        # A shared check covers a later lone check, but not the other way round.
        if {(step, shared), (step, True)} & self._verified:
            return step
        if directories.has_sums(self.path(step)):
            try:
                check_step(self.path(step), shared=shared)
            except (OSError, ValueError) as error:
                raise self.damaged(step, error) from error
        else:
            text = f"{self.path(step)} was saved without checksums, so damage cannot "
            logging.warning(text + "be detected; the next save has them")
        self._verified.add((step, shared))
        return step

    def index(self, step: int) -> dict[str, Any]:
        """Reads the index of a complete step: loss, arrays, extra values and links."""
        path = self.path(step)
        try:
            if directories.has_sums(path):
                check_file_of(path, directories.INDEX)
            return _parse(directories.read_index(path))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise self.damaged(step, error) from error

    def loss(self, step: int) -> float | None:
        """Validation loss of a complete step; None if missing or unreadable."""
        try:
            return self.index(step)["loss"]
        except CheckpointError as error:
            logging.warning(str(error))
            return None

    def open(self, step: int) -> SavedArrays:
        """Opens the arrays of a complete step."""
        index, path = self.index(step), self.path(step)
        is_current = directories.has_sums(path)
        links = path / LINKED if is_current else directories.old_links(path)
        linked = {name: links / folder for name, folder in index["linked"].items()}
        return SavedArrays(path / directories.STATE, index["arrays"], linked)

    def damaged(self, step: int, error: Exception) -> CheckpointError:
        """Returns the error for an unreadable step, which names the step before."""
        if not self.path(step).is_dir():  # a run has removed the step
            problem = f"was deleted from {self.directory} while it was read"
            others = ", ".join(map(str, self.steps()))
            remedy = f"use one of {others}, or raise checkpoint.keep_last"
            remedy = remedy if others else "name another directory"
            return directories.step_error(step, problem, remedy)
        before = max((other for other in self.steps() if other < step), default=None)
        return directories.damaged(self.directory, step, before, error)


def _parse(index: Any) -> dict[str, Any]:
    """Checks and converts the JSON index of a step."""
    if index["format"] not in _KNOWN_FORMATS:
        expected = " or ".join(map(str, _KNOWN_FORMATS))
        raise ValueError(f"format {index['format']}, expected {expected}")
    linked = index.get("linked", {})
    return {
        "loss": index["loss"],
        "arrays": {
            name: Entry(tuple(e["shape"]), e["dtype"], e["key_impl"])
            for name, e in index["arrays"].items()
        },
        "extra": index["extra"],
        # An older index lists names of arrays, which are the folders as well.
        "linked": linked if isinstance(linked, dict) else {n: n for n in linked},
    }


_UNREAD = -1
"""Stands for the first damaged file if a process cannot read the checksums."""


def check_step(path: pathlib.Path, *, shared: bool) -> None:
    """Compares files of a step with checksums; all processes raise a ValueError."""
    is_shared = shared and jax.process_count() > 1
    try:
        known = sums.read_sums(path / SUMS_FILE)
    except (OSError, ValueError):
        if is_shared:
            # Other processes wait in this collective already.
            _min_over_processes(_UNREAD)
        raise
    names = (
        sums.partition(known, jax.process_index(), jax.process_count())
        if is_shared
        else list(known)
    )
    damage = dict(sums.find_damage(path, known, names=names, whole_chunks=False))
    # Sorted, so that an index names one file in all processes.
    order = sorted(known)
    first = min(map(order.index, damage), default=len(order))
    if is_shared:
        first = _min_over_processes(first)
    if first == _UNREAD:
        raise ValueError(f"{SUMS_FILE} cannot be read by another process")
    if first < len(order):
        name = order[first]
        raise ValueError(damage.get(name, f"{name} does not match its checksum"))


def _min_over_processes(number: int) -> int:
    return int(multihost_utils.process_allgather(np.int32(number)).min())


def check_file_of(path: pathlib.Path, name: str) -> None:
    """Compares one file of a step with the recorded checksum."""
    known = sums.read_sums(path / SUMS_FILE)
    if name not in known:
        raise ValueError(f"{name} is not in {SUMS_FILE}")
    for _, text in sums.find_damage(path, known, names=[name], whole_chunks=True):
        raise ValueError(text)


INTACT = "intact"
UNVERIFIABLE = "unknown (no checksums)"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Result of inspecting one step.

    Args:
        problem: `INTACT`, `UNVERIFIABLE`, or the first problem and a count of more.
        is_offered: Whether a run would try to resume from the step.
    """

    path: pathlib.Path
    num_files: int
    num_bytes: int
    problem: str
    is_offered: bool = True


def inspect_steps(directory: str) -> list[Verdict]:
    """Reads all files of all steps; returns one verdict per step, oldest first.

    Steps share files of disk arrays that did not change; such a file is read once, and
    damage counts for each step.
    """
    top = pathlib.Path(local_path("directory", directory)).absolute()
    inside = top / "checkpoints"
    place = inside if inside.is_dir() else top
    if place.exists() and not place.is_dir():
        raise directories.not_a_directory(place)
    linked_sums = sums.LinkedSums()
    verdicts = [
        _inspect(place / str(step), linked_sums)
        for step in directories.named_steps(place)
    ]
    if not verdicts:
        raise directories.empty(place)
    return verdicts


def exit_status(verdicts: Sequence[Verdict]) -> int:
    """Exit status of `zjax check`: 0 intact, 1 damaged, 3 without checksums.

    Example:
        >>> path = pathlib.Path("runs/a/checkpoints/8")
        >>> exit_status([Verdict(path, 3, 10, UNVERIFIABLE)])
        3
    """
    problems = {verdict.problem for verdict in verdicts}
    if problems <= {INTACT}:
        return 0
    return 3 if problems <= {INTACT, UNVERIFIABLE} else 1


def describe_verdicts(verdicts: Sequence[Verdict]) -> str:
    """Returns a table of one or more verdicts, and the command to run next."""
    rows = [
        (v.path.name, f"{v.num_files:,}", format_bytes(v.num_bytes), v.problem)
        for v in verdicts
    ]
    table = render_table(("step", "files", "bytes", "state"), rows, right=(0, 1, 2))
    return f"{verdicts[0].path.parent}\n{table}\n{_advice(verdicts)}"


def _advice(verdicts: Sequence[Verdict]) -> str:
    """Names the step to resume from, and the command that deletes damaged steps."""
    usable = [v for v in verdicts if v.problem in (INTACT, UNVERIFIABLE)]
    if not usable:
        return "no step can be restored: start in another directory"
    newest = usable[-1]
    after = verdicts[verdicts.index(newest) + 1 :]
    # A run skips incomplete steps, but fails at a damaged one.
    in_the_way = [v for v in after if v.is_offered]
    if not in_the_way:
        return f"a run resumes from step {newest.path.name}"
    words = ["rm", "-r", *(str(v.path) for v in in_the_way)]
    return f"to resume from step {newest.path.name}:\n{shlex.join(words)}"


def _inspect(path: pathlib.Path, linked_sums: sums.LinkedSums) -> Verdict:
    """Reads all files of one step and returns the verdict."""
    names = sums.list_files(path)
    num_bytes = sum((path / name).lstat().st_size for name in names)
    missing = directories.find_missing(path)
    if missing:
        return Verdict(path, len(names), num_bytes, f"not complete: {missing}", False)
    if not directories.has_sums(path):
        return Verdict(path, len(names), num_bytes, UNVERIFIABLE)
    known = sums.read_sums(path / SUMS_FILE)
    damage = sums.find_damage(
        path,
        known,
        names=list(known),
        whole_chunks=True,
        linked_sums=linked_sums,
    )
    problem = INTACT
    if damage:
        more = f", and {len(damage) - 1} more" if len(damage) > 1 else ""
        problem = f"damaged: {damage[0][1]}{more}"
    return Verdict(path, len(names), num_bytes, problem)
