"""Answers put the news of texts and prompts in order."""

from unittest import mock

import numpy as np
import pytest

from zjax.data.tokenizer import make_bytes
from zjax.generation.sampling import Logprobs, Sampling
from zjax.generation.tickets import Delta, Ticket
from zjax.serve.answer import Answer
from zjax.serve.exchange import _TEXT, write_event
from zjax.serve.replies import Piece, join
from zjax.serve.requests import Asked
from zjax.serve.service import ENDPOINTS, Active, Service
from zjax.serve.settings import Settings


def scores(*logprobs):
    size = len(logprobs)
    best = np.zeros((size, 0), np.int32), np.zeros((size, 0), np.float32)
    return Logprobs(np.array(logprobs, np.float32), *best)


def delta(sample, text="", *logprobs, reason=None, prompt=None):
    return Delta(sample, text, [*text.encode()], *scores(*logprobs), reason, prompt)


def test_a_text_that_is_written_first_waits_for_the_scores_of_the_prompt():
    """Fails if a text of another data shard stands before the prompt in a reply."""
    tickets = [mock.Mock(spec=Ticket, prompt_ids=[*x]) for x in (b"abc", b"x")]
    known = {"tokenizer": make_bytes(), "settings": Settings(served_name="tiny")}
    service = mock.Mock(spec=Service, **known)
    sampling = Sampling(num_logprobs=0, prompt_logprobs=0, num_samples=2)
    asked = Asked(["abc", "x"], sampling, False, False, echoes=True)
    active = mock.Mock(spec=Active, tickets=tickets)
    answer = Answer(service, ENDPOINTS[0], active, asked)
    pieces = [[piece] for piece in answer._first_pieces()]
    for number, news, num_told in (
        (0, delta(1, "r", -3), 0),
        (1, delta(0, "y", -9, reason="length"), 1),  # a prompt of one token
        (0, delta(0, prompt=scores(-1)), 2),
        (0, delta(1, "s", -4, reason="length"), 0),
        (0, delta(0, "q", -5, reason="stop", prompt=scores(-2)), 6),
        (1, delta(1, "z", -8, reason="length"), 1),
    ):
        told = [*answer._pieces(number, news)]
        assert len(told) == num_told
        for piece in told:
            pieces[piece.choice].append(piece)
    found = [*map(join, pieces)]
    assert [x.text for x in found] == ["abcq", "abcrs", "xy", "xz"]
    assert [x.finish_reason for x in found] == ["stop", "length", "length", "length"]
    logprobs = [[token.logprob for token in x.tokens] for x in found]
    prompt = [None, -1.0, -2.0]
    assert logprobs == [[*prompt, -5.0], [*prompt, -3.0, -4.0], [None, -9], [None, -8]]
    offsets = [[token.offset for token in x.tokens] for x in found]
    assert offsets == [[*range(len(x.text))] for x in found]


@pytest.mark.parametrize("has_usage", [False, True])
@pytest.mark.parametrize("num_logprobs", [None, 0])
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_events_of_a_text_are_the_chunks(endpoint, num_logprobs, has_usage):
    """Fails if an event whose text alone is rendered differs from the whole chunk."""
    # The name may be the text by which the event was cut.
    known = {"tokenizer": make_bytes(), "settings": Settings(served_name=_TEXT)}
    service = mock.Mock(spec=Service, **known)
    sampling = Sampling(num_logprobs=num_logprobs, num_samples=2)
    asked = Asked(["abc"], sampling, True, has_usage, echoes=False)
    tickets = [mock.Mock(spec=Ticket, prompt_ids=[1])]
    active = mock.Mock(spec=Active, tickets=tickets)
    answer = Answer(service, endpoint, active, asked)
    for index, text in ((0, 'a"\\\n'), (1, "é\u2028\x00"), (1, _TEXT), (0, "")):
        for reason in (None, "stop"):
            piece = Piece(index, text, [], reason)
            wanted = answer._reply.chunk(piece) | ({"usage": None} if has_usage else {})
            assert answer._write(piece) == write_event(wanted)
