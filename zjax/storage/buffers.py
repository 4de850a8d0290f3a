"""Host memory for what comes from disks, used again and again.

The first touch of memory costs more than all else that is done to a number on its way.
"""

import collections
import contextlib
import math
import mmap
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np


class Buffers:
    """Memory by size; an array that nobody holds any more gives its own back.

    Args:
        limit_bytes: Beyond it, memory that is free leaves before other is made.
    """

    def __init__(self, limit_bytes: int):
        self._limit, self._held = limit_bytes, 0
        self._lock = threading.Lock()
        # A finalizer may run within any other call, so that it may not lock.
        self._free: dict[int, collections.deque[mmap.mmap]] = {}

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
            free = self._free.setdefault(size, collections.deque())
            memory = free.pop() if free else self._make(size)
        view = np.frombuffer(memory, np.uint8)
        weakref.finalize(view, free.append, memory).atexit = False
        return view.view(dtype).reshape(shape)

    def _make(self, size: int) -> mmap.mmap:
        for other in sorted(self._free, reverse=True):
            while self._free[other] and self._held + size > self._limit:
                self._free[other].pop()
                self._held -= other
        self._held += size
        return _new(size)


def _new(size: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size)
    with contextlib.suppress(AttributeError, OSError):  # not every kernel has them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
