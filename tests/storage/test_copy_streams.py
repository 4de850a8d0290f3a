"""Copies up and down take turns on the streams of a device."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zjax.sharding.placement import ArrayPlan
from zjax.sharding.plan import DEVICE, HOST
from zjax.storage import io_threads
from zjax.storage.move import store, to_devices


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

    monkeypatch.setattr(io_threads, "_has_streams", lambda mesh: True)
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
