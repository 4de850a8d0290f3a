"""Chunks on their way: whose turn it is, and how an array ends."""

import gc
import threading
import weakref

import numpy as np
import pytest

from zjax.storage.io_threads import CONCURRENCY, Job, move_chunks

PATIENCE_SECONDS = 20


@pytest.mark.parametrize("direction", ["read", "write"])
def test_arrays_do_not_wait_for_the_last_chunk_of_others(direction):
    """Fails if an array keeps a thread of its own until its last chunk has moved."""
    gate = threading.Event()
    slow = [Job(gate.wait, [(PATIENCE_SECONDS,)], i) for i in range(CONCURRENCY - 1)]
    ends = [move_chunks(direction, lambda job=job: job) for job in slow]
    quick = move_chunks(direction, lambda: Job(str, [(1,), (2,)], "quick"))
    assert quick.result(PATIENCE_SECONDS) == "quick"
    assert not any(end.done() for end in ends)
    gate.set()
    assert [end.result(PATIENCE_SECONDS) for end in ends] == [*range(CONCURRENCY - 1)]


def test_what_comes_does_not_queue_behind_what_goes():
    gate = threading.Event()
    pieces = [(PATIENCE_SECONDS,)] * 2 * CONCURRENCY
    going = move_chunks("write", lambda: Job(gate.wait, pieces, None))
    coming = move_chunks("read", lambda: Job(str, [(1,)], "here"))
    assert coming.result(PATIENCE_SECONDS) == "here"
    assert not going.done()
    gate.set()
    going.result(PATIENCE_SECONDS)


def test_an_array_fails_once_none_of_its_chunks_is_on_its_way():
    """Fails if its memory is given back while a chunk is being written to it."""
    gate, done = threading.Event(), []

    def act(number):
        if number == 1:
            raise OSError("no space")
        gate.wait(PATIENCE_SECONDS)
        done.append(number)

    whole = move_chunks("read", lambda: Job(act, [(0,), (1,), (2,)], None))
    with pytest.raises(TimeoutError):
        whole.result(0.2)
    gate.set()
    with pytest.raises(OSError, match="no space"):
        whole.result(PATIENCE_SECONDS)
    assert sorted(done) == [0, 2]


def test_an_array_of_which_some_chunks_do_not_start_waits_for_the_others():
    """Fails if its memory is given back while a chunk of it is on its way."""
    gate = threading.Event()

    def pieces():
        yield (PATIENCE_SECONDS,)
        raise RuntimeError("no more threads")

    whole = move_chunks("read", lambda: Job(gate.wait, pieces(), None))
    with pytest.raises(TimeoutError):
        whole.result(0.2)
    gate.set()
    with pytest.raises(RuntimeError, match="no more threads"):
        whole.result(PATIENCE_SECONDS)


def test_an_array_that_cannot_be_made_ready_fails():
    def prepare():
        raise MemoryError("no room")

    with pytest.raises(MemoryError, match="no room"):
        move_chunks("write", prepare).result(PATIENCE_SECONDS)


def test_what_has_moved_is_held_by_nobody():
    """Fails if memory of what is done is free only once garbage is looked for."""
    held, free = [np.ones(3)], threading.Event()
    weakref.finalize(held[0], free.set)
    gc.disable()
    try:
        move_chunks("read", lambda: Job(str, [(1,), (2,)], held.pop())).result()
        assert free.wait(PATIENCE_SECONDS)
    finally:
        gc.enable()
