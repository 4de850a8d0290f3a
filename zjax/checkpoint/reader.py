"""The complete steps of a directory, and what is in them."""

import pathlib
from typing import Any

import jax
from absl import logging

from zjax.checkpoint import failures
from zjax.checkpoint import steps as directories
from zjax.checkpoint.layout import Entry
from zjax.checkpoint.saved import Saved
from zjax.checkpoint.sums import LINKED
from zjax.checkpoint.verify import check_file_of, check_step
from zjax.errors import CheckpointError

_KNOWN_FORMATS = directories.WITHOUT_SUMS, directories.FORMAT


class Reader:
    """Finds steps, compares their files with their checksums, and opens them.

    Args:
        directory: Where the steps lie; it need not exist.
    """

    def __init__(self, directory: pathlib.Path):
        self.directory = directory
        self._verified: set[tuple[int, bool]] = set()
        self._reported: set[int] = set()

    def path(self, step: int) -> pathlib.Path:
        """The directory of a step.

        Args:
            step: Its number.

        Returns:
            The path, whether it exists or not.
        """
        return self.directory / str(step)

    def steps(self) -> tuple[int, ...]:
        """The steps whose files are all there, with their sizes.

        Returns:
            Their numbers, ascending. A warning says once what another one lacks.

        Raises:
            CheckpointError: The directory is a file.
        """
        if self.directory.exists() and not self.directory.is_dir():
            raise failures.not_a_directory(self.directory)
        complete = []
        for step in directories.named_steps(self.directory):
            missing = directories.find_missing(self.path(step))
            if not missing:
                complete.append(step)
            elif step not in self._reported:
                self._reported.add(step)
                logging.warning(failures.incomplete(self.directory, step, missing))
        return tuple(complete)

    def latest(self) -> int | None:
        """The newest complete step.

        Returns:
            Its number, or None where the directory holds no step.

        Raises:
            CheckpointError: It holds incomplete ones alone.
        """
        complete = self.steps()
        if complete:
            return complete[-1]
        named = directories.named_steps(self.directory)
        if named:
            missing = directories.find_missing(self.path(named[-1]))
            raise failures.only_incomplete(self.directory, named, missing)
        return None

    def existing(self, step: int | None) -> int:
        """A complete step.

        Args:
            step: Its number; None for the newest.

        Returns:
            Its number.

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

    def verified(self, step: int | None, *, shared: bool) -> int:
        """A complete step whose files match their checksums, which are compared once.

        Args:
            step: Its number; None for the newest.
            shared: Whether all processes call this, so that each reads a part.

        Returns:
            Its number.

        Raises:
            CheckpointError: There is no such step, or a file is not as it was saved. A
                step of an older version has no checksums, which a warning says.
        """
        step = self.existing(step)
        # Where processes share the reading, all must come, also those that know.
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
        """What a step says of itself.

        Args:
            step: A complete one.

        Returns:
            Its validation loss, its arrays, what was saved beside them, and which of
            them are on disks.

        Raises:
            CheckpointError: It is damaged.
        """
        path = self.path(step)
        try:
            if directories.has_sums(path):
                check_file_of(path, directories.INDEX)
            return _parse(directories.read_index(path))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise self.damaged(step, error) from error

    def loss(self, step: int) -> float | None:
        """The validation loss of a step.

        Args:
            step: A complete one.

        Returns:
            None where there is none, and where it cannot be read, which a warning says.
        """
        try:
            return self.index(step)["loss"]
        except CheckpointError as error:
            logging.warning(str(error))
            return None

    def saved(self, step: int) -> Saved:
        """The arrays of a step.

        Args:
            step: A complete one.

        Returns:
            What reads them.

        Raises:
            CheckpointError: It is damaged.
        """
        index, path = self.index(step), self.path(step)
        own = directories.has_sums(path)
        links = path / LINKED if own else directories.old_links(path)
        linked = {name: links / folder for name, folder in index["linked"].items()}
        return Saved(path / directories.STATE, index["arrays"], linked)

    def damaged(self, step: int, error: Exception) -> CheckpointError:
        """A step cannot be read.

        Args:
            step: Its number.
            error: What the reader said.

        Returns:
            The error to raise, which names the step before it.
        """
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
