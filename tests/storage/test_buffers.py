"""Arrays on their way between devices, host and disk: buffers, threads, streams."""

import gc
import itertools
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zjax.sharding.placement import ArrayPlan
from zjax.sharding.plan import DEVICE, HOST
from zjax.storage import io_threads, move
from zjax.storage import io_threads as buffers_module
from zjax.storage.io_threads import CONCURRENCY, Buffers, Job, move_chunks
from zjax.storage.move import store, to_devices

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


@pytest.fixture
def row():
    mesh = Mesh(jax.devices()[:2], ("data",))
    place = NamedSharding(mesh, PartitionSpec("data"))
    return ArrayPlan("x", (8,), jnp.dtype("float32"), place, place).on_host


@pytest.fixture
def copies(monkeypatch):
    """The directions of all copies, as they are issued."""
    found, put = [], jax.device_put

    def recorded(x, place, **settings):
        if isinstance(x, jax.Array) and x.sharding.memory_kind != place.memory_kind:
            found.append(place.memory_kind)
        return put(x, place, **settings)

    monkeypatch.setattr(io_threads, "platform_of", lambda mesh: "gpu")
    monkeypatch.setattr(io_threads, "COPY_STREAMS", io_threads.CopyStreams())
    monkeypatch.setattr(jax, "device_put", recorded)
    return found


def make(row):
    return jax.device_put(jnp.arange(8.0), row.on_device.stored)


def test_directions_alternate_whatever_is_asked_for(row, copies):
    directions = [HOST, HOST, DEVICE, DEVICE, DEVICE, HOST]
    resting = jax.device_put(make(row), row.stored)
    io_threads.COPY_STREAMS.take_turn(
        io_threads.TO_HOST, row.stored
    )  # numbers are made once
    io_threads.COPY_STREAMS.take_turn(io_threads.TO_DEVICE, row.stored)
    io_threads.COPY_STREAMS.take_turn(io_threads.TO_DEVICE, row.stored)
    copies.clear()
    for memory in directions:
        if memory == DEVICE:
            moved = to_devices(resting, row, is_consumed=False)
        else:
            moved = store(make(row), row)
        assert moved.sharding.memory_kind == memory
        assert moved.tolist() == list(range(8))
    assert all(one != other for one, other in itertools.pairwise(copies))
    assert len(copies) > len(directions)


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


ARRAY_BYTES = 40


@pytest.fixture
def events(monkeypatch):
    """What is made, sent and waited for."""
    found = []

    def store(x, row):
        found.append(("sent", x))
        return x

    def wait(x):
        found.extend(("here", each) for each in (x if isinstance(x, list) else [x]))

    monkeypatch.setattr(move, "is_simulated", lambda mesh: False)
    monkeypatch.setattr(move, "store", store)
    monkeypatch.setattr(move.jax, "block_until_ready", wait)
    return found


def pairs(events, number):
    mesh = Mesh(np.asarray(jax.devices()[:1]), ("data",))
    place = NamedSharding(mesh, PartitionSpec())
    row = ArrayPlan("", (10,), np.dtype(np.float32), place, place)
    for i in range(number):
        events.append(("made", i))
        yield i, row


def test_the_next_is_made_while_few_are_on_their_way(events):
    """Fails if each is waited for before the next is made, or none is."""
    assert list(move.store_in_turn(pairs(events, 4), 2 * ARRAY_BYTES)) == [0, 1, 2, 3]
    assert events == [
        ("made", 0),
        ("sent", 0),
        ("made", 1),
        ("sent", 1),
        ("made", 2),
        ("sent", 2),
        ("here", 0),
        ("made", 3),
        ("sent", 3),
        ("here", 1),
        ("here", 2),
        ("here", 3),
    ]


def test_one_that_is_larger_goes_alone(events):
    list(move.store_in_turn(pairs(events, 2), ARRAY_BYTES - 1))
    assert [what for what, _ in events] == ["made", "sent", "here"] * 2


def test_simulated_devices_make_one_at_a_time(events, monkeypatch):
    """Fails if their collectives may wait for ever for those of another program."""
    monkeypatch.setattr(move, "is_simulated", lambda mesh: True)
    list(move.store_in_turn(pairs(events, 2), 2 * ARRAY_BYTES))
    assert [what for what, _ in events[:6]] == ["made", "here", "sent"] * 2
