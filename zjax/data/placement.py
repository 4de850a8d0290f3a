"""Host rows to global arrays: each process places what its own devices hold."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding
from jaxtyping import Int64

from zjax.errors import DataError, Problem

Shardings = Callable[[jax.ShapeDtypeStruct], NamedSharding]
"""Shape and dtype of a global array -> its placement; the plan has one for batches."""


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
    """

    def place(local: np.ndarray) -> jax.Array:
        shape = (num_rows, *local.shape[1:])
        sharding = shardings(jax.ShapeDtypeStruct(shape, local.dtype))
        return jax.make_array_from_callback(
            shape, sharding, lambda index: cut_rows(local, rows, num_rows, index)
        )

    return {name: place(local) for name, local in batch.items()}


def place_batch(batch: Any, shardings: Shardings, num_rows: int, place: str) -> Any:
    """Places a whole batch that every process holds.

    Args:
        batch: A tree of numeric arrays of NumPy or JAX.
        shardings: Where each array goes.
        num_rows: What the first dim of every array must be; scalars are free.
        place: What to call this batch in messages.

    Raises:
        DataError: An array is not numeric, does not fit JAX's integers, or has another
            number of rows.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(batch)
    checked = [
        _check_leaf(leaf, num_rows, f"{place}{jax.tree_util.keystr(path)}")
        for path, leaf in leaves
    ]
    return jax.tree.unflatten(structure, [_place(leaf, shardings) for leaf in checked])


def narrow(array: np.ndarray, name: str) -> np.ndarray:
    """Turns an array into the dtype that JAX gives it, if its values fit.

    Args:
        array: Any array of NumPy.
        name: What to call it in messages.

    Raises:
        DataError: It is not numeric, or an integer is too large.
    """
    if array.dtype.kind not in "biuf" and array.dtype.name != "bfloat16":
        raise DataError(
            Problem(
                name,
                str(array.dtype),
                "is not a dtype of numbers (text, or rows of unequal length)",
                "turn it into token ids and pad them, or remove it",
            )
        )
    result = array.astype(jax.dtypes.canonicalize_dtype(array.dtype))
    if array.dtype.kind in "iu" and not np.array_equal(array, result):
        largest = int(np.abs(array).max())
        said, remedy = "does not fit 32 bits", "renumber it or remove it"
        raise DataError(Problem(name, largest, said, remedy))
    return result


def _check_leaf(leaf: Any, num_rows: int, name: str) -> Any:
    array = leaf if isinstance(leaf, jax.Array) else narrow(np.asarray(leaf), name)
    if array.ndim and array.shape[0] != num_rows:
        raise DataError(
            Problem(
                name,
                f"{array.dtype}{list(array.shape)}",
                f"has {array.shape[0]} rows, but global_batch_size={num_rows}",
                "make all batches that size and drop the last, partial one",
            )
        )
    return array


def _place(array: Any, shardings: Shardings) -> jax.Array:
    sharding = shardings(jax.ShapeDtypeStruct(array.shape, array.dtype))
    if isinstance(array, jax.Array):
        return jax.device_put(array, sharding)
    return jax.make_array_from_callback(
        array.shape, sharding, lambda index: array[index]
    )
