"""Arrays of one checkpoint, in Orbax's files or in files linked from disk storage.

A checkpoint hard-links the files of disk arrays, or copies between file systems. To
write a file with several hard links, `zjax.storage.files.write_file` makes a new file,
so that the linked file keeps the content.
"""

import dataclasses
import functools
import math
import os
import pathlib
import shutil
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from zjax.sharding.placement import ArrayPlan
from zjax.storage.array import DiskArray, open_files, spans_of
from zjax.storage.move import store
from zjax.weights.layers import join_masters
from zjax.weights.source import Entry, Index, Source

CRITIC = "critic"
"""Folder of the names of a second model that learns beside the model of a run."""
Spans = tuple[tuple[int, int], ...]
"""Start and stop in each dim."""
READ_AHEAD_BYTES = 8 * 10**9
"""Bytes of Orbax arrays in host memory at a time while reading."""


@dataclasses.dataclass(frozen=True)
class SavedArrays:
    """Arrays of a checkpoint.

    Args:
        linked: Directories with the files of disk arrays, by name of the array.
        prefix: Beginning of all names in Orbax's files that names here leave out.
    """

    directory: pathlib.Path
    entries: Mapping[str, Entry]
    linked: Mapping[str, pathlib.Path]
    prefix: str = ""

    def part(self, folder: str) -> "SavedArrays":
        """Selects the arrays of a folder, and leaves the folder out of the names."""
        prefix = f"{folder}/"

        def inside(named: Mapping[str, Any]) -> dict[str, Any]:
            found = {n: x for n, x in named.items() if n.startswith(prefix)}
            return {name.removeprefix(prefix): x for name, x in found.items()}

        return dataclasses.replace(
            self,
            entries=inside(self.entries),
            linked=inside(self.linked),
            prefix=self.prefix + prefix,
        )

    def outside(self, folder: str) -> "SavedArrays":
        """Selects the arrays outside of a folder of names."""
        prefix = f"{folder}/"
        names = [name for name in self.entries if not name.startswith(prefix)]
        linked = {name: x for name, x in self.linked.items() if name in names}
        entries = {name: self.entries[name] for name in names}
        return dataclasses.replace(self, entries=entries, linked=linked)

    @functools.cached_property
    def source(self) -> Source:
        """Arrays with split master weights joined."""
        return join_masters(
            Source(self.entries, lambda name, index: self.read(name)[(..., *index)])
        )

    def read(self, name: str) -> np.ndarray:
        """Reads one unpadded array into host memory."""
        entry = self.entries[name]
        if entry.is_empty:
            return np.zeros(entry.shape, entry.dtype)
        if name in self.linked:
            return self.slice_reader(name)(tuple(map(slice, entry.shape)))
        import orbax.checkpoint as ocp

        args = {name: ocp.RestoreArgs(restore_type=np.ndarray)}
        # 16 bytes per element: Orbax needs a limit above the array in any dtype.
        ahead_bytes = max(READ_AHEAD_BYTES, 16 * math.prod(entry.shape))
        return self.restore(args, ahead_bytes)[name]

    def slice_reader(self, name: str) -> Callable[[Any], np.ndarray]:
        """Returns a function that reads slices of a linked array."""
        files = open_files(str(self.linked[name]))
        return lambda index: files[index].read().result()

    def restore(
        self, args: Mapping[str, Any], ahead_bytes: int = READ_AHEAD_BYTES
    ) -> dict[str, Any]:
        """Reads arrays from Orbax's files, with `ahead_bytes` in memory at a time."""
        import orbax.checkpoint as ocp

        handler = ocp.PyTreeCheckpointHandler(
            restore_concurrent_gb=math.ceil(ahead_bytes / 10**9)
        )
        named = {self.prefix + name: arg for name, arg in args.items()}
        with ocp.Checkpointer(handler) as reader:
            found = reader.restore(
                self.directory,
                args=ocp.args.PyTreeRestore(
                    item=dict.fromkeys(named, 0),
                    restore_args=named,
                    partial_restore=True,
                ),
            )
        return {name.removeprefix(self.prefix): x for name, x in found.items()}


def place_slices(read: Callable[[Any], np.ndarray], plan: ArrayPlan) -> Any:
    """Builds a stored array shard by shard from slices of the unpadded array."""

    # Several devices may hold one shard, which is read once.
    @functools.cache
    def shard(*spans: tuple[int, int]) -> np.ndarray:
        padded = np.zeros([stop - start for start, stop in spans], plan.stored_dtype)
        unpadded = without_padding(spans, plan)
        if unpadded is not None:
            filled = tuple(slice(s.stop - s.start) for s in unpadded)
            padded[filled] = read(unpadded)
        return padded

    def shard_at(index: Any) -> np.ndarray:
        return shard(*spans_of(index, plan.stored_shape))

    on_device = plan.on_device.stored
    array = jax.make_array_from_callback(plan.stored_shape, on_device, shard_at)
    return to_storage(array, plan)


def without_padding(spans: Spans, plan: ArrayPlan) -> Index | None:
    """Slice of the unpadded array in a shard's spans; None if all is padding."""
    pairs = zip(spans, plan.shape, strict=True)
    index = tuple(slice(start, min(stop, n)) for (start, stop), n in pairs)
    return index if all(s.start < s.stop for s in index) else None


def to_storage(x: jax.Array, plan: ArrayPlan) -> Any:
    """Moves a device array to storage; waits for host and disk storage."""
    stored = store(x, plan)
    # Waits, so that staged arrays do not pile up on the device.
    return stored if plan.is_on_device else jax.block_until_ready(stored)


def link(
    arrays: Mapping[str, DiskArray], folders: Mapping[str, str], target: pathlib.Path
) -> list[str]:
    """Hard-links files of disk arrays into a checkpoint; returns relative paths."""
    names = []
    for name, array in arrays.items():
        # A file may be linked only once it is complete.
        array.block_until_ready()
        for file in sorted(pathlib.Path(array.path).rglob("*")):
            if file.is_file():
                new = pathlib.Path(folders[name]) / file.relative_to(array.path)
                (target / new).parent.mkdir(parents=True, exist_ok=True)
                _link(file, target / new)
                names.append(str(new))
    return names


def _link(file: pathlib.Path, other: pathlib.Path) -> None:
    """Links or copies one file under a temporary name, and renames the link."""
    # A name per process, since several processes may link a file at once.
    new = other.with_name(f".{other.name}.{os.getpid()}")
    try:
        os.link(file, new)
    except OSError:  # another file system, or one without links
        shutil.copyfile(file, new)
    os.replace(new, other)
    new.unlink(missing_ok=True)  # os.replace keeps it if both are one file
