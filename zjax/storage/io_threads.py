"""Threads that read and write chunks of arrays, many at a time.

The chunks of one array do not keep a disk busy, and reads must not queue behind writes:
each direction has threads of its own, which start the next array while the last chunks
of one are in transfer.
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
"""Arrays being prepared at a time: copied from devices, or given host memory."""


class Job(NamedTuple):
    """The reads or writes of one array.

    Args:
        act: Function called with each piece, in any order.
        pieces: Arguments of each call, one tuple or more.
        result: Result of the job.
    """

    act: Callable[..., None]
    pieces: Sequence[tuple[Any, ...]]
    result: Any


def move_chunks(direction: Direction, prepare: Callable[[], Job]) -> futures.Future:
    """Runs a job that `prepare` makes, in another thread, where it may wait.

    Returns:
        Future of the job's result or first error, set once no chunk is in transfer.

    Example:
        >>> found = []
        >>> job = Job(found.append, [(1,), (2,)], "done")
        >>> move_chunks("read", lambda: job).result(), sorted(found)
        ('done', [1, 2])
    """
    whole: futures.Future[Any] = futures.Future()

    def start() -> None:
        moving, result = [], None
        try:
            act, pieces, result = prepare()
            for piece in pieces:
                moving.append(_movers(direction).submit(act, *piece))
        except BaseException as error:
            moving.append(_failed(error))
        _settle(whole, moving, result)

    _starters(direction).submit(start)
    return whole


def _failed(error: BaseException) -> futures.Future:
    future: futures.Future[None] = futures.Future()
    future.set_exception(error)
    return future


def _settle(whole: futures.Future, moving: list[futures.Future], result: Any) -> None:
    """Sets the future of a job once all its chunks are done."""
    remaining = itertools.count(len(moving) - 1, -1)  # its steps are atomic

    def note(_: futures.Future) -> None:
        if next(remaining):
            return
        errors = [error for each in moving if (error := each.exception())]
        moving.clear()  # or they hold the result, and each other, until garbage goes
        if errors:
            whole.set_exception(errors[0])
        else:
            whole.set_result(result)

    for each in moving:
        each.add_done_callback(note)


@functools.cache
def _starters(direction: Direction) -> futures.ThreadPoolExecutor:
    return futures.ThreadPoolExecutor(_STARTERS, f"storage-{direction}")


@functools.cache
def _movers(direction: Direction) -> futures.ThreadPoolExecutor:
    return futures.ThreadPoolExecutor(CONCURRENCY, f"storage-{direction}-chunk")
