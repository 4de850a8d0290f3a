"""Threads that move chunks between memory and disks, many at a time.

The chunks of one array are not enough to keep a disk busy, and those that come must not
queue behind those that go: each direction has a crew of its own, which goes on with the
next array while the last chunks of one are on their way.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any, Literal, NamedTuple

Direction = Literal["read", "write"]
CONCURRENCY = 32
"""Chunks on their way at a time, in each direction."""
_STARTERS = 8
"""Arrays at a time that come from devices, or for which memory is sought."""


class Job(NamedTuple):
    """What is to be done with the chunks of an array.

    Args:
        act: Called with each piece, in any order.
        pieces: Its arguments, one tuple or more.
        result: Of the whole, once all are done.
    """

    act: Callable[..., None]
    pieces: Sequence[tuple[Any, ...]]
    result: Any


def move_chunks(direction: Direction, prepare: Callable[[], Job]) -> futures.Future:
    """Moves all chunks of an array.

    Args:
        direction: Whose turn they wait for.
        prepare: Called in another thread; may wait, for an array to be written say.

    Returns:
        The job's result, or the first error; either once no chunk is on its way.

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
    """Ends the whole with the last of its parts, and holds nothing any more."""
    left = itertools.count(len(moving) - 1, -1)  # its steps are atomic

    def note(_: futures.Future) -> None:
        if next(left):
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
