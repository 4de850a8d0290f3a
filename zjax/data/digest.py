"""Checksums of data, with which a resumed run detects that its data has changed.

Token streams up to `SCAN_TOKENS` are read completely, longer ones in 64 equally spaced
parts. Datasets with columns are sampled at `NUM_SAMPLED` rows, and the arrays of given
batches at as many pieces: differences elsewhere are not detected.
"""

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from zjax.sharding.paths import path_of

SCAN_TOKENS = 1 << 26
"""Longest stream that is read completely."""
NUM_SAMPLED = 64
WHOLE_BYTES = 1 << 20
"""Largest array of a given batch that is read completely."""
PIECE_BYTES = 1 << 14


def token_parts(tokens: Any) -> Iterator[np.ndarray]:
    """Reads a stream completely, or 64 equally spaced parts if it is long."""
    size = SCAN_TOKENS // NUM_SAMPLED
    if len(tokens) <= SCAN_TOKENS:
        starts = range(0, len(tokens), size)
    else:
        starts = np.linspace(0, len(tokens) - size, NUM_SAMPLED).astype(np.int64)
    for start in map(int, starts):
        yield tokens[start : start + size]


def digest_tokens(tokens: Any, *others: np.ndarray) -> str:
    """16 hexadecimal digits of a stream (length, dtype, parts) and other arrays."""
    checksum = hashlib.sha256(f"{len(tokens)} {tokens[:1].dtype.name}".encode())
    for part in (*token_parts(tokens), *others):
        checksum.update(np.ascontiguousarray(part).data)
    return checksum.hexdigest()[:16]


def digest_columns(read: Any, num_rows: int) -> str:
    """16 hexadecimal digits of rows, which `read(indices)` gives as dicts of arrays.

    Rows that differ when read twice, as with random crops, count by the names, dtypes
    and shapes of their columns alone.
    """
    number = min(num_rows, NUM_SAMPLED)
    indices = np.linspace(0, num_rows - 1, number).astype(np.int64)
    first, again = read(indices), read(indices)
    forms = {name: [x.dtype.name, x.shape[1:]] for name, x in first.items()}
    checksum = hashlib.sha256(json.dumps([num_rows, forms]).encode())
    for name, array in first.items():
        if array.tobytes() == again[name].tobytes():
            checksum.update(np.ascontiguousarray(array).data)
    return checksum.hexdigest()[:16]


class BatchChain:
    """Running checksum of batches.

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
        """Adds a batch, and returns 16 hexadecimal digits of all batches so far.

        Arrays on devices count by dtype and shape alone.
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
