"""The arrays of one checkpoint, wherever their files are.

Orbax writes what is in memory. What rests on disks has its files already, which never
change: a checkpoint takes them under a second name, or copies of them where its
directory is on another disk.
"""

import dataclasses
import errno
import math
import os
import pathlib
import shutil
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from zjax.checkpoint.layout import Entry
from zjax.sharding.placement import Row
from zjax.storage.array import DiskArray, open_files
from zjax.storage.move import rest

_READ_AHEAD_BYTES = 8 * 10**9


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

    def whole(self, name: str) -> np.ndarray:
        """Reads one array into host memory.

        Args:
            name: One of `entries`.

        Returns:
            The whole unpadded array.
        """
        entry = self.entries[name]
        if entry.is_empty:
            return np.zeros(entry.shape, entry.dtype)
        if name in self.linked:
            return self.part(name)(tuple(map(slice, entry.shape)))
        args = {name: ocp.RestoreArgs(restore_type=np.ndarray)}
        ahead_bytes = max(_READ_AHEAD_BYTES, 16 * math.prod(entry.shape))
        return self.restore(args, ahead_bytes)[name]

    def part(self, name: str) -> Callable[[Any], np.ndarray]:
        """What reads slices of a linked array."""
        files = open_files(str(self.linked[name]))
        return lambda index: files[index].read().result()

    def restore(
        self, args: Mapping[str, Any], ahead_bytes: int = _READ_AHEAD_BYTES
    ) -> dict[str, Any]:
        """Reads what Orbax wrote.

        Args:
            args: Its `RestoreArgs` by name.
            ahead_bytes: On the host at a time; more than the largest needs.

        Returns:
            Arrays by name.
        """
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


def place_slices(read: Callable[[Any], np.ndarray], row: Row) -> Any:
    """An array whose shards are read one by one.

    Args:
        read: Gives slices of the unpadded array.
        row: Its place.

    Returns:
        The array at rest.
    """

    def shard(index: Any) -> np.ndarray:
        spans = [s.indices(n)[:2] for s, n in zip(index, row.stored_shape, strict=True)]
        whole = np.zeros([stop - start for start, stop in spans], row.dtype)
        inside = [
            slice(start, min(stop, n))
            for (start, stop), n in zip(spans, row.shape, strict=True)
        ]
        if all(s.start < s.stop for s in inside):
            filled = tuple(slice(s.stop - s.start) for s in inside)
            whole[filled] = read(tuple(inside))
        return whole

    here = row.rest_in("device").sharding
    array = jax.make_array_from_callback(
        row.stored_shape,
        here,
        lambda index: shard(index or (slice(None),) * len(row.shape)),
    )
    return rest(array, row)


def link(arrays: Mapping[str, DiskArray], target: pathlib.Path) -> None:
    """Gives the files of arrays a second name.

    Args:
        arrays: By name, written or on their way.
        target: A directory that is made, or shared with other processes.
    """
    for name, array in arrays.items():
        array.block_until_ready()
        for file in sorted(pathlib.Path(array.path).rglob("*")):
            other = target / name / file.relative_to(array.path)
            if file.is_file():
                other.parent.mkdir(parents=True, exist_ok=True)
                _link(file, other)


def _link(file: pathlib.Path, other: pathlib.Path) -> None:
    other.unlink(missing_ok=True)
    try:
        os.link(file, other)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK):
            raise
        shutil.copyfile(file, other)
    with other.open("rb") as written:
        os.fsync(written.fileno())
