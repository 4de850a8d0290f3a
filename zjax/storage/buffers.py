"""Host memory for what comes from disks, used again and again.

The first touch of memory costs more than all else that is done to a number on its way.
"""

import collections
import contextlib
import math
import mmap
import threading
import weakref
from collections.abc import Iterator, Sequence
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
            memory = free.pop() if free else None
            dropped = [] if memory else list(self._make_room(size))
        del dropped  # Linux takes a while, in which others need not wait
        memory = memory or self._make(size)
        view = np.frombuffer(memory, np.uint8)
        weakref.finalize(view, free.append, memory).atexit = False
        return view.view(dtype).reshape(shape)

    def _make_room(self, size: int) -> Iterator[mmap.mmap]:
        for other in sorted(self._free, reverse=True):
            while self._free[other] and self._held + size > self._limit:
                self._held -= other
                yield self._free[other].pop()
        self._held += size

    def _make(self, size: int) -> mmap.mmap:
        try:
            return _new(size)
        except BaseException:
            with self._lock:
                self._held -= size
            raise


_SPARE = threading.local()


def thread_memory(size: int) -> np.ndarray:
    """Memory of this thread, of any content, until it asks again.

    Args:
        size: In bytes, 1 or more.

    Returns:
        uint8[size], which starts at a page.
    """
    if len(getattr(_SPARE, "memory", b"")) < size:
        _SPARE.memory = mmap.mmap(-1, size)
    return np.frombuffer(_SPARE.memory, np.uint8, size)


def _new(size: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size)
    with contextlib.suppress(AttributeError, OSError):  # not every kernel has them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
