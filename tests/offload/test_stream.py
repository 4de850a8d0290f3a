"""A stream brings loads up in time, and holds no more than its limit."""

import jax
import pytest

from tests.support.offload import make_config, start
from zjax.offload import stream as streams
from zjax.offload.stream import Stream


class Slow:
    """Stands for an array whose copy has not ended."""

    def __init__(self):
        self.is_over = self.is_gone = False

    def is_ready(self):
        assert not self.is_gone, "asked of what was deleted"
        return self.is_over

    def is_deleted(self):
        return self.is_gone

    def block_until_ready(self):
        self.is_over = True


class Two:
    """Stands for a load of two bytes."""

    moved_bytes, disk_bytes, is_consumed = 2, 0, True

    def __init__(self, name):
        self.name, self.arrays, self.rows = name, [], []

    def read_ahead(self):
        pass

    def is_read(self):
        return True


def test_more_is_on_its_way_before_what_came_up_is_read():
    """Fails if the next load is asked for only once the last is in use."""
    stream = Stream(8)
    stream.prefetch(map(Two, range(10)))
    for name in range(10):
        _, num_bytes = stream.wait(name)
        assert len(stream.arrived) >= min(2, 9 - name)
        assert stream.in_flight <= 8
        stream.release(num_bytes, [Slow()])


@pytest.mark.parametrize("limit", [2, 4, 8])
def test_room_is_given_back_by_what_has_left_and_not_before(limit):
    """Fails if a load comes up into room that programs in flight still read: a device
    would hold more than the limit."""
    stream, leaving = Stream(limit), []
    stream.prefetch(map(Two, range(20)))
    for name in range(20):
        _, num_bytes = stream.wait(name)
        held = num_bytes * (1 + len(stream.arrived))
        assert held + 2 * sum(not token.is_over for token in leaving) <= limit
        leaving.append(Slow())
        stream.release(num_bytes, leaving[-1:])


def test_a_load_gives_back_its_room_when_it_has_left_or_gone_up_again():
    """Fails if the stream asks an array that the next step has consumed."""
    stream, first, second = Stream(10), Slow(), Slow()
    stream.in_flight = 10
    stream.release(4, [first])
    stream.release(6, [second])
    assert stream.in_flight == 10
    second.is_over = True
    stream.fill()
    assert stream.in_flight == 10
    first.is_gone = True
    stream.fill()
    assert stream.in_flight == 0


def test_few_gradients_are_on_their_way_down(monkeypatch):
    """Fails if calls run ahead of the copies, whose arrays stay until they end."""
    sent = []

    def send(arrays, rows):
        tokens = [Slow() for _ in arrays]
        sent.extend(tokens)
        return tokens

    monkeypatch.setattr(streams, "store", send)
    plan = start(make_config("pinned_host")).plan
    row = plan.scalar("gradient", "int8").on_host
    stream = Stream(16)
    stream.prefetch(map(Two, range(30)))
    for name in range(8, 30):
        stream.add(name, [jax.numpy.zeros(())], [row])
        assert sum(not x.is_over for x in sent) <= 2
    assert len(sent) == 22
