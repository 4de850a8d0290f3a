"""An array stored on a disk.

Files are written and read past the page cache, in chunks with a checksum. The files are
scratch: another process reads only files with hard links in a checkpoint, which never
change.
"""

import functools
import itertools
import math
import os
import weakref
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any

import jax
import numpy as np
import tensorstore
from jax.sharding import SingleDeviceSharding

from zjax.errors import Problem, StorageError, find_remedy
from zjax.sharding.placement import ArrayPlan
from zjax.storage.files import (
    BLOCK_BYTES,
    chunk_shape,
    disk_bytes,
    read_file,
    write_file,
)
from zjax.storage.io_threads import (
    CONCURRENCY,
    Buffers,
    Job,
    move_chunks,
    send,
    thread_memory,
)
from zjax.storage.scratch import Scratch, open_scratch
from zjax.storage.transfers import FROM_DISKS_BYTES


class DiskArray:
    """A leaf of a state, stored on a disk in place of a `jax.Array`.

    `path` is the directory of the files, set once writing has started.
    """

    def __init__(self, row: ArrayPlan, shards: Sequence[tuple[Any, Any]]):
        self.row, self.path = row, ""
        self.shape, self.dtype = row.stored_shape, np.dtype(row.stored_dtype)
        self.nbytes = math.prod(self.shape) * self.dtype.itemsize
        shard = row.stored.shard_shape(self.shape)
        self._chunk = chunk_shape(self.shape, shard, self.dtype.itemsize)
        self._is_deleted = False
        self._coming: futures.Future[list[np.ndarray]] | None = None
        write = functools.partial(self._write, shards, open_scratch(row.disks))
        self._written = move_chunks("write", write)

    @classmethod
    def write(cls, x: jax.Array, row: ArrayPlan) -> "DiskArray":
        """Starts to write an array that has one dim and one element or more."""
        # JAX has a pool of pinned memory; another copy on the host would map its own.
        pinned = send(x, row.on_host.stored)
        shards = {spans_of(s.index, x.shape): s.data for s in pinned.addressable_shards}
        return cls(row, list(shards.items()))

    @property
    def sharding(self) -> Any:
        """Sharding of the array on devices."""
        return self.row.stored

    def prefetch(self) -> None:
        """Starts to read the shards of the process's devices into host memory."""
        self.check_held()
        if self._coming is None:
            self._coming = move_chunks("read", self._read)

    def forget(self) -> None:
        """Drops the result of `prefetch`."""
        self._coming = None

    def is_read(self) -> bool:
        """Whether `prefetch` has ended or failed."""
        return self._coming is not None and self._coming.done()

    def to_devices(self) -> jax.Array:
        """Reads the array onto the devices; copies from the host may still run.

        Raises StorageError if writing failed, or if a chunk does not match its
        checksum.
        """
        self.prefetch()
        assert self._coming is not None
        coming, self._coming = self._coming, None
        parts = dict(zip(self._bounds(), self._result(coming), strict=True))
        indices = self.row.stored.addressable_devices_indices_map(self.shape)
        arrays = [
            jax.device_put(
                parts[spans_of(index, self.shape)], SingleDeviceSharding(device)
            )
            for device, index in indices.items()
        ]
        return jax.make_array_from_single_device_arrays(
            self.shape, self.row.stored, arrays
        )

    def read(self, index: Any = ...) -> np.ndarray:
        """Reads a slice, by a NumPy index; the whole array by default."""
        self.block_until_ready()
        return self._with_remedy(lambda: open_files(self.path)[index].read().result())

    def block_until_ready(self) -> "DiskArray":
        """Waits until the array is written; raises StorageError if writing failed."""
        self.check_held()
        self._result(self._written)
        return self

    def is_ready(self) -> bool:
        """Whether writing has ended or failed."""
        return self._written.done()

    def delete(self) -> None:
        """Returns the files for reuse by another array, once written.

        The files of an array that is garbage-collected are removed instead.
        """
        if not self._is_deleted:
            self._is_deleted = True
            self._written.add_done_callback(lambda _: self._give_back())

    def _give_back(self) -> None:
        # The files are reused from here on: the finalizer must not remove files of
        # another array.
        self._drop.detach()
        open_scratch(self.row.disks).give_back(self.path)

    def is_deleted(self) -> bool:
        """Whether the array was deleted."""
        return self._is_deleted

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Reads the whole array, for NumPy."""
        return self.read().astype(dtype or self.dtype)

    def check_held(self) -> None:
        """Raises `jax.Array`'s RuntimeError if the array was deleted."""
        if self.is_deleted():
            raise RuntimeError(f"Array has been deleted with shape={self.shape}.")

    def _bounds(self) -> list[Any]:
        """Lists the bounds of the distinct shards of the process."""
        indices = self.row.stored.addressable_devices_indices_map(self.shape)
        return list(dict.fromkeys(spans_of(i, self.shape) for i in indices.values()))

    def _write(self, parts: Sequence[tuple[Any, Any]], scratch: Scratch) -> Job:
        """Prepares the directory and the list of chunks to write."""
        kind = self.shape, self.dtype, self._chunk, tuple(bounds for bounds, _ in parts)
        self.path = scratch.take(kind, disk_bytes(self.row))
        self._drop = weakref.finalize(self, scratch.remove, self.path)
        self._drop.atexit = False  # the directory of the process goes then
        _describe_files(self.path, self._chunk, self.row)
        pieces = [
            piece
            for bounds, data in parts
            for piece in self._pieces(bounds, np.asarray(data))
        ]
        for path in {os.path.dirname(path) for path, _ in pieces}:
            os.makedirs(path, exist_ok=True)
        return Job(self._write_chunk, pieces, None)

    def _read(self) -> Job:
        """Allocates host memory and lists the chunks to read."""
        # Files exist only once written; a failed write fails the read.
        self._written.result()
        bounds = self._bounds()
        parts = [
            _buffers().take([stop - start for start, stop in each], self.dtype)
            for each in bounds
        ]
        pairs = zip(bounds, parts, strict=True)
        pieces = [piece for pair in pairs for piece in self._pieces(*pair)]
        return Job(self._read_chunk, pieces, parts)

    def _pieces(self, bounds: Any, part: np.ndarray) -> list[tuple[str, np.ndarray]]:
        """Pairs the path of each chunk of a shard with the chunk's view of `part`."""
        sized = list(zip(bounds, self._chunk, strict=True))
        pieces = []
        spans = (range(start, stop, size) for (start, stop), size in sized)
        for corner in itertools.product(*spans):
            ats = list(zip(corner, sized, strict=True))
            name = "/".join(str(at // size) for at, (_, size) in ats)
            index = (slice(at - a, at - a + size) for at, ((a, _), size) in ats)
            pieces.append((f"{self.path}/c/{name}", part[tuple(index)]))
        return pieces

    def _write_chunk(self, path: str, part: np.ndarray) -> None:
        """Writes one chunk, padded to full size in thread memory if need be."""
        if self._is_in_blocks(part):
            write_file(path, _bytes_of(part))
            return
        # Chunks at an edge are padded: all files have one size, and direct I/O needs
        # alignment.
        whole = self._whole_chunk()
        whole[tuple(map(slice, part.shape))] = part
        write_file(path, _bytes_of(whole))

    def _read_chunk(self, path: str, part: np.ndarray) -> None:
        """Reads one chunk, through thread memory if it is padded or not aligned."""
        if self._is_in_blocks(part):
            read_file(path, _bytes_of(part))
            return
        whole = self._whole_chunk()
        read_file(path, _bytes_of(whole))
        part[...] = whole[tuple(map(slice, part.shape))]

    def _is_in_blocks(self, part: np.ndarray) -> bool:
        """Whether O_DIRECT can transfer a chunk from or to memory without a copy."""
        is_whole = part.shape == self._chunk and part.flags.c_contiguous
        return is_whole and not part.ctypes.data % BLOCK_BYTES

    def _whole_chunk(self) -> np.ndarray:
        """Returns page-aligned memory of the thread for a whole chunk."""
        memory = thread_memory(math.prod(self._chunk) * self.dtype.itemsize)
        return memory.view(self.dtype).reshape(self._chunk)

    def _result(self, future: futures.Future[Any]) -> Any:
        return self._with_remedy(future.result)

    def _with_remedy(self, call: Callable[[], Any]) -> Any:
        """Turns an I/O error of `call` into a StorageError with a remedy."""
        try:
            return call()
        except StorageError:
            raise
        except (OSError, ValueError) as error:
            said, _, _ = str(error).partition(" [")  # a description of the files
            cause = said.splitlines()[0] if said else type(error).__name__
            remedy = find_remedy(error, default="make room or mend the disk")
            holds = f"holds {self.row.path} and " if self.row.path else ""
            raise StorageError(
                Problem(
                    "zero.offload.nvme_paths",
                    self.path,
                    f"{holds}cannot be written or read ({cause})",
                    f"{remedy}; the run resumes from its last sound checkpoint",
                )
            ) from error


def open_files(path: str) -> tensorstore.TensorStore:
    """Opens the files of an array, in directory `path`, for reading."""
    return tensorstore.open(_driver(path), context=_context(), open=True).result()


def _describe_files(path: str, chunk: tuple[int, ...], row: ArrayPlan) -> None:
    """Writes the Zarr 3 metadata of the files, unless an earlier array left it."""
    if os.path.exists(f"{path}/zarr.json"):
        return
    metadata = {
        "shape": row.stored_shape,
        "data_type": np.dtype(row.stored_dtype).name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
        "codecs": [
            {"name": "bytes", "configuration": {"endian": "little"}},
            {"name": "crc32c"},
        ],
    }
    spec = _driver(path) | {"metadata": metadata}
    tensorstore.open(spec, context=_context(), create=True).result()


def _driver(path: str) -> dict[str, Any]:
    """Returns the TensorStore spec of a directory."""
    return {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{path}/"},
        # Files of zeros are written, too: one that is missing is an error.
        "fill_missing_data_reads": False,
    }


@functools.cache
def _context() -> tensorstore.Context:
    return tensorstore.Context({"file_io_concurrency": {"limit": CONCURRENCY}})


@functools.cache
def _buffers() -> Buffers:
    return Buffers(jax.local_device_count() * FROM_DISKS_BYTES)


def _bytes_of(chunk: np.ndarray) -> np.ndarray:
    return chunk.reshape(-1).view(np.uint8)


def spans_of(index: Any, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Returns start and stop in each dim of an array's slice."""
    index = index or (slice(None),) * len(shape)
    bounds = (s.indices(n) for s, n in zip(index, shape, strict=True))
    return tuple((start, stop) for start, stop, _ in bounds)
