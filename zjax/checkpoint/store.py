"""Checkpoints of a run: written while training goes on, read onto any mesh.

Orbax writes arrays shard by shard into a temporary directory, which is renamed once
complete. Checksums of all files are compared before restoring.
"""

import functools
import math
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from absl import logging

from zjax.checkpoint import arrays, replicas, writer
from zjax.checkpoint import steps as directories
from zjax.checkpoint.sums import LINKED, Task
from zjax.checkpoint.verify import Reader
from zjax.errors import CheckpointError, ZjaxError, check_installed
from zjax.processes.barrier import barrier
from zjax.sharding.placement import ArrayPlan
from zjax.storage.array import DiskArray
from zjax.weights import layers
from zjax.weights.saved import SavedArrays, link, place_slices
from zjax.weights.source import Index, Source, check_same, describe_plans, name_leaves


class Store(Reader):
    """Saves and restores the checkpoints in one directory.

    Reading changes nothing; the first `save` creates the directory and removes
    unfinished saves. All processes of a run call each method, on a shared file system.

    Args:
        keep_last: Number of newest checkpoints to keep, 1 or more.
        keep_best: Number of further checkpoints to keep, of lowest validation loss; 0
            or more.
    """

    def __init__(self, directory: str, *, keep_last: int = 2, keep_best: int = 1):
        check_installed("orbax")
        directories.hide_orbax_errors()
        super().__init__(pathlib.Path(directory).absolute())
        self._keep_last = keep_last
        self._keep_best = keep_best
        self._saving = 0
        self._writing: Task | None = None
        self._pinning: Task | None = None
        self._has_saved = False
        self._last_saved: int | None = None

    def prepare(self, plans: Any) -> None:
        """Starts a thread that pins host memory for the first save."""
        leaves = jax.tree.leaves(plans)
        self._pinning = Task("pinning", lambda: arrays.pin(leaves))

    def best(self) -> int | None:
        """Step of the checkpoint of lowest validation loss; None without losses."""
        losses = {step: self.index(step)["loss"] for step in self.steps()}
        known = [step for step, loss in losses.items() if loss is not None]
        return min(known, key=losses.__getitem__, default=None)

    def save(
        self,
        step: int,
        state: Any,
        plans: Any,
        *,
        extra: Mapping[str, Any],
        loss: float | None = None,
    ) -> None:
        """Starts writing a checkpoint; returns once `state` may be donated.

        Device arrays are copied to the host first, if host memory suffices. Raises the
        error of the previous save, too. `extra` holds JSON values.
        """
        # Before any error: all processes count saves alike and meet at named barriers.
        partial = directories.partial_path(self.directory, step)
        self.wait()
        named = name_leaves(plans)
        leaves = dict(zip(named, jax.tree.leaves(state), strict=True))
        on_disk = {n: x for n, x in leaves.items() if isinstance(x, DiskArray)}
        entries = {
            name: arrays.describe(leaves[name], plan) for name, plan in named.items()
        }
        finite = loss is not None and math.isfinite(loss)
        # Numbered, as names of arrays may hold dots, or be too long for a file name.
        folders = {name: str(number) for number, name in enumerate(on_disk)}
        index = {
            "format": directories.FORMAT,
            "loss": loss if finite else None,  # JSON has no NaN
            "arrays": {name: vars(entry) for name, entry in entries.items()},
            "extra": dict(extra),
            "linked": folders,
        }
        try:
            index_text = directories.format_index(index)
        except ValueError as error:
            raise directories.unsaved_extra(extra, error) from error
        unpadded = {
            name: arrays.unpadded(leaves[name], plan)
            for name, plan in named.items()
            if not entries[name].is_empty and name not in on_disk
        }
        self._saving = step
        try:
            with barrier(writer.barrier_name(partial, "check")):
                self._check_directory(step)
                for array in on_disk.values():
                    array.check_held()
            # Outside of barriers: all devices take part, and a process that failed
            # before would leave the others waiting.
            writer.check_finite(leaves, named, step)
            with barrier(writer.barrier_name(partial, "begin")):
                if jax.process_index() == 0:
                    directories.begin(partial)
            self._has_saved = True
            with barrier(writer.barrier_name(partial, "copy")):
                linked = link(on_disk, folders, partial / LINKED)
                copies = arrays.copy_to_host(unpadded)
        # A lost device or process is not a fault of the files: other code reports it.
        except (jax.errors.JaxRuntimeError, ZjaxError):
            raise
        except Exception as error:
            raise self._abandon(step, error) from error
        self._writing = writer.start_write(
            partial,
            unpadded if copies is None else copies,
            index_text,
            [f"{LINKED}/{name}" for name in linked],
            lambda: self._commit(partial, step),
            wait_for_copies=copies is None,
        )

    def has_failed(self) -> bool:
        """Whether the current save has failed already; does not wait.

        Processes may notice at different steps; `wait` raises the error in all
        processes.
        """
        return self._writing is not None and self._writing.has_failed()

    def wait(self) -> None:
        """Waits until the last save is on disk; raises the error of a failed save."""
        # Cleared first: an error is raised once.
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            writer.wait_for_write(writing)
        except jax.errors.JaxRuntimeError:
            raise
        except Exception as error:
            raise self._abandon(self._saving, error) from error
        self._last_saved = self._saving

    def close(self) -> None:
        """Waits for the last save, and for the thread that pins memory."""
        self.wait()
        if self._pinning is not None:
            self._pinning.result()

    def restore(
        self,
        plans: Any,
        step: int | None = None,
        *,
        select: Callable[[SavedArrays], SavedArrays] = lambda arrays: arrays,
        keeps_errors: Callable[[Mapping[str, Any], int], bool] = lambda *saved: True,
        free_memory: Callable[[], None] = lambda: None,
    ) -> tuple[Any, dict[str, Any]]:
        """Reads a whole state straight onto shards; returns state and saved `extra`.

        `select` picks the arrays that the plans are of; all by default.
        `keeps_errors(extra, step)` tells whether saved error feedback fits the run.
        `free_memory` is called after all checks and before arrays are read.
        """
        step = self.verify(step, shared=True)
        index = self.index(step)
        named = name_leaves(plans)
        expected = layers.joined_entries(describe_plans(named))
        saved = select(self.open(step))
        source = saved.source
        place = str(self.path(step))
        replicas.check_apart(source.entries, expected, place)
        adapted = replicas.adapted_extra(
            source, expected, keeps_errors=keeps_errors(index["extra"], step)
        )
        wanted = {n: e for n, e in expected.items() if n not in adapted}
        found = layers.match_layout(source, expected).entries
        # Saved codec arrays that the run replaces, or does without, are no difference.
        found = {
            n: e
            for n, e in found.items()
            if n in wanted or not (n in adapted or replicas.may_be_unused(n))
        }
        # Frozen parameters are stored in the compute dtype, which is free to change.
        frozen = {name for name, plan in named.items() if plan.is_frozen}
        check_same(wanted, found, place, cast=frozen)
        # After all checks: a refused checkpoint leaves the caller's state alive.
        free_memory()
        leaves = self._read(step, saved, named, adapted)
        return jax.tree.unflatten(jax.tree.structure(plans), leaves), index["extra"]

    def extra(self, step: int | None = None) -> dict[str, Any]:
        """Values saved as `extra` with a checkpoint, by default the newest."""
        return self.index(self.resolve(step))["extra"]

    def source(self, step: int | None = None) -> Source:
        """Opens the arrays of a checkpoint, split master weights joined.

        Files are compared with checksums at the first read; random keys are not read.
        """
        step = self.resolve(step)
        saved = self.open(step).source
        # Once: finding a step looks at all files of all steps.
        verify = functools.cache(functools.partial(self.verify, step, shared=False))

        def read(name: str, index: Index) -> np.ndarray:
            verify()
            try:
                return saved.read(name, index)
            except Exception as error:
                raise self.damaged(step, error) from error

        return Source(saved.entries, read)

    def _read(
        self,
        step: int,
        saved: SavedArrays,
        named: Mapping[str, ArrayPlan],
        adapted: Mapping[str, replicas.Read],
    ) -> list[Any]:
        """Reads planned arrays, and slices of arrays adapted to other replicas."""
        same = {name: plan for name, plan in named.items() if name not in adapted}
        try:
            read = arrays.read_arrays(saved, same)
            leaves = dict(zip(same, read, strict=True))
            for name, read_slice in adapted.items():
                leaves[name] = place_slices(read_slice, named[name])
            return [leaves[name] for name in named]
        except jax.errors.JaxRuntimeError:  # a device failed, not the files
            raise
        except Exception as error:
            raise self.damaged(step, error) from error

    def _check_directory(self, step: int) -> None:
        """Raises if the step is not the newest, or if the directory disappeared."""
        if self.directory.exists() and not self.directory.is_dir():
            raise directories.not_a_directory(self.directory)
        # Not created again: the disk may be unmounted.
        if self._has_saved and not self.directory.is_dir():
            raise directories.disappeared(self.directory, step)
        named = directories.named_steps(self.directory)
        if any(other >= step for other in named):
            # Incomplete later steps may be overwritten.
            latest = max(self.steps(), default=-1)
            if step <= latest:
                problem = f"is not after step {latest} in {self.directory}"
                remedy = "resume from there, or start in another directory"
                raise directories.step_error(step, problem, remedy)

    def _commit(self, partial: pathlib.Path, step: int) -> None:
        """Renames the written step, and deletes steps that are no longer kept."""
        directories.commit(partial, step)
        losses = {other: self.loss(other) for other in self.steps()}
        kept = directories.select_kept(losses, self._keep_last, self._keep_best)
        for other in losses.keys() - kept:
            try:
                directories.remove(self.path(other))
            except OSError as error:
                # An old step that stays does not harm the new one.
                text = f"{self.path(other)} cannot be deleted ({error.strerror})"
                logging.warning(text)

    def _abandon(self, step: int, error: Exception) -> CheckpointError:
        """Removes a failed save, and returns the error to raise."""
        before = self._last_saved
        if before is not None and not self.path(before).exists():
            return directories.disappeared(self.directory, step)
        is_file = isinstance(error, NotADirectoryError | FileExistsError)
        if is_file and not self.directory.is_dir():
            return directories.not_a_directory(self.directory)
        if jax.process_index() == 0:
            directories.clear(self.directory)
        latest = max(self.steps(), default=None)
        return directories.unwritten(self.directory, step, latest, error)
