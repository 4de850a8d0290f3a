"""Threads that read and write chunks of arrays, many at a time.

The chunks of one array are too few to keep a disk busy: the next array starts while the
last chunks of one are in transfer. Separate threads read and write, so that reads do
not queue behind writes.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any, Literal, NamedTuple

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
    """Calls `prepare`, which may block, and runs its job, all in other threads.

    Returns:
        Future of the job's result or first error, set once no chunk is in transfer.

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
        except BaseException as error:
            transfers.append(_failed(error))
        _settle(job_future, transfers, result)

    _starters(direction).submit(start)
    return job_future


def _failed(error: BaseException) -> futures.Future:
    future: futures.Future[None] = futures.Future()
    future.set_exception(error)
    return future


def _settle(
    job_future: futures.Future, transfers: list[futures.Future], result: Any
) -> None:
    """Sets the future of a job once all its transfers are done."""
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
    return futures.ThreadPoolExecutor(_STARTERS, f"storage-{direction}")


@functools.cache
def _movers(direction: Direction) -> futures.ThreadPoolExecutor:
    return futures.ThreadPoolExecutor(CONCURRENCY, f"storage-{direction}-chunk")
