"""Tickets get the news of a pass at once."""

import asyncio
from unittest import mock

import numpy as np
import pytest

from zjax.data.tokenizer import make_bytes
from zjax.errors import DataError
from zjax.generation.engine import Engine, News, Request
from zjax.generation.sampling import Sampling
from zjax.generation.sequence import Sequence
from zjax.generation.text import TextStream
from zjax.generation.tickets import Ticket
from zjax.generation.worker import Runner

NUM_TICKETS, NUM_PASSES = 5, 3


def make_ticket(num_samples=2, streams=()):
    sampling = Sampling(max_new_tokens=NUM_PASSES, num_samples=num_samples)
    samples = [
        Sequence([1], NUM_PASSES, request=Request(sampling, number))
        for number in range(num_samples)
    ]
    return Ticket(sampling, [1], samples, [*streams], lambda ticket: None)


def write_token(sequence, token):
    """News of a token, as a pass makes them."""
    nothing = np.zeros((1, 0), np.int32), np.zeros((1, 0), np.float32)
    added = sequence.append([token])
    return News(sequence, added, np.zeros(1, np.float32), *nothing)


def test_a_pass_wakes_each_event_loop_once():
    """Fails if each token of each client wakes the loop, or if a reader misses one."""
    engine = mock.Mock(spec=Engine, scheduler=mock.Mock())
    runner, tickets = Runner(engine), [make_ticket() for _ in range(NUM_TICKETS)]
    for ticket in tickets:
        runner.admit(ticket)
    sequences = [each for ticket in tickets for each in ticket.sequences]

    async def read(ticket):
        return [(delta.sample, *delta.ids) async for delta in ticket]

    async def read_all():
        reading = [asyncio.ensure_future(read(ticket)) for ticket in tickets]
        await asyncio.sleep(0)
        loop = asyncio.get_running_loop()
        with mock.patch.object(
            loop, "call_soon_threadsafe", wraps=loop.call_soon_threadsafe
        ) as wake:
            for number in range(NUM_PASSES):
                news = [write_token(each, number) for each in sequences]
                engine.step.return_value = news
                assert await asyncio.to_thread(runner.step)
                # The thread itself tells the loop that it has ended.
            own = [x for x in wake.mock_calls if "_set_all" in str(x)]
        return len(own), await asyncio.gather(*reading)

    num_wakes, found = asyncio.run(asyncio.wait_for(read_all(), timeout=30))
    assert num_wakes == NUM_PASSES
    wanted = [(sample, token) for token in range(NUM_PASSES) for sample in (0, 1)]
    assert found == [wanted] * NUM_TICKETS
    assert runner.tickets == set()


def test_readers_of_several_event_loops_are_all_woken():
    """Fails if the loop of one reader is woken for the reader of another."""
    engine, found = mock.Mock(spec=Engine, scheduler=mock.Mock()), []
    runner, tickets = Runner(engine), [make_ticket(1) for _ in range(2)]
    loops = [mock.Mock(spec=asyncio.AbstractEventLoop) for _ in tickets]
    loops[0].call_soon_threadsafe.side_effect = RuntimeError("closed")
    loops[1].call_soon_threadsafe.side_effect = lambda *given: found.append(given)
    for ticket, loop in zip(tickets, loops, strict=True):
        runner.admit(ticket)
        ticket.waiter = loop, asyncio.Event()
    engine.step.return_value = [write_token(x.sequences[0], 7) for x in tickets]
    assert runner.step()
    [(set_all, events)] = found
    set_all(events)
    assert [ticket.waiter[1].is_set() for ticket in tickets] == [False, True]


def aborted_text(stream):
    """Text of a ticket that ends after a token that nobody reads at once."""
    engine = mock.Mock(spec=Engine, scheduler=mock.Mock())
    runner, ticket = Runner(engine), make_ticket(1, [stream])
    ticket.sequences[0].is_streamed = False
    runner.admit(ticket)
    engine.step.return_value = [write_token(ticket.sequences[0], ord("a"))]
    assert runner.step()
    runner.abort(ticket)
    found = [*ticket]
    assert [token for delta in found for token in delta.ids] == [ord("a")]
    return "".join(delta.text for delta in found)


def test_a_text_that_ends_early_has_the_text_of_its_tokens():
    """Fails if a text that nobody reads token by token is lost with a signal."""
    assert aborted_text(TextStream(make_bytes())) == "a"


def test_a_text_that_ends_early_and_cannot_be_decoded_ends_no_thread():
    stream = TextStream(make_bytes())
    stream.write = mock.Mock(side_effect=RuntimeError("no such bytes"))
    with pytest.raises(DataError, match="no such bytes"):
        aborted_text(stream)
