"""A pool of host memory for arrays read from disks.

The first touch of new memory costs more than all other work of a read.
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
    """A pool of memory by size; memory returns when an array is deleted.

    Args:
        limit_bytes: Bytes beyond which free memory is unmapped before more is mapped.
    """

    def __init__(self, limit_bytes: int):
        self._limit, self._held = limit_bytes, 0
        self._lock = threading.Lock()
        # Deques, as finalizers append without the lock: they may interrupt its holder.
        self._free: dict[int, collections.deque[mmap.mmap]] = {}

    def take(self, shape: Sequence[int], dtype: Any) -> np.ndarray:
        """Returns an uninitialized array of one element or more."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        with self._lock:
            free = self._free.setdefault(size, collections.deque())
            memory = free.pop() if free else None
            dropped = [] if memory else list(self._make_room(size))
        del dropped  # unmapped without the lock: Linux takes a while
        memory = memory or self._make(size)
        view = np.frombuffer(memory, np.uint8)
        # All views have `view` as base, so that memory returns after the last of them.
        weakref.finalize(view, free.append, memory).atexit = False
        return view.view(dtype).reshape(shape)

    def _make_room(self, size: int) -> Iterator[mmap.mmap]:
        """Yields free memory to unmap, largest first, until `size` more bytes fit."""
        for other in sorted(self._free, reverse=True):
            while self._free[other] and self._held + size > self._limit:
                self._held -= other
                yield self._free[other].pop()
        self._held += size

    def _make(self, size: int) -> mmap.mmap:
        """Maps new memory, and returns the bytes to the budget if that fails."""
        try:
            return _new(size)
        except BaseException:
            with self._lock:
                self._held -= size
            raise


_SPARE = threading.local()


def thread_memory(size: int) -> np.ndarray:
    """Returns uninitialized, page-aligned uint8[size], until this thread asks again."""
    if len(getattr(_SPARE, "memory", b"")) < size:
        _SPARE.memory = mmap.mmap(-1, size)
    return np.frombuffer(_SPARE.memory, np.uint8, size)


def _new(size: int) -> mmap.mmap:
    """Maps anonymous memory, on huge pages if the kernel has them."""
    memory = mmap.mmap(-1, size)
    with contextlib.suppress(AttributeError, OSError):  # not every kernel has them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
