"""Checksums of data, by which a resumed run knows its own again.

Token streams are read whole up to `SCAN_TOKENS`, and in equally spaced parts beyond.
Of datasets with columns up to `NUM_SAMPLED` equally spaced rows are read, and of
batches that are given up to `NUM_SAMPLED` pieces of each array: a difference elsewhere
is not seen.
"""

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from zjax.sharding.paths import path_of

SCAN_TOKENS = 1 << 26
"""Streams up to this long are read whole."""
NUM_SAMPLED = 64
WHOLE_BYTES = 1 << 20
"""Arrays of given batches up to this large are read whole."""
PIECE_BYTES = 1 << 14


def token_parts(tokens: Any) -> Iterator[np.ndarray]:
    """Reads a stream: whole, or 64 equally spaced parts if it is long.

    Args:
        tokens: One dim, 1 or more; sliced without reading the rest.

    Yields:
        Parts, in order.
    """
    size = SCAN_TOKENS // NUM_SAMPLED
    if len(tokens) <= SCAN_TOKENS:
        starts = range(0, len(tokens), size)
    else:
        starts = np.linspace(0, len(tokens) - size, NUM_SAMPLED).astype(np.int64)
    for start in map(int, starts):
        yield tokens[start : start + size]


def digest_tokens(tokens: Any, *others: np.ndarray) -> str:
    """Sums up a stream and what belongs to it.

    Args:
        tokens: The stream, as for `token_parts`.
        *others: Arrays that are read whole, such as where documents start.

    Returns:
        16 hexadecimal digits, of the length, the dtype and the parts.
    """
    found = hashlib.sha256(f"{len(tokens)} {tokens[:1].dtype.name}".encode())
    for part in (*token_parts(tokens), *others):
        found.update(np.ascontiguousarray(part).data)
    return found.hexdigest()[:16]


def digest_columns(read: Any, num_rows: int) -> str:
    """Sums up rows that are read by number.

    Rows that differ when they are read again, as those with random crops do, count by
    the names, dtypes and shapes of their columns alone.

    Args:
        read: `read(indices)` gives a dict of arrays.
        num_rows: How many there are, 1 or more.

    Returns:
        16 hexadecimal digits, of the number of rows and those that are sampled.
    """
    number = min(num_rows, NUM_SAMPLED)
    indices = np.linspace(0, num_rows - 1, number).astype(np.int64)
    first, again = read(indices), read(indices)
    forms = {name: [x.dtype.name, x.shape[1:]] for name, x in first.items()}
    found = hashlib.sha256(json.dumps([num_rows, forms]).encode())
    for name, array in first.items():
        if array.tobytes() == again[name].tobytes():
            found.update(np.ascontiguousarray(array).data)
    return found.hexdigest()[:16]


class BatchChain:
    """Sums up batches one after another.

    Example:
        >>> one, other = BatchChain(), BatchChain()
        >>> one.add({"x": np.arange(3)}) == other.add({"x": np.arange(3)})
        True
        >>> one.add({"x": np.arange(3)}) == other.add({"x": np.arange(1, 4)})
        False
    """

    def __init__(self) -> None:
        self._sum = hashlib.sha256()

    def add(self, batch: Any) -> str:
        """Adds a batch.

        Args:
            batch: A tree of arrays; of those on devices only dtypes and shapes count.

        Returns:
            16 hexadecimal digits, of all batches so far.
        """
        for keys, leaf in jax.tree_util.tree_leaves_with_path(batch):
            array = leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
            form = f"{path_of(keys)} {array.dtype} {array.shape}"
            self._sum.update(form.encode())
            for piece in _pieces(array) if isinstance(array, np.ndarray) else ():
                self._sum.update(piece)
        return self._sum.hexdigest()[:16]


def _pieces(array: np.ndarray) -> Iterator[Any]:
    if array.dtype == object:  # refused when it is placed
        return
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    if data.nbytes <= WHOLE_BYTES:
        yield data.data
        return
    last = data.nbytes - PIECE_BYTES
    for start in np.linspace(0, last, NUM_SAMPLED).astype(np.int64).tolist():
        yield data[start : start + PIECE_BYTES].data
