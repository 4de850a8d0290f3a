"""Compares disk throughput of a step's transfers with direct reads and writes."""

import dataclasses
import mmap
import os
import pathlib
import time
from collections.abc import Callable
from concurrent import futures

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from zjax.run.bench import Spread
from zjax.settings.schema import Mesh
from zjax.sharding.describe import render_table
from zjax.sharding.mesh import make_mesh
from zjax.sharding.placement import ArrayPlan
from zjax.storage.array import DiskArray
from zjax.storage.files import CHUNK_BYTES, disk_bytes
from zjax.storage.io_threads import CONCURRENCY
from zjax.storage.scratch import check_disks, open_scratch

ARRAY_BYTES = 256 << 20
"""Bytes of the largest array of a model of 6.7 billion parameters."""
NUM_ARRAYS = 8
WARM_UP_ROUNDS, TIMED_ROUNDS = 3, 5


@dataclasses.dataclass(frozen=True)
class DiskSpeed:
    """Bytes per second of several disks together.

    Args:
        write: Bytes per second from device arrays to complete files.
        read: Bytes per second from files to device arrays.
        raw_write: Bytes per second of `pwrite` to files opened with O_DIRECT, with the
            concurrency of a step.
        raw_read: Bytes per second of `preadv` from files opened with O_DIRECT.
    """

    name: str
    write: Spread
    read: Spread
    raw_write: Spread
    raw_read: Spread


def measure_disks(
    paths: tuple[str, ...],
    *,
    array_bytes: int = ARRAY_BYTES,
    num_arrays: int = NUM_ARRAYS,
) -> DiskSpeed:
    """Measures writes and reads of arrays, in turn with plain files of equal bytes.

    `paths` are existing directories, one per disk. `array_bytes` should be a multiple
    of 16 MiB, else the numbers say little about a step.
    """
    plan = _make_plan(paths, array_bytes)
    # Arrays and plain files are on the disks at the same time.
    check_disks(paths, 2 * num_arrays * [disk_bytes(plan)])
    total = num_arrays * array_bytes
    chunk = min(CHUNK_BYTES, array_bytes)
    sides = (
        _Arrays(plan, num_arrays),
        _Files(paths, chunk, num_files=total // chunk),
    )
    rates: list[list[float]] = []
    for _ in range(WARM_UP_ROUNDS + TIMED_ROUNDS):
        # The sides take turns within a round, so that drift of a disk hits both alike.
        steps = [step for side in sides for step in (side.write, side.read)]
        rates.append([total / _seconds(step) for step in steps])
    for side in sides:
        side.remove()
    write, read, raw_write, raw_read = (
        Spread.of(column) for column in zip(*rates[WARM_UP_ROUNDS:], strict=True)
    )
    return DiskSpeed(", ".join(paths), write, read, raw_write, raw_read)


def describe_disks(speed: DiskSpeed) -> str:
    """Formats a table of the speeds, at most 100 columns wide."""

    def cells(what: str, ours: Spread, raw: Spread) -> tuple[str, ...]:
        rates = (x.describe(lambda b: f"{b / 1e9:.2f}") for x in (ours, raw))
        return (what, *rates, f"{ours.median / raw.median:.2f}")

    rows = [
        cells("write", speed.write, speed.raw_write),
        cells("read", speed.read, speed.raw_read),
    ]
    columns = (speed.name, "GB/s as a step does", "GB/s of O_DIRECT", "ratio")
    return render_table(columns, rows, right=(1, 2, 3))


def _make_plan(paths: tuple[str, ...], array_bytes: int) -> ArrayPlan:
    """Plan of one float32 array of a given size on disks, on the first device."""
    mesh = make_mesh(Mesh(), jax.devices()[:1])
    sharding = NamedSharding(mesh, PartitionSpec())
    shape, dtype = (array_bytes // 1024, 256), np.dtype(np.float32)
    return ArrayPlan("", shape, dtype, sharding, sharding, disks=paths)


class _Arrays:
    """Device arrays, written and read as a step does."""

    def __init__(self, plan: ArrayPlan, num_arrays: int):
        self.plan = plan
        self.make = jax.jit(
            jax.random.normal, static_argnums=1, out_shardings=plan.stored
        )
        self.keys = jax.random.split(jax.random.key(0), num_arrays)
        self.held: list[DiskArray] = []

    def write(self) -> None:
        # New arrays for each write: JAX caches the host copy of a transferred array.
        arrays = [self.make(key, self.plan.shape) for key in self.keys]
        self.held = [DiskArray.write(x, self.plan) for x in arrays]
        for x in self.held:
            x.block_until_ready()

    def read(self) -> None:
        for x in self.held:
            x.prefetch()
        arrays: list[jax.Array] = [x.to_devices() for x in self.held]
        jax.block_until_ready(arrays)
        self.remove()

    def remove(self) -> None:
        for x in self.held:
            x.delete()


class _Files:
    """Files of one chunk each, written and read with O_DIRECT."""

    def __init__(self, disks: tuple[str, ...], size: int, *, num_files: int):
        self.scratch = open_scratch(disks)
        paths = (self.scratch.take("file", size) for _ in range(num_files))
        self.files = [*map(pathlib.Path, paths)]
        content = np.random.default_rng(0).bytes(size)
        # O_DIRECT needs page-aligned buffers, which mmap returns.
        self.free = [mmap.mmap(-1, size) for _ in range(CONCURRENCY)]
        for buffer in self.free:
            buffer[:] = content
        self.threads = futures.ThreadPoolExecutor(CONCURRENCY)

    def write(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT
        self._each(flags, lambda file, buffer: os.pwrite(file, buffer, 0))

    def read(self) -> None:
        self._each(os.O_RDONLY, lambda file, buffer: os.preadv(file, [buffer], 0))

    def remove(self) -> None:
        for path in self.files:
            path.unlink()
            self.scratch.remove(str(path))

    def _each(self, flags: int, act: Callable[[int, mmap.mmap], int]) -> None:
        """Applies `act` to all files concurrently, each with a free buffer."""

        def one(path: pathlib.Path) -> None:
            buffer = self.free.pop()
            file = os.open(path, flags | os.O_DIRECT, 0o600)
            try:
                moved = act(file, buffer)
            finally:
                os.close(file)
                self.free.append(buffer)
            # A short read or write would count as fast.
            assert moved == len(buffer), f"{path}: {moved} of {len(buffer)} bytes"

        list(self.threads.map(one, self.files))


def _seconds(step: Callable[[], None]) -> float:
    """Wall-clock seconds of a call."""
    start = time.perf_counter()
    step()
    return time.perf_counter() - start
