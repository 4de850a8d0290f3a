"""Tensors of a safetensors file, read slice by slice by several threads.

Reference: the format of github.com/huggingface/safetensors.
"""

import concurrent.futures
import functools
import json
import math
import os
import weakref
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from zjax.checkpoint.export import DTYPES
from zjax.checkpoint.layout import Entry
from zjax.checkpoint.views import Index
from zjax.reading import MAX_INDEX_BYTES

_NAMES = {code: name for name, code in DTYPES.items()}
_LENGTH_BYTES = 8
_PART_BYTES = 16 << 20
"""Bytes that a thread reads in one call."""
_NUM_THREADS = 8


class TensorFile:
    """An open file, whose header is checked before.

    Args:
        path: A file that the safetensors library can open.

    Raises:
        OSError: It cannot be opened.
        ValueError: Its header is larger than an index may be.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self._path, self._file = path, os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)
        length = int.from_bytes(os.read(self._file, _LENGTH_BYTES), "little")
        if length > MAX_INDEX_BYTES:
            raise ValueError(f"its header has more than {MAX_INDEX_BYTES:,} bytes")
        self._data_start = _LENGTH_BYTES + length
        text = bytearray(length)
        self._fill(memoryview(text), _LENGTH_BYTES)
        header = json.loads(text)
        self._header = {k: v for k, v in header.items() if k != "__metadata__"}

    @functools.cached_property
    def entries(self) -> Mapping[str, Entry]:
        """Shapes and dtypes by name; a dtype that arrays lack is its code."""
        return {
            name: Entry(tuple(x["shape"]), _NAMES.get(x["dtype"], f"{x['dtype']}"))
            for name, x in self._header.items()
        }

    def read(self, name: str, index: Index) -> np.ndarray:
        """A slice of a tensor; bytes of other slices of its first dim are not read."""
        shape, dtype = self.entries[name].shape, jnp.dtype(self.entries[name].dtype)
        first, start = self._header[name]["data_offsets"][0], 0
        if shape:
            rows, *others = index
            row_bytes = math.prod(shape[1:]) * dtype.itemsize
            start, shape = rows.start * row_bytes, (rows.stop - rows.start, *shape[1:])
            index = (slice(None), *others)
        found = np.empty(shape, dtype)
        content: Any = found.reshape(-1).view(np.uint8)
        self._fill(memoryview(content), self._data_start + first + start)
        return found[index]

    def _fill(self, content: memoryview, offset: int) -> None:
        def read(start: int) -> None:
            part = content[start : start + _PART_BYTES]
            while part:
                count = os.preadv(self._file, [part], offset + start)
                if not count:
                    raise OSError(f"{self._path} ended while it was read")
                part, start = part[count:], start + count

        starts = range(0, len(content), _PART_BYTES)
        run = _threads().map if len(starts) > 1 else map
        for _ in run(read, starts):
            pass


@functools.cache
def _threads() -> concurrent.futures.Executor:
    return concurrent.futures.ThreadPoolExecutor(_NUM_THREADS, "tensor-file")
