"""Host memory is used again, and never while somebody holds it."""

import gc
import weakref

import numpy as np
import pytest

from zjax.storage import io_threads as buffers_module
from zjax.storage.io_threads import Buffers

pytestmark = pytest.mark.usefixtures("only_new_garbage")


def address(x):
    return x.__array_interface__["data"][0]


def test_memory_is_used_again_once_nobody_holds_it():
    """Fails if memory is new each time, or given to two at once."""
    buffers = Buffers(limit_bytes=0)
    first = buffers.take((4, 8), np.float32)
    second = buffers.take((4, 8), np.float32)
    assert (first.shape, first.dtype) == ((4, 8), np.float32)
    places = {address(first), address(second)}
    assert len(places) == 2
    part = first[1:]
    part[:] = 7
    del first
    gc.collect()
    third = buffers.take((32,), np.int32)
    assert address(third) not in places  # a view still holds the first
    np.testing.assert_array_equal(part, 7)
    del part, second
    gc.collect()
    assert {address(buffers.take((8, 4), np.float32))} <= places


def held_bytes(monkeypatch, limit_bytes, sizes):
    """What buffers hold after arrays of some sizes, one after another."""
    made, held = buffers_module._new, []

    def new(size):
        memory = made(size)
        held.append(weakref.ref(memory))
        return memory

    monkeypatch.setattr(buffers_module, "_new", new)
    buffers = Buffers(limit_bytes)
    for size in sizes:
        buffers.take((size,), np.uint8)
    gc.collect()
    return sum(len(memory) for each in held if (memory := each()) is not None)


def test_memory_of_one_size_leaves_for_that_of_another(monkeypatch):
    """Fails if each size keeps for ever the most that it ever took."""
    sizes = [4096, 8192, 4096, 16384]
    assert held_bytes(monkeypatch, 100_000, sizes) == 4096 + 8192 + 16384
    assert held_bytes(monkeypatch, 20_480, sizes) == 4096 + 16384
    assert held_bytes(monkeypatch, 0, sizes) == 16384


def test_memory_in_use_does_not_leave():
    buffers = Buffers(limit_bytes=0)
    first = buffers.take((4096,), np.uint8)
    first[:] = 7
    second = buffers.take((8192,), np.uint8)
    second[:] = 8
    np.testing.assert_array_equal(first, 7)


def test_memory_that_could_not_be_had_does_not_count(monkeypatch):
    """Fails if others leave for it ever after."""
    made = buffers_module._new
    buffers = Buffers(limit_bytes=16_384)

    def fail(size):
        raise MemoryError

    monkeypatch.setattr(buffers_module, "_new", fail)
    with pytest.raises(MemoryError):
        buffers.take((16_384,), np.uint8)
    monkeypatch.setattr(buffers_module, "_new", made)
    place = address(buffers.take((4096,), np.uint8))
    gc.collect()
    buffers.take((8192,), np.uint8)
    assert address(buffers.take((4096,), np.uint8)) == place
