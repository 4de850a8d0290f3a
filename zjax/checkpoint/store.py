"""Checkpoints of a run: written while training goes on, read onto any devices.

Orbax writes every array shard by shard into a temporary directory that is renamed once
it is complete, so a step is there whole or not at all. Its files have checksums, which
are compared before it is restored.
"""

import json
import math
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from absl import logging

from zjax.checkpoint import arrays, failures, halves, layout, quiet, views
from zjax.checkpoint import steps as directories
from zjax.checkpoint.layout import Entry
from zjax.checkpoint.reader import Reader
from zjax.checkpoint.saved import link
from zjax.checkpoint.sums import LINKED
from zjax.checkpoint.threads import Task
from zjax.checkpoint.writer import meeting, start_writing, wait_for
from zjax.errors import CheckpointError, ZjaxError
from zjax.packages import check_installed
from zjax.processes.together import together
from zjax.sharding.placement import ArrayPlan
from zjax.storage.array import DiskArray


class Store:
    """The checkpoints under one directory.

    Reading touches nothing; the first `save` creates the directory and clears away
    what a killed run left half-written. In a run of many processes all of them call
    each method, and all see the same file system.

    Args:
        directory: Where the steps lie.
        keep_last: Newest checkpoints kept, 1 or more.
        keep_best: Checkpoints of lowest validation loss kept besides them, 0 or more.
    """

    def __init__(self, directory: str, *, keep_last: int = 2, keep_best: int = 1):
        check_installed("orbax")
        quiet.silence_failures()
        self.directory = pathlib.Path(directory).absolute()
        self._keep_last = keep_last
        self._keep_best = keep_best
        self._saving = 0
        self._writing: Task | None = None
        self._pinning: Task | None = None
        self._has_saved = False
        self._last_saved: int | None = None
        self._reader = Reader(self.directory)

    def prepare(self, rows: Any) -> None:
        """Pins the memory that the first save will take, while other things go on.

        Args:
            rows: A tree of `ArrayPlan`, of the state that will be saved.
        """
        leaves = jax.tree.leaves(rows)
        self._pinning = Task("pinning", lambda: arrays.pin(leaves))

    def steps(self) -> tuple[int, ...]:
        """The complete checkpoints: all files are there, with their sizes.

        Returns:
            Their steps, ascending; empty where the directory is missing or empty. A
            warning says once what each incomplete one lacks.

        Raises:
            CheckpointError: The directory is a file.
        """
        return self._reader.steps()

    def latest(self) -> int | None:
        """The newest complete checkpoint.

        Returns:
            Its step, or None where there is none.

        Raises:
            CheckpointError: There are only incomplete ones: a run that started anew
                would hide what happened to them.
        """
        return self._reader.latest()

    def best(self) -> int | None:
        """The checkpoint of lowest validation loss.

        Returns:
            Its step, or None where none was saved with a finite loss.

        Raises:
            CheckpointError: A checkpoint cannot be read.
        """
        losses = {step: self._reader.index(step)["loss"] for step in self.steps()}
        known = [step for step, loss in losses.items() if loss is not None]
        return min(known, key=losses.__getitem__, default=None)

    def save(
        self,
        step: int,
        state: Any,
        rows: Any,
        *,
        extra: Mapping[str, Any],
        loss: float | None = None,
    ) -> None:
        """Starts to write a checkpoint; returns once `state` may be given away.

        What is on the devices is copied to the host while the next steps run, if the
        host has room for that.

        Args:
            step: Steps taken; more than any checkpoint in the directory.
            state: A tree of arrays in their stored shapes.
            rows: A tree of `ArrayPlan` of the same structure.
            extra: What JSON can hold: data position, seed, configuration, plan text.
            loss: Validation loss by which the best checkpoints are kept.

        Raises:
            CheckpointError: This save or the one before it could not be written, or
                the directory holds a later step.
        """
        partial = directories.partial_path(self.directory, step)
        self.wait()
        named = layout.name_leaves(rows)
        leaves = dict(zip(named, jax.tree.leaves(state), strict=True))
        entries = {
            name: arrays.describe(leaves[name], row) for name, row in named.items()
        }
        finite = loss is not None and math.isfinite(loss)
        on_disk = {n: x for n, x in leaves.items() if isinstance(x, DiskArray)}
        # Names are no paths: those of users may hold dots, or be too long for a file.
        folders = {name: str(number) for number, name in enumerate(on_disk)}
        index = {
            "format": directories.FORMAT,
            "loss": loss if finite else None,
            "arrays": {name: vars(entry) for name, entry in entries.items()},
            "extra": json.loads(json.dumps(extra)),
            "linked": folders,
        }
        logical = {
            name: arrays.unpadded(leaves[name], row)
            for name, row in named.items()
            if not entries[name].is_empty and name not in on_disk
        }
        self._saving = step
        try:
            with together(meeting(partial, "begin")):
                self._check_directory(step)
                for array in on_disk.values():
                    array.check_held()
                if jax.process_index() == 0:
                    directories.begin(partial)
            self._has_saved = True
            with together(meeting(partial, "copy")):
                linked = link(on_disk, folders, partial / LINKED)
                copies = arrays.copy_to_host(logical)
        except (jax.errors.JaxRuntimeError, ZjaxError):
            raise
        except Exception as error:
            raise self._abandon(step, error) from error
        self._writing = start_writing(
            partial,
            logical if copies is None else copies,
            index,
            [f"{LINKED}/{name}" for name in linked],
            lambda: self._commit(partial, step),
            wait_for_copies=copies is None,
        )

    def has_failed(self) -> bool:
        """Whether the save that goes on has failed already; waits for nothing.

        Processes of a run may see it at different steps: `wait` raises its error.
        """
        return self._writing is not None and self._writing.has_failed()

    def wait(self) -> None:
        """Waits until the last save is on disk.

        Raises:
            CheckpointError: It could not be written; what there was of it is removed.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            wait_for(writing)
        except jax.errors.JaxRuntimeError:
            raise
        except Exception as error:
            raise self._abandon(self._saving, error) from error
        self._last_saved = self._saving

    def close(self) -> None:
        """Waits for the last save.

        Raises:
            CheckpointError: The last save could not be written.
        """
        self.wait()
        if self._pinning is not None:
            self._pinning.result()

    def restore(
        self,
        rows: Any,
        step: int | None = None,
        *,
        make_room: Callable[[], None] = lambda: None,
    ) -> tuple[Any, dict[str, Any]]:
        """Reads a whole state, each array straight onto its shards.

        Args:
            rows: A tree of `ArrayPlan`: any mesh, ZeRO stage, padding or memory.
            step: Which checkpoint; None for the newest.
            make_room: Called once the files and the names are found right, before
                arrays are read.

        Returns:
            The state in the structure of `rows`, and the `extra` saved with it.

        Raises:
            CheckpointError: There is no such checkpoint, it is of another model, or it
                is damaged.
        """
        step = self._reader.verified(step, shared=True)
        index = self._reader.index(step)
        named = layout.name_leaves(rows)
        expected = halves.whole_entries(layout.describe_rows(named))
        inside = views.as_wanted(self._reader.saved(step).source, expected)
        layout.check_same(expected, inside.entries, str(self._reader.path(step)))
        make_room()
        leaves = self._read(step, named)
        return jax.tree.unflatten(jax.tree.structure(rows), leaves), index["extra"]

    def restore_part(self, rows: Any, part: str, step: int | None = None) -> Any:
        """Reads one part of a state, such as the weights without the optimizer.

        Args:
            rows: A tree of `ArrayPlan`; floating-point dtypes may differ from those
                saved.
            part: Path of that tree in the state, such as `master` or `ema`.
            step: Which checkpoint; None for the newest.

        Returns:
            Arrays in the structure, shardings and dtypes of `rows`.

        Raises:
            CheckpointError: There is no such checkpoint, it is of another model, or it
                is damaged.
        """
        step = self._reader.verified(step, shared=True)
        named = layout.name_leaves(rows, part)
        expected = layout.describe_rows(named)
        inside = views.as_wanted(self._reader.saved(step).source.inside(part), expected)
        place = str(self._reader.path(step))
        layout.check_same(expected, inside.entries, place, cast=True)
        leaves = self._read(step, named)
        return jax.tree.unflatten(jax.tree.structure(rows), leaves)

    def extra(self, step: int | None = None) -> dict[str, Any]:
        """What was saved beside the arrays.

        Args:
            step: Which checkpoint; None for the newest.

        Returns:
            The `extra` given to `save`.

        Raises:
            CheckpointError: There is no such checkpoint, or it is damaged.
        """
        return self._reader.index(self._reader.existing(step))["extra"]

    def entries(self, step: int | None = None) -> dict[str, Entry]:
        """The arrays of a checkpoint, without their data; master weights whole.

        Args:
            step: Which checkpoint; None for the newest.

        Returns:
            Name to shape and dtype.

        Raises:
            CheckpointError: There is no such checkpoint, or it is damaged.
        """
        return dict(self._reader.saved(self._reader.existing(step)).source.entries)

    def read_array(self, name: str, step: int | None = None) -> np.ndarray:
        """Reads one array into host memory.

        Args:
            name: One of `entries`; not an array of random keys.
            step: Which checkpoint; None for the newest.

        Returns:
            The whole unpadded array.

        Raises:
            CheckpointError: There is no such checkpoint, or it is damaged.
        """
        step = self._reader.verified(step, shared=False)
        try:
            return self._reader.saved(step).source.whole(name)
        except Exception as error:
            raise self._reader.damaged(step, error) from error

    def _read(self, step: int, named: Mapping[str, ArrayPlan]) -> list[Any]:
        try:
            return arrays.read_arrays(self._reader.saved(step), named)
        except jax.errors.JaxRuntimeError:  # the devices are at fault, not the files
            raise
        except Exception as error:
            raise self._reader.damaged(step, error) from error

    def _check_directory(self, step: int) -> None:
        """Refuses a step that others would come after, and a directory that went."""
        if self.directory.exists() and not self.directory.is_dir():
            raise failures.not_a_directory(self.directory)
        if self._has_saved and not self.directory.is_dir():
            raise failures.gone(self.directory, step)
        named = directories.named_steps(self.directory)
        if any(other >= step for other in named):
            latest = max(self.steps(), default=-1)
            if step <= latest:
                raise failures.behind(self.directory, step, latest)

    def _commit(self, partial: pathlib.Path, step: int) -> None:
        """Names a step that is written, and deletes those that are not to be kept."""
        directories.commit(partial, step)
        losses = {other: self._reader.loss(other) for other in self.steps()}
        kept = directories.kept(losses, self._keep_last, self._keep_best)
        for other in losses.keys() - kept:
            try:
                directories.remove(self._reader.path(other))
            except OSError as error:
                logging.warning(failures.undeleted(self.directory, other, error))

    def _abandon(self, step: int, error: Exception) -> CheckpointError:
        """Drops what there is of a failed save; the next starts afresh."""
        before = self._last_saved
        if before is not None and not self._reader.path(before).exists():
            return failures.gone(self.directory, step)
        is_file = isinstance(error, NotADirectoryError | FileExistsError)
        if is_file and not self.directory.is_dir():
            return failures.not_a_directory(self.directory)
        if jax.process_index() == 0:
            directories.clear(self.directory)
        latest = max(self.steps(), default=None)
        return failures.unwritten(self.directory, step, latest, error)
