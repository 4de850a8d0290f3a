"""Host memory for what comes from disks, used again and again.

The first touch of memory costs more than all else that is done to a number on its way.
"""

import collections
import math
import mmap
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np


class Buffers:
    """Memory by size; an array that nobody holds any more gives its own back."""

    def __init__(self) -> None:
        self._free: dict[int, list[mmap.mmap]] = collections.defaultdict(list)
        self._lock = threading.Lock()

    def take(self, shape: Sequence[int], dtype: Any) -> np.ndarray:
        """An array of any content.

        Args:
            shape: With one element or more.
            dtype: A NumPy dtype.

        Returns:
            The array; its memory is used again once it and all its views are gone.
        """
        size = math.prod(shape) * np.dtype(dtype).itemsize
        with self._lock:
            found = self._free[size].pop() if self._free[size] else None
        memory = found or _new(size)
        view = np.frombuffer(memory, np.uint8)
        weakref.finalize(view, self._give_back, size, memory).atexit = False
        return view.view(dtype).reshape(shape)

    def _give_back(self, size: int, memory: mmap.mmap) -> None:
        with self._lock:
            self._free[size].append(memory)


def _new(size: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
