"""Copies up and copies down, each on streams of their own.

A GPU hands copies between memories to an even number of streams in turn, whatever their
direction. One that goes up may so wait behind one that goes down, and that behind the
program whose result it takes. Where directions alternate, each has every other stream
for itself; a copy of a single number takes the turn where none is due.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zjax.sharding.mesh import platform_of

UP, DOWN = "device", "pinned_host"
"""Directions, by the memory where they end."""


class Lanes:
    """Keeps the copies of one process in turn."""

    def __init__(self) -> None:
        self._last = DOWN

    def enter(self, direction: str, place: Any) -> None:
        """Says that the next copy goes this way.

        Args:
            direction: `UP` or `DOWN`.
            place: Sharding of the array that goes; each device of its mesh in this
                process has one copy.
        """
        if not _has_streams(place.mesh):
            return
        if direction == self._last:
            other = DOWN if direction == UP else UP
            jax.device_put(_number(place.mesh, direction), _on_each(place.mesh, other))
        self._last = direction


LANES = Lanes()
"""Of this process."""


def send(x: jax.Array, place: NamedSharding) -> jax.Array:
    """Starts to copy an array to another memory, in its turn.

    Args:
        x: In one memory.
        place: The other, with the same shards.

    Returns:
        The copy, perhaps still on its way.
    """
    LANES.enter(place.memory_kind or UP, place)
    return jax.device_put(x, place, may_alias=False)


def _has_streams(mesh: Mesh) -> bool:
    return platform_of(mesh) == "gpu"


@functools.lru_cache(maxsize=4)
def _number(mesh: Mesh, memory: str) -> jax.Array:
    return jax.device_put(jnp.zeros(()), _on_each(mesh, memory))


@functools.lru_cache(maxsize=4)
def _on_each(mesh: Mesh, memory: str) -> NamedSharding:
    here = Mesh(np.asarray(mesh.local_devices), ("device",))
    return NamedSharding(here, PartitionSpec(), memory_kind=memory)
