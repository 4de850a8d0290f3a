"""I/O threads that read and write chunks, and copy streams between devices and host."""

import functools
import itertools
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zjax.sharding.mesh import platform_of

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
        if not _has_streams(place.mesh):
            return
        # Copy a single number the opposite way to take the turn.
        if direction == self._last:
            other = TO_HOST if direction == TO_DEVICE else TO_DEVICE
            jax.device_put(_number(place.mesh, direction), _on_each(place.mesh, other))
        self._last = direction


COPY_STREAMS = CopyStreams()
"""The copy streams of this process."""


def send(x: jax.Array, place: NamedSharding) -> jax.Array:
    """Starts to copy an array, in turn, to another memory with equal shards."""
    COPY_STREAMS.take_turn(place.memory_kind or TO_DEVICE, place)
    # Callers delete `x` after the copy, which must not share memory with it.
    return jax.device_put(x, place, may_alias=False)


def _has_streams(mesh: Mesh) -> bool:
    return platform_of(mesh) == "gpu"


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
        result: Result of the job.
    """

    act: Callable[..., None]
    pieces: Sequence[tuple[Any, ...]]
    result: Any


def move_chunks(direction: Direction, prepare: Callable[[], Job]) -> futures.Future:
    """Calls `prepare`, which may block, and runs the job, all in I/O threads.

    The future is set to the job's result or first error, once no chunk is in transfer.

    Example:
        >>> chunks = []
        >>> job = Job(chunks.append, [(1,), (2,)], "done")
        >>> move_chunks("read", lambda: job).result(), sorted(chunks)
        ('done', [1, 2])
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
