"""Host memory is used again, and never while somebody holds it."""

import gc

import numpy as np

from zjax.storage.buffers import Buffers


def address(x):
    return x.__array_interface__["data"][0]


def test_memory_is_used_again_once_nobody_holds_it():
    """Fails if memory is new each time, or given to two at once."""
    buffers = Buffers()
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
