"""Places host rows as global arrays; each process places the rows of local devices."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding
from jaxtyping import Int64

from zjax.data.entries import check_batch
from zjax.sharding.activations import map_rows
from zjax.typing import Entries

Shardings = Callable[[jax.ShapeDtypeStruct], NamedSharding]
"""Function from shape and dtype of a global array to the sharding."""


@dataclasses.dataclass(frozen=True)
class BatchPlacement:
    """Shardings of a batch, and the arrays that the loss expects.

    Args:
        shardings: Function to the sharding of an array of rows; scalars are replicated.
        entries: Expected arrays by path; batches are checked before placement.
    """

    shardings: Shardings
    entries: Entries

    def __call__(self, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        """Sharding of an array of rows."""
        return self.shardings(leaf)


def entries_in(shardings: Shardings) -> Entries:
    """Expected arrays by path; none for plain functions."""
    return shardings.entries if isinstance(shardings, BatchPlacement) else {}


def needed_rows(
    shardings: Iterable[tuple[Sharding, tuple[int, ...]]],
    devices: Iterable[Any],
) -> Int64[np.ndarray, " rows"]:
    """Rows of a global batch of which `devices` hold any part, ascending.

    `shardings` are the sharding and global shape of each array of the batch.
    """
    devices = list(devices)
    rows: set[int] = set()
    for sharding, shape in shardings:
        indices = sharding.devices_indices_map(shape)
        for device in devices:
            if device in indices:  # a sharding may use some devices only
                rows.update(range(shape[0])[indices[device][0]])
    return np.array(sorted(rows), np.int64)


def device_rows(
    local: np.ndarray,
    rows: Int64[np.ndarray, " rows"],
    num_rows: int,
    index: Any,
) -> np.ndarray:
    """Slices one device's shard, `index` of the global array, from the rows read here.

    `local` has the rows `rows`, ascending, of the `num_rows` of the global array.
    """
    wanted = range(num_rows)[index[0]]
    # This process has read all rows of the shard, so the rows lie side by side.
    first = int(np.searchsorted(rows, wanted.start))
    return local[(slice(first, first + len(wanted)), *index[1:])]


def place_rows(
    batch: dict[str, np.ndarray],
    rows: Int64[np.ndarray, " rows"],
    num_rows: int,
    shardings: Shardings,
) -> dict[str, jax.Array]:
    """Makes global arrays of the rows `rows` that this process has read."""

    def place(local: np.ndarray) -> jax.Array:
        shape = (num_rows, *local.shape[1:])
        sharding = shardings(jax.ShapeDtypeStruct(shape, local.dtype))
        return jax.make_array_from_callback(
            shape, sharding, lambda index: device_rows(local, rows, num_rows, index)
        )

    batch = check_batch(batch, entries_in(shardings))
    return {name: place(local) for name, local in batch.items()}


def place_batch(batch: Any, shardings: Shardings, num_rows: int, name: str) -> Any:
    """Places a global batch of `num_rows` rows that every process holds."""

    def place_rows(x: Any) -> jax.Array:
        return _place(x, shardings(jax.ShapeDtypeStruct(x.shape, x.dtype)))

    def replicate(x: Any) -> jax.Array:
        return _place(x, shardings(jax.ShapeDtypeStruct((), x.dtype)))

    entries = entries_in(shardings)
    checked = check_batch(batch, entries, name=name, num_rows=num_rows)
    return map_rows(place_rows, replicate, checked, entries)


def _place(array: Any, sharding: NamedSharding) -> jax.Array:
    """Places an array that is on the host or already on devices."""
    # An array on devices moves without a copy through the host.
    if isinstance(array, jax.Array):
        return jax.device_put(array, sharding)
    return jax.make_array_from_callback(
        array.shape, sharding, lambda index: array[index]
    )
