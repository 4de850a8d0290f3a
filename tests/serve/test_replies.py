"""Replies have the form of OpenAI's API, whole and in chunks."""

import dataclasses

import numpy as np

from zjax.data.tokenizer import make_bytes
from zjax.generation.sampling import Logprobs
from zjax.generation.tickets import Delta
from zjax.serve.replies import CHAT, COMPLETION, Choice, Piece, Reply, Token, join

A, B, C = b"abc"
TOKENIZER = dataclasses.replace(make_bytes(), special_tokens={"<end>": 256})


def delta(text, ids, logprobs, best_ids, best_logprobs, reason=None):
    width = len(best_ids[0]) if best_ids else 0
    return Delta(
        1,
        text,
        ids,
        np.array(logprobs, np.float32),
        np.array(best_ids, np.int32).reshape(len(ids), width),
        np.array(best_logprobs, np.float32).reshape(len(ids), width),
        reason,
    )


def test_tokens_know_their_texts_and_places():
    choice = Choice(3, TOKENIZER, [C], has_logprobs=True)
    first = choice.read(
        delta("ab", [A, B], [-1, -2], [[A, C], [C, 195]], [[-1, -3]] * 2)
    )
    last = choice.read(delta("", [256], [-0.5], [[256, A]], [[-0.5, -4]], "stop"))
    assert first == Piece(
        3,
        "ab",
        [
            Token("a", -1.0, [("a", -1.0), ("c", -3.0)], 0),
            Token("b", -2.0, [("c", -1.0), ("\ufffd", -3.0)], 1),
        ],
    )
    end = Token("<end>", -0.5, [("<end>", -0.5), ("a", -4.0)], 2)
    assert last == Piece(3, "", [end], "stop")
    assert choice.num_tokens == 3
    assert join([first, last]) == Piece(3, "ab", [*first.tokens, end], "stop")
    assert choice.begin() is None


def test_a_text_begins_with_a_prompt_that_is_scored():
    """Fails if a token of the prompt is lost, doubled, or stands at another place."""
    choice = Choice(0, TOKENIZER, [A, 256, B], has_logprobs=True, echo="ab")
    scores = delta("", [256, B], [-1, -2], [[C], [B]], [[-0.5], [-2]])
    arrays = scores.logprobs, scores.best_ids, scores.best_logprobs
    pieces = [choice.begin()]
    for part in (slice(1), slice(1, 2)):
        pieces.append(choice.read_prompt(Logprobs(*(x[part] for x in arrays))))
    pieces.append(choice.read(delta("c", [C], [-3], [[C]], [[-3]], "length")))
    tokens = [
        Token("a", None, [], 0),
        Token("<end>", -1.0, [("c", -0.5)], 1),
        Token("b", -2.0, [("b", -2.0)], 6),
        Token("c", -3.0, [("c", -3.0)], 7),
    ]
    assert join(pieces) == Piece(0, "abc", tokens, "length")
    assert pieces[0] == Piece(0, "ab", tokens[:1])
    assert choice.num_tokens == 1
    found = COMPLETION.logprobs(tokens)
    assert found["token_logprobs"] == [None, -1.0, -2.0, -3.0]
    assert found["top_logprobs"][:2] == [None, {"c": -0.5, "<end>": -1.0}]
    plain = Choice(0, TOKENIZER, [A, B], has_logprobs=False, echo="ab")
    assert plain.begin() == Piece(0, "ab", [])


def test_the_first_token_of_a_prompt_is_written_as_at_the_start():
    """Fails if the start of a prompt is decoded as if a text stood before."""
    words = dataclasses.replace(
        TOKENIZER, decode=lambda ids: "".join(f" w{x}" for x in ids)[1:]
    )
    choice = Choice(0, words, [4, 5], has_logprobs=True, echo="w4 w5")
    scores = Logprobs(np.zeros(1), np.zeros((1, 0)), np.zeros((1, 0)))
    pieces = [choice.begin(), choice.read_prompt(scores)]
    assert [x.text for piece in pieces for x in piece.tokens] == ["w4", " w5"]


def test_a_token_keeps_the_space_that_a_decoder_drops_at_the_start():
    words = dataclasses.replace(
        TOKENIZER, decode=lambda ids: "".join(f" w{x}" for x in ids)[1:]
    )
    choice = Choice(0, words, [4, 5], has_logprobs=True)
    found = choice.read(delta(" w6", [6], [-1], [[7]], [[-0.5]]))
    assert found.tokens == [Token(" w6", -1.0, [(" w7", -0.5)], 0)]


PIECE = Piece(0, "é", [Token("é", -1.0, [("\ufffd", -0.5)], 0)], "length")


def written(form, has_logprobs=True):
    reply = Reply(form, "tiny", has_logprobs=has_logprobs)
    return reply.whole([PIECE], {"total_tokens": 1}), reply.chunk(PIECE), reply


def test_a_completion_is_written():
    whole, chunk, reply = written(COMPLETION)
    assert whole["id"].startswith("cmpl-") and whole["id"] == chunk["id"]
    assert (whole["object"], whole["model"]) == ("text_completion", "tiny")
    assert whole["usage"] == {"total_tokens": 1}
    choice = {
        "index": 0,
        "text": "é",
        "logprobs": {
            "text_offset": [0],
            "token_logprobs": [-1.0],
            "tokens": ["é"],
            "top_logprobs": [{"\ufffd": -0.5, "é": -1.0}],
        },
        "finish_reason": "length",
    }
    assert whole["choices"] == chunk["choices"] == [choice]
    assert reply.first(0) is None
    assert written(COMPLETION, False)[0]["choices"][0]["logprobs"] is None


def test_a_chat_completion_is_written():
    whole, chunk, reply = written(CHAT)
    assert whole["id"].startswith("chatcmpl-")
    assert (whole["object"], chunk["object"]) == (
        "chat.completion",
        "chat.completion.chunk",
    )
    top = [{"token": "\ufffd", "logprob": -0.5, "bytes": None}]
    token = {"token": "é", "logprob": -1.0, "bytes": [195, 169], "top_logprobs": top}
    end = {
        "logprobs": {"content": [token], "refusal": None},
        "finish_reason": "length",
    }
    message = {"role": "assistant", "content": "é"}
    assert whole["choices"] == [{"index": 0, "message": message} | end]
    assert chunk["choices"] == [{"index": 0, "delta": {"content": "é"}} | end]
    [choice] = reply.first(2)["choices"]
    assert choice["index"] == 2
    assert choice["delta"] == {"role": "assistant", "content": ""}
