"""The arrays of one checkpoint, wherever their files are.

Orbax writes what is in memory. What rests on disks has its files already, which never
change: a checkpoint takes them under a second name, or copies of them where its
directory is on another disk.
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

from zjax.checkpoint.layout import Entry
from zjax.checkpoint.views import Source, whole_masters
from zjax.sharding.placement import ArrayPlan
from zjax.sharding.plan import DEVICE
from zjax.storage.array import DiskArray, open_files
from zjax.storage.move import rest

READ_AHEAD_BYTES = 8 * 10**9
"""Of arrays in memory, on the host at a time."""


@dataclasses.dataclass(frozen=True)
class Saved:
    """Where the arrays of a checkpoint are.

    Args:
        directory: What Orbax wrote.
        entries: Every array, by name.
        linked: Directories of files of arrays that rested on disks, by name.
    """

    directory: pathlib.Path
    entries: Mapping[str, Entry]
    linked: Mapping[str, pathlib.Path]

    @functools.cached_property
    def source(self) -> Source:
        """Its arrays, master weights whole."""
        return whole_masters(
            Source(self.entries, lambda name, index: self.read(name)[(..., *index)])
        )

    def read(self, name: str) -> np.ndarray:
        """Reads one array into host memory.

        Args:
            name: One of `entries`.

        Returns:
            The unpadded array, as it is stored.
        """
        entry = self.entries[name]
        if entry.is_empty:
            return np.zeros(entry.shape, entry.dtype)
        if name in self.linked:
            return self.part(name)(tuple(map(slice, entry.shape)))
        import orbax.checkpoint as ocp

        args = {name: ocp.RestoreArgs(restore_type=np.ndarray)}
        ahead_bytes = max(READ_AHEAD_BYTES, 16 * math.prod(entry.shape))
        return self.restore(args, ahead_bytes)[name]

    def part(self, name: str) -> Callable[[Any], np.ndarray]:
        """What reads slices of a linked array."""
        files = open_files(str(self.linked[name]))
        return lambda index: files[index].read().result()

    def restore(
        self, args: Mapping[str, Any], ahead_bytes: int = READ_AHEAD_BYTES
    ) -> dict[str, Any]:
        """Reads what Orbax wrote.

        Args:
            args: Its `RestoreArgs` by name.
            ahead_bytes: On the host at a time; more than the largest needs.

        Returns:
            Arrays by name.
        """
        import orbax.checkpoint as ocp

        handler = ocp.PyTreeCheckpointHandler(
            restore_concurrent_gb=math.ceil(ahead_bytes / 10**9)
        )
        with ocp.Checkpointer(handler) as reader:
            return reader.restore(
                self.directory,
                args=ocp.args.PyTreeRestore(
                    item=dict.fromkeys(args, 0),
                    restore_args=dict(args),
                    partial_restore=True,
                ),
            )


def place_slices(read: Callable[[Any], np.ndarray], row: ArrayPlan) -> Any:
    """An array whose shards are read one by one.

    Args:
        read: Gives slices of the unpadded array.
        row: Its place.

    Returns:
        The array at rest.
    """

    @functools.cache
    def shard(*spans: tuple[int, int]) -> np.ndarray:
        whole = np.zeros([stop - start for start, stop in spans], row.stored_dtype)
        inside = [
            slice(start, min(stop, n))
            for (start, stop), n in zip(spans, row.shape, strict=True)
        ]
        if all(s.start < s.stop for s in inside):
            filled = tuple(slice(s.stop - s.start) for s in inside)
            whole[filled] = read(tuple(inside))
        return whole

    def at(index: Any) -> np.ndarray:
        whole = index or (slice(None),) * len(row.shape)
        bounds = (s.indices(n) for s, n in zip(whole, row.stored_shape, strict=True))
        return shard(*((start, stop) for start, stop, _ in bounds))

    here = row.rest_in(DEVICE).stored
    array = jax.make_array_from_callback(row.stored_shape, here, at)
    return at_rest(array, row)


def at_rest(x: jax.Array, row: ArrayPlan) -> Any:
    """Sends an array to where it rests; the next must wait, unless it stays.

    Args:
        x: On the devices.
        row: Where it rests.

    Returns:
        The array at rest.
    """
    resting = rest(x, row)
    return resting if row.memory == DEVICE else jax.block_until_ready(resting)


def link(
    arrays: Mapping[str, DiskArray], folders: Mapping[str, str], target: pathlib.Path
) -> list[str]:
    """Gives the files of arrays a second name, without reading them.

    An array that does not change has the same files in several steps, and in the run.

    Args:
        arrays: By name, written or on their way.
        folders: The directory of each, in `target`.
        target: A directory that is made, or shared with other processes.

    Returns:
        The new names, as paths from `target`.
    """
    names = []
    for name, array in arrays.items():
        array.block_until_ready()
        for file in sorted(pathlib.Path(array.path).rglob("*")):
            if file.is_file():
                new = pathlib.Path(folders[name]) / file.relative_to(array.path)
                (target / new).parent.mkdir(parents=True, exist_ok=True)
                _link(file, target / new)
                names.append(str(new))
    return names


def _link(file: pathlib.Path, other: pathlib.Path) -> None:
    new = other.with_name(f".{other.name}.{os.getpid()}")
    try:
        os.link(file, new)
    except OSError:  # another file system, or one without links
        shutil.copyfile(file, new)
    os.replace(new, other)
    new.unlink(missing_ok=True)  # where both were the same file already
