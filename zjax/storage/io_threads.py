"""I/O threads that read and write chunks, and the pool of memory for reads."""

import collections
import contextlib
import functools
import itertools
import math
import mmap
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zjax.sharding.mesh import platform_of


class Buffers:
    """A pool of memory by size; memory returns when an array is deleted.

    Args:
        limit_bytes: Bytes beyond which free memory is unmapped before more is mapped.
    """

    def __init__(self, limit_bytes: int):
        self._limit, self._held = limit_bytes, 0
        self._lock = threading.Lock()
        # Deques, as finalizers append without the lock: they may interrupt its holder.
        self._free: dict[int, collections.deque[mmap.mmap]] = {}

    def take(self, shape: Sequence[int], dtype: Any) -> np.ndarray:
        """Returns an uninitialized array of one element or more."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        with self._lock:
            free = self._free.setdefault(size, collections.deque())
            memory = free.pop() if free else None
            dropped = [] if memory else list(self._make_room(size))
        del dropped  # unmapped without the lock: Linux takes a while
        memory = memory or self._make(size)
        view = np.frombuffer(memory, np.uint8)
        # All views have `view` as base, so that memory returns after the last of them.
        weakref.finalize(view, free.append, memory).atexit = False
        return view.view(dtype).reshape(shape)

    def _make_room(self, size: int) -> Iterator[mmap.mmap]:
        """Yields free memory to unmap, largest first, until `size` more bytes fit."""
        for other in sorted(self._free, reverse=True):
            while self._free[other] and self._held + size > self._limit:
                self._held -= other
                yield self._free[other].pop()
        self._held += size

    def _make(self, size: int) -> mmap.mmap:
        """Maps new memory, and returns the bytes to the budget if that fails."""
        try:
            return _new(size)
        except BaseException:
            with self._lock:
                self._held -= size
            raise


_SPARE = threading.local()


def thread_memory(size: int) -> np.ndarray:
    """Returns uninitialized, page-aligned uint8[size], until this thread asks again."""
    if len(getattr(_SPARE, "memory", b"")) < size:
        _SPARE.memory = mmap.mmap(-1, size)
    return np.frombuffer(_SPARE.memory, np.uint8, size)


def _new(size: int) -> mmap.mmap:
    """Maps anonymous memory, on huge pages if the kernel has them."""
    memory = mmap.mmap(-1, size)
    with contextlib.suppress(AttributeError, OSError):  # not every kernel has them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


TO_DEVICE, TO_HOST = "device", "pinned_host"
"""Directions, by the memory kind of the target."""


class CopyStreams:
    """Makes the copies of a process alternate between directions.

    A GPU hands copies between memories to an even number of streams in turn, whatever
    the direction. A copy to the device may therefore wait behind a copy to the host,
    which waits for the program that computes the result. With alternating directions,
    each direction has every second stream to itself.
    """

    def __init__(self) -> None:
        self._last = TO_HOST

    def take_turn(self, direction: str, place: Any) -> None:
        """Prepares for a copy by each local device in the mesh of `place`."""
        if platform_of(place.mesh) != "gpu":
            return
        # Copy a single number the opposite way to take the turn.
        if direction == self._last:
            other = TO_HOST if direction == TO_DEVICE else TO_DEVICE
            jax.device_put(_number(place.mesh, direction), _on_each(place.mesh, other))
        self._last = direction


COPY_STREAMS = CopyStreams()


def send(x: jax.Array, place: NamedSharding) -> jax.Array:
    """Starts to copy an array, in turn, to another memory with equal shards."""
    COPY_STREAMS.take_turn(place.memory_kind or TO_DEVICE, place)
    # Callers delete `x` after the copy, which must not share memory with it.
    return jax.device_put(x, place, may_alias=False)


@functools.lru_cache(maxsize=4)
def _number(mesh: Mesh, memory: str) -> jax.Array:
    """Caches a scalar on each device: making one per turn would itself be a copy."""
    return jax.device_put(jnp.zeros(()), _on_each(mesh, memory))


@functools.lru_cache(maxsize=4)
def _on_each(mesh: Mesh, memory: str) -> NamedSharding:
    """Replicates over the local devices, in a memory."""
    here = Mesh(np.asarray(mesh.local_devices), ("device",))
    return NamedSharding(here, PartitionSpec(), memory_kind=memory)


Direction = Literal["read", "write"]
CONCURRENCY = 32
"""Chunks in transfer at a time, in each direction."""
_STARTERS = 8
"""Arrays that copy from devices or allocate host memory at a time, per direction."""


class Job(NamedTuple):
    """The reads or writes of one array.

    Args:
        act: Function that reads or writes a chunk; called in any order.
        pieces: Arguments of `act`, one tuple per chunk; one chunk or more.
    """

    act: Callable[..., None]
    pieces: Sequence[tuple[Any, ...]]
    result: Any


def move_chunks(direction: Direction, prepare: Callable[[], Job]) -> futures.Future:
    """Calls `prepare`, which may block, and runs the job, all in I/O threads.

    The future is set to the job's result or first error, once no chunk is in transfer.
    """
    job_future: futures.Future[Any] = futures.Future()

    def start() -> None:
        transfers, result = [], None
        try:
            act, pieces, result = prepare()
            for piece in pieces:
                transfers.append(_movers(direction).submit(act, *piece))
        # A chunk may be in transfer already: the job fails only after all transfers
        # end.
        except BaseException as error:
            transfers.append(_failed(error))
        _settle(job_future, transfers, result)

    _starters(direction).submit(start)
    return job_future


def _failed(error: BaseException) -> futures.Future:
    """Returns a future that has failed."""
    future: futures.Future[None] = futures.Future()
    future.set_exception(error)
    return future


def _settle(
    job_future: futures.Future, transfers: list[futures.Future], result: Any
) -> None:
    """Sets the future of a job once all transfers are done."""
    remaining = itertools.count(len(transfers) - 1, -1)  # `next` is atomic

    def count_down(_: futures.Future) -> None:
        if next(remaining):
            return
        errors = [error for each in transfers if (error := each.exception())]
        # Break the reference cycle; else the result lives until a garbage collection.
        transfers.clear()
        if errors:
            job_future.set_exception(errors[0])
        else:
            job_future.set_result(result)

    for each in transfers:
        each.add_done_callback(count_down)


@functools.cache
def _starters(direction: Direction) -> futures.ThreadPoolExecutor:
    # The next array starts while the last chunks of another are in transfer: the chunks
    # of one array are too few to keep a disk busy.
    return futures.ThreadPoolExecutor(_STARTERS, f"storage-{direction}")


@functools.cache
def _movers(direction: Direction) -> futures.ThreadPoolExecutor:
    # Pools per direction: reads must not queue behind writes.
    return futures.ThreadPoolExecutor(CONCURRENCY, f"storage-{direction}-chunk")
