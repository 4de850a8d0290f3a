"""The ticks of a schedule as a program reads them.

What happens outside of the stages, as embedding and loss, is due in some ticks alone.
Which ones they are is known on all devices, so that these may communicate under the
condition; a stage must not under one of its own.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zjax.parallel.schedule import IDLE, Kind, Lane, Schedule


@dataclasses.dataclass(frozen=True)
class Turn:
    """The passes of one kind in a tick, or in each of some.

    Args:
        lane: Of every stage.
        first: The microbatch that is in the first chunk of the first stage, or `IDLE`.
        last: The one that is in the last chunk of the last stage, or `IDLE`.
    """

    lane: Lane
    first: Any
    last: Any


for _record in (Lane, Turn):
    _fields = [field.name for field in dataclasses.fields(_record)]
    jax.tree_util.register_dataclass(_record, _fields, [])


def make_turns(schedule: Schedule) -> dict[Kind, Turn]:
    """The passes of all ticks.

    Args:
        schedule: Its lanes have NumPy arrays, and so have the turns.

    Returns:
        By kind, each array with the ticks first.

    Example:
        >>> from zjax.parallel.schedule import make_schedule
        >>> schedule = make_schedule("1f1b", num_stages=2, num_microbatches=3)
        >>> make_turns(schedule)["backward"].last.tolist()
        [-1, 0, 1, 2, -1]
    """
    last_chunk = schedule.num_chunks - 1

    def turns(lane: Lane) -> Turn:
        first = np.where(lane.chunk[:, 0] == 0, lane.microbatch[:, 0], IDLE)
        last = np.where(lane.chunk[:, -1] == last_chunk, lane.microbatch[:, -1], IDLE)
        return Turn(lane, first, last)

    return {kind: turns(lane) for kind, lane in schedule.lanes.items()}


def due(number: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A microbatch to work on, and whether there is one.

    Args:
        number: int32[], or `IDLE`.

    Returns:
        The number, or any, and bool[].
    """
    return jnp.maximum(number, 0), number != IDLE


def where_due(
    ticks: np.ndarray, number: jax.Array, run: Callable[..., Any], start: Any
) -> Any:
    """Does what is due in some ticks alone.

    Args:
        ticks: The microbatch of each tick that runs this program, or `IDLE`; if all
            have one, there is no condition. If none has, there is: without a reader of
            what stages send, JAX 0.10 fails to compile some of them.
        number: int32[], that of this tick.
        run: `run(number, start)` returns what has the form of `start`.
        start: A tree of arrays.

    Returns:
        What `run` does, and `start` itself in a tick that has no microbatch.

    Example:
        >>> ticks, add = np.array([5, IDLE]), lambda number, total: total + number
        >>> [int(where_due(ticks, jnp.int32(tick), add, 1)) for tick in ticks]
        [6, 1]
    """
    microbatch, is_due = due(number)
    if (ticks != IDLE).all():
        return run(microbatch, start)
    return jax.lax.cond(is_due, functools.partial(run, microbatch), lambda x: x, start)
