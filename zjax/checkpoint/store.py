"""Checkpoints of a run: written while training goes on, read onto any devices.

Orbax writes every array shard by shard into a temporary directory that is renamed once
it is complete, so a step is there whole or not at all.
"""

import contextlib
import json
import math
import pathlib
import shutil
from collections.abc import Mapping
from concurrent import futures
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from zjax.checkpoint import arrays, failures, halves, layers, layout, quiet, tiles
from zjax.checkpoint.layout import Entry
from zjax.checkpoint.manager import INDEX, INDEX_FILE, STATE, make_manager, write
from zjax.checkpoint.saved import Saved, link
from zjax.errors import CheckpointError
from zjax.sharding.placement import Row
from zjax.storage.array import DiskArray

_LINKED = "linked"
_FORMAT = 1


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
        quiet.silence_failures()
        self.directory = pathlib.Path(directory).absolute()
        self._keep_last = keep_last
        self._keep_best = keep_best
        self._manager: ocp.CheckpointManager | None = None
        self._saving: int | None = None
        self._threads = _thread()
        self._writing: futures.Future[None] | None = None

    def prepare(self, rows: Any) -> None:
        """Pins the memory that the first save will take, while other things go on.

        Args:
            rows: A tree of `Row`, of the state that will be saved.
        """
        self._threads.submit(arrays.pin, jax.tree.leaves(rows))

    def steps(self) -> tuple[int, ...]:
        """The complete checkpoints.

        Returns:
            Their steps, ascending; empty where the directory is missing or empty.

        Raises:
            CheckpointError: The directory is a file.
        """
        if not self.directory.exists():
            return ()
        if not self.directory.is_dir():
            raise failures.not_a_directory(self.directory)
        found = ocp.path.step.standard_name_format().find_all(self.directory)
        return tuple(sorted(entry.step for entry in found))

    def latest(self) -> int | None:
        """The newest checkpoint.

        Returns:
            Its step, or None where there is none.
        """
        return max(self.steps(), default=None)

    def best(self) -> int | None:
        """The checkpoint of lowest validation loss.

        Returns:
            Its step, or None where none was saved with a finite loss.

        Raises:
            CheckpointError: A checkpoint cannot be read.
        """
        losses = {step: self._read_index(step)["loss"] for step in self.steps()}
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
            rows: A tree of `Row` of the same structure.
            extra: What JSON can hold: data position, seed, configuration, plan text.
            loss: Validation loss by which the best checkpoints are kept.

        Raises:
            CheckpointError: This save or the one before it could not be written, or
                the directory holds a later step.
        """
        self.wait()
        latest = self.latest()
        if latest is not None and step <= latest:
            raise failures.behind(self.directory, step, latest)
        named = layout.name_leaves(rows)
        leaves = dict(zip(named, jax.tree.leaves(state), strict=True))
        entries = {
            name: arrays.describe(leaves[name], row) for name, row in named.items()
        }
        finite = loss is not None and math.isfinite(loss)
        index = {
            "format": _FORMAT,
            "loss": loss if finite else None,
            "arrays": {name: vars(entry) for name, entry in entries.items()},
            "extra": json.loads(json.dumps(extra)),
        }
        on_disk = {n: x for n, x in leaves.items() if isinstance(x, DiskArray)}
        logical = {
            name: arrays.unpadded(leaves[name], row)
            for name, row in named.items()
            if not entries[name].is_empty and name not in on_disk
        }
        index["linked"] = [*on_disk]
        for array in on_disk.values():
            array.check_held()
        self._saving = step
        metrics = {"loss": loss} if finite else {}
        try:
            manager = self._open_manager()
            self._remove_unused_links(besides=step)
            link(on_disk, self._links(step))
            copies = arrays.copy_to_host(logical)
            if copies is None:
                write(manager, step, logical, index, metrics)
            else:
                self._writing = self._threads.submit(
                    write, manager, step, copies, index, metrics
                )
        except jax.errors.JaxRuntimeError:
            raise
        except Exception as error:
            raise self._abandon(step, error) from error

    def wait(self) -> None:
        """Waits until the last save is on disk.

        Raises:
            CheckpointError: It could not be written; what there was of it is removed.
        """
        if self._saving is None or self._manager is None:
            return
        writing, self._writing = self._writing, None
        try:
            if writing is not None:
                writing.result()
            self._manager.wait_until_finished()
        except jax.errors.JaxRuntimeError:
            raise
        except Exception as error:
            raise self._abandon(self._saving, error) from error
        self._saving = None

    def close(self) -> None:
        """Waits for the last save and ends the writing threads.

        Raises:
            CheckpointError: The last save could not be written.
        """
        self.wait()
        if self._manager is not None:
            self._manager.close()
            self._manager = None
            self._remove_unused_links()
        self._threads.shutdown()
        self._threads = _thread()

    def restore(self, rows: Any, step: int | None = None) -> tuple[Any, dict[str, Any]]:
        """Reads a whole state, each array straight onto its shards.

        Args:
            rows: A tree of `Row`: any mesh, ZeRO stage, padding or memory.
            step: Which checkpoint; None for the newest.

        Returns:
            The state in the structure of `rows`, and the `extra` saved with it.

        Raises:
            CheckpointError: There is no such checkpoint, it is of another model, or it
                is damaged.
        """
        step = self._existing(step)
        index = self._read_index(step)
        named = layout.name_leaves(rows)
        expected = halves.whole_entries(layout.describe_rows(named))
        inside = halves.whole_entries(index["arrays"])
        inside = tiles.as_tiled(inside, tiles.num_tiles(expected))
        inside = layers.as_wanted(expected, inside)
        layout.check_same(expected, inside, str(self._path(step)))
        leaves = self._read(step, named)
        return jax.tree.unflatten(jax.tree.structure(rows), leaves), index["extra"]

    def restore_part(self, rows: Any, part: str, step: int | None = None) -> Any:
        """Reads one part of a state, such as the weights without the optimizer.

        Args:
            rows: A tree of `Row`; floating-point dtypes may differ from the saved.
            part: Path of that tree in the state, such as `master` or `ema`.
            step: Which checkpoint; None for the newest.

        Returns:
            Arrays in the structure, shardings and dtypes of `rows`.

        Raises:
            CheckpointError: There is no such checkpoint, it is of another model, or it
                is damaged.
        """
        step = self._existing(step)
        found = halves.whole_entries(self._read_index(step)["arrays"])
        named = layout.name_leaves(rows, part)
        expected = layout.describe_rows(named)
        inside = {name: e for name, e in found.items() if name.startswith(f"{part}/")}
        inside = tiles.as_tiled(inside, tiles.num_tiles(expected))
        inside = layers.as_wanted(expected, inside)
        layout.check_same(expected, inside, str(self._path(step)), cast=True)
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
        return self._read_index(self._existing(step))["extra"]

    def entries(self, step: int | None = None) -> dict[str, Entry]:
        """The arrays of a checkpoint, without their data; master weights whole.

        Args:
            step: Which checkpoint; None for the newest.

        Returns:
            Name to shape and dtype.

        Raises:
            CheckpointError: There is no such checkpoint, or it is damaged.
        """
        return halves.whole_entries(self._read_index(self._existing(step))["arrays"])

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
        step = self._existing(step)
        try:
            return self._saved(step).whole(name)
        except Exception as error:
            raise self._damaged(step, error) from error

    def _saved(self, step: int) -> Saved:
        index, links = self._read_index(step), self._links(step)
        linked = {name: links / name for name in index["linked"]}
        return Saved(self._path(step) / STATE, index["arrays"], linked)

    def _read(self, step: int, named: Mapping[str, Row]) -> list[Any]:
        try:
            return arrays.read_arrays(self._saved(step), named)
        except jax.errors.JaxRuntimeError:  # the devices are at fault, not the files
            raise
        except Exception as error:
            raise self._damaged(step, error) from error

    def _read_index(self, step: int) -> dict[str, Any]:
        try:
            text = (self._path(step) / INDEX / INDEX_FILE).read_text()
            index = json.loads(text)
            if index["format"] != _FORMAT:
                raise ValueError(f"format {index['format']}, expected {_FORMAT}")
            return {
                "loss": index["loss"],
                "arrays": _entries(index["arrays"]),
                "extra": index["extra"],
                "linked": index.get("linked", []),
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._damaged(step, error) from error

    def _existing(self, step: int | None) -> int:
        steps = self.steps()
        if not steps:
            raise failures.empty(self.directory)
        if step is None:
            return steps[-1]
        if step not in steps:
            raise failures.unknown_step(self.directory, step, steps)
        return step

    def _path(self, step: int) -> pathlib.Path:
        return self.directory / str(step)

    def _links(self, step: int) -> pathlib.Path:
        return self.directory / _LINKED / str(step)

    def _remove_unused_links(self, besides: int | None = None) -> None:
        """Orbax removes checkpoints, and knows nothing of what is beside them."""
        if jax.process_index():
            return
        kept = {str(step) for step in (*self.steps(), besides)}
        for path in (self.directory / _LINKED).glob("*"):
            if path.name not in kept:
                shutil.rmtree(path, ignore_errors=True)

    def _open_manager(self) -> ocp.CheckpointManager:
        if self._manager is None:
            self._manager = make_manager(
                self.directory, self._keep_last, self._keep_best
            )
        return self._manager

    def _abandon(self, step: int, error: Exception) -> CheckpointError:
        """Drops the failed save and its writer; the next save starts afresh."""
        manager, self._manager, self._saving = self._manager, None, None
        if manager is not None:
            with contextlib.suppress(Exception):  # it tells the same error again
                manager.close()
        if not self.directory.is_dir():
            return failures.not_a_directory(self.directory)
        if jax.process_index() == 0:
            for path in self.directory.glob(f"{step}.*"):
                shutil.rmtree(path, ignore_errors=True)
        self._remove_unused_links()
        latest = self.latest()
        return failures.unwritten(self.directory, step, latest, error)

    def _damaged(self, step: int, error: Exception) -> CheckpointError:
        before = max((other for other in self.steps() if other < step), default=None)
        return failures.damaged(self.directory, step, before, error)


def _thread() -> futures.ThreadPoolExecutor:
    return futures.ThreadPoolExecutor(1, "checkpoint")


def _entries(saved: Mapping[str, Any]) -> dict[str, Entry]:
    return {
        name: Entry(tuple(e["shape"]), e["dtype"], e["key_impl"])
        for name, e in saved.items()
    }
