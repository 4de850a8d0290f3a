"""Keeps copies to devices and copies to the host on streams of their own.

A GPU gives copies between memories to an even number of streams in turn, whatever their
direction. A copy to the device may then wait behind one to the host, and that behind
the program whose result it copies. Where directions alternate, each has every other
stream for itself; a copy of a single number takes a turn where the other direction has
none.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zjax.sharding.mesh import platform_of

TO_DEVICE, TO_HOST = "device", "pinned_host"
"""Directions, by the memory kind of the target."""


class CopyStreams:
    """Has the copies of a process alternate between directions."""

    def __init__(self) -> None:
        self._last = TO_HOST

    def take_turn(self, direction: str, place: Any) -> None:
        """Prepares for a copy by each device of this process in the mesh of `place`."""
        if not _has_streams(place.mesh):
            return
        if direction == self._last:
            other = TO_HOST if direction == TO_DEVICE else TO_DEVICE
            jax.device_put(_number(place.mesh, direction), _on_each(place.mesh, other))
        self._last = direction


COPY_STREAMS = CopyStreams()
"""Those of this process."""


def send(x: jax.Array, place: NamedSharding) -> jax.Array:
    """Starts to copy an array, in its turn, to another memory with the same shards."""
    COPY_STREAMS.take_turn(place.memory_kind or TO_DEVICE, place)
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
