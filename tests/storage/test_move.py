"""Arrays that leave the devices while others are made."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zjax.sharding.placement import ArrayPlan
from zjax.storage import move

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
