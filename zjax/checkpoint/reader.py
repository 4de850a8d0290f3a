"""Finds, verifies and opens the complete steps of a directory."""

import pathlib
from typing import Any

import jax
from absl import logging

from zjax.checkpoint import failures
from zjax.checkpoint import steps as directories
from zjax.checkpoint.layout import Entry
from zjax.checkpoint.saved import SavedArrays
from zjax.checkpoint.sums import LINKED
from zjax.checkpoint.verify import check_file_of, check_step
from zjax.errors import CheckpointError

_KNOWN_FORMATS = directories.WITHOUT_SUMS, directories.FORMAT


class Reader:
    """Finds steps, compares their files with their checksums, and opens them.

    Args:
        directory: Directory of the steps, which may not exist.
    """

    def __init__(self, directory: pathlib.Path):
        self.directory = directory
        self._verified: set[tuple[int, bool]] = set()
        self._reported: set[int] = set()

    def path(self, step: int) -> pathlib.Path:
        """The directory of a step, existing or not."""
        return self.directory / str(step)

    def steps(self) -> tuple[int, ...]:
        """Complete steps, ascending; warns once about each incomplete one.

        A step is complete if all files exist with their sizes.

        Raises:
            CheckpointError: The directory is a file.
        """
        if self.directory.exists() and not self.directory.is_dir():
            raise failures.not_a_directory(self.directory)
        before, named, missing = None, directories.named_steps(self.directory), {}
        while named != before:  # a run may save and delete steps meanwhile
            missing = {x: directories.find_missing(self.path(x)) for x in named}
            before, named = named, directories.named_steps(self.directory)
        for step in named:
            if missing[step] and step not in self._reported:
                self._reported.add(step)
                problem = failures.incomplete(self.directory, step, missing[step])
                logging.warning(problem)
        return tuple(step for step in named if not missing[step])

    def latest(self) -> int | None:
        """The newest complete step; None if the directory holds no step.

        Raises:
            CheckpointError: It holds only incomplete steps.
        """
        complete = self.steps()
        if complete:
            return complete[-1]
        named = directories.named_steps(self.directory)
        if named:
            missing = directories.find_missing(self.path(named[-1]))
            raise failures.only_incomplete(self.directory, named, missing)
        return None

    def resolve(self, step: int | None) -> int:
        """The number of an existing complete step; None stands for the newest.

        Raises:
            CheckpointError: There is no such step.
        """
        latest = self.latest()
        if latest is None:
            raise failures.empty(self.directory)
        if step is None:
            return latest
        steps = self.steps()
        if step not in steps:
            raise failures.unknown_step(self.directory, step, steps)
        return step

    def verify(self, step: int | None, *, shared: bool) -> int:
        """As `resolve`, and compares the files with their checksums the first time.

        A step of an older version has no checksums, which logs a warning.

        Args:
            step: Step number; None for the newest.
            shared: Whether all processes call this and each reads a share of the files.

        Returns:
            The step number.

        Raises:
            CheckpointError: There is no such step, or a file is damaged.
        """
        step = self.resolve(step)
        # Shared reading is collective: processes that verified alone take part, too.
        shared = shared and jax.process_count() > 1
        if {(step, shared), (step, True)} & self._verified:
            return step
        if directories.has_sums(self.path(step)):
            try:
                check_step(self.path(step), shared=shared)
            except (OSError, ValueError) as error:
                raise self.damaged(step, error) from error
        else:
            logging.warning(failures.unverified(self.directory, step))
        self._verified.add((step, shared))
        return step

    def index(self, step: int) -> dict[str, Any]:
        """Reads the index of a complete step: its loss, arrays, extra values and links.

        Raises:
            CheckpointError: The step is damaged.
        """
        path = self.path(step)
        try:
            if directories.has_sums(path):
                check_file_of(path, directories.INDEX)
            return _parse(directories.read_index(path))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise self.damaged(step, error) from error

    def loss(self, step: int) -> float | None:
        """The validation loss of a complete step.

        Returns:
            None if there is none, or if it cannot be read, which logs a warning.
        """
        try:
            return self.index(step)["loss"]
        except CheckpointError as error:
            logging.warning(str(error))
            return None

    def open(self, step: int) -> SavedArrays:
        """Opens the arrays of a complete step.

        Raises:
            CheckpointError: The step is damaged.
        """
        index, path = self.index(step), self.path(step)
        is_current = directories.has_sums(path)
        links = path / LINKED if is_current else directories.old_links(path)
        linked = {name: links / folder for name, folder in index["linked"].items()}
        return SavedArrays(path / directories.STATE, index["arrays"], linked)

    def damaged(self, step: int, error: Exception) -> CheckpointError:
        """The error for a step that cannot be read; it names the step before."""
        if not self.path(step).is_dir():  # removal renames a step before its files
            return failures.deleted(self.directory, step, self.steps())
        before = max((other for other in self.steps() if other < step), default=None)
        return failures.damaged(self.directory, step, before, error)


def _parse(index: Any) -> dict[str, Any]:
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
        "linked": linked if isinstance(linked, dict) else {n: n for n in linked},
    }
