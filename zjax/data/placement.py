"""Host rows to global arrays: each process places what its own devices hold."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding
from jaxtyping import Int64

from zjax.data.entries import check_batch
from zjax.sharding.batch import map_rows
from zjax.typing import Entries

Shardings = Callable[[jax.ShapeDtypeStruct], NamedSharding]
"""Shape and dtype of a global array -> its placement; the plan has one for batches, and
`BatchPlacement` also checks them."""


@dataclasses.dataclass(frozen=True)
class BatchPlacement:
    """Where the arrays of a batch go, and what its loss asks of them.

    Args:
        shardings: Those of rows; a scalar is replicated.
        entries: What the loss asks; batches are checked before they are placed.
    """

    shardings: Shardings
    entries: Entries

    def __call__(self, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        """The placement of an array of rows."""
        return self.shardings(leaf)


def entries_in(shardings: Shardings) -> Entries:
    """What is asked of the batches that go to these places.

    Args:
        shardings: A `BatchPlacement`, or any function, which asks nothing.

    Returns:
        Entries by path.
    """
    return shardings.entries if isinstance(shardings, BatchPlacement) else {}


def needed_rows(
    shardings: Iterable[tuple[Sharding, tuple[int, ...]]],
    devices: Iterable[Any],
) -> Int64[np.ndarray, " rows"]:
    """Lists the rows of a global batch of which `devices` hold any part.

    Args:
        shardings: Placement and global shape of each array of the batch, 1 dim or more.
        devices: The devices of one process.

    Returns:
        Row numbers in the global batch, ascending, without repetition.
    """
    devices = list(devices)
    rows: set[int] = set()
    for sharding, shape in shardings:
        indices = sharding.devices_indices_map(shape)
        for device in devices:
            if device in indices:
                rows.update(range(shape[0])[indices[device][0]])
    return np.array(sorted(rows), np.int64)


def cut_rows(
    local: np.ndarray,
    rows: Int64[np.ndarray, " rows"],
    num_rows: int,
    index: Any,
) -> np.ndarray:
    """Cuts the share of one device out of the rows that this process has read.

    Args:
        local: The rows `rows` of the global array.
        rows: Their numbers, ascending.
        num_rows: Rows of the global array.
        index: The share, as slices of the global array; its rows are all in `rows`.
    """
    wanted = range(num_rows)[index[0]]
    first = int(np.searchsorted(rows, wanted.start))
    return local[(slice(first, first + len(wanted)), *index[1:])]


def place_rows(
    batch: dict[str, np.ndarray],
    rows: Int64[np.ndarray, " rows"],
    num_rows: int,
    shardings: Shardings,
) -> dict[str, jax.Array]:
    """Makes global arrays out of the rows that this process has read.

    Args:
        batch: For each field the rows `rows`, along the first dim.
        rows: Their numbers in the global batch, ascending.
        num_rows: Rows of the global batch.
        shardings: Where each array goes.

    Raises:
        DataError: An id is out of range.
    """

    def place(local: np.ndarray) -> jax.Array:
        shape = (num_rows, *local.shape[1:])
        sharding = shardings(jax.ShapeDtypeStruct(shape, local.dtype))
        return jax.make_array_from_callback(
            shape, sharding, lambda index: cut_rows(local, rows, num_rows, index)
        )

    batch = check_batch(batch, entries_in(shardings))
    return {name: place(local) for name, local in batch.items()}


def place_batch(batch: Any, shardings: Shardings, num_rows: int, place: str) -> Any:
    """Places a whole batch that every process holds.

    Args:
        batch: A tree of numeric arrays of NumPy or JAX.
        shardings: Where each array goes.
        num_rows: What the first dim of every array must be; scalars are free.
        place: What to call this batch in messages.

    Raises:
        DataError: The batch is not what its loss asks for, as `check_batch` says.
    """

    def place_rows(x: Any) -> jax.Array:
        return _place(x, shardings(jax.ShapeDtypeStruct(x.shape, x.dtype)))

    def replicate(x: Any) -> jax.Array:
        return _place(x, shardings(jax.ShapeDtypeStruct((), x.dtype)))

    entries = entries_in(shardings)
    checked = check_batch(batch, entries, name=place, num_rows=num_rows)
    return map_rows(place_rows, replicate, checked, entries)


def _place(array: Any, sharding: NamedSharding) -> jax.Array:
    if isinstance(array, jax.Array):
        return jax.device_put(array, sharding)
    return jax.make_array_from_callback(
        array.shape, sharding, lambda index: array[index]
    )
