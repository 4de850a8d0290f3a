"""Replies of OpenAI's API: completions and chat completions, whole or in chunks."""

import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from zjax.data.tokenizer import Tokenizer
from zjax.generation.sampling import Logprobs
from zjax.generation.tickets import Delta


class Token(NamedTuple):
    """A token of a text or a prompt, for a reply with log-probabilities."""

    text: str
    logprob: float | None
    """None for the first token of a prompt, which nothing predicts."""
    best: list[tuple[str, float]]
    """Most likely tokens at the place, the best first."""
    offset: int
    """Characters of all tokens before."""


class Piece(NamedTuple):
    """News of one text of a reply."""

    choice: int
    """Number of the text in the reply."""
    text: str
    tokens: list[Token]
    """Empty without log-probabilities."""
    finish_reason: str | None = None


class Choice:
    """Reads the news of one text, and knows where each token stands.

    Args:
        index: Number of the text in the reply.
        tokenizer: Tokenizer that decodes.
        prompt_ids: Ids before the text.
        has_logprobs: Whether the reply has log-probabilities.
        echo: Prompt with which the text begins, which then has log-probabilities, too;
            None begins with the text itself.
    """

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        *,
        has_logprobs: bool,
        echo: str | None = None,
    ):
        self.index, self.num_tokens = index, 0
        self._decode, self._has_logprobs = tokenizer.decode, has_logprobs
        self._names = {x: name for name, x in tokenizer.special_tokens.items()}
        self._echo, self._unread = echo, [*prompt_ids]
        """Tokens of the prompt whose log-probabilities have not come."""
        self._last = [*prompt_ids[-1:]] if echo is None else []
        self._offset = 0

    @property
    def is_begun(self) -> bool:
        """Whether the tokens of the prompt, as far as the reply has them, have come."""
        return self._echo is None or not self._has_logprobs or not self._unread

    def begin(self) -> Piece | None:
        """Returns the prompt as the first news of a reply; None without an echo."""
        if self._echo is None:
            return None
        first = []
        if self._has_logprobs:
            token = self._unread.pop(0)
            first = [Token(self._add(token, ""), None, [], 0)]
        return Piece(self.index, self._echo, first)

    def read_prompt(self, scores: Logprobs) -> Piece:
        """Turns log-probabilities of the next tokens of the prompt into news."""
        ids = self._unread[: len(scores.logprobs)]
        del self._unread[: len(ids)]
        return Piece(self.index, "", [*self._tokens(ids, scores)])

    def read(self, delta: Delta) -> Piece:
        """Turns a delta into news of a reply."""
        self.num_tokens += len(delta.ids)
        tokens = []
        if self._has_logprobs:
            scores = Logprobs(delta.logprobs, delta.best_ids, delta.best_logprobs)
            tokens = [*self._tokens(delta.ids, scores)]
        return Piece(self.index, delta.text, tokens, delta.finish_reason)

    def _tokens(self, ids: Sequence[int], scores: Logprobs) -> Iterable[Token]:
        """Yields tokens with log-probabilities."""
        rows = zip(ids, *(x.tolist() for x in scores), strict=True)
        for token, logprob, best_ids, best_logprobs in rows:
            before, offset = self._decode(self._last), self._offset
            texts = [self._text_of(each, before) for each in best_ids]
            best = [*zip(texts, best_logprobs, strict=True)]
            yield Token(self._add(token, before), logprob, best, offset)

    def _add(self, token: int, before: str) -> str:
        """Goes on behind a token; returns the text that the token adds."""
        text = self._text_of(token, before)
        self._last, self._offset = [token], self._offset + len(text)
        return text

    def _text_of(self, token: int, before: str) -> str:
        """Returns the text that a token adds behind the last token, `before`."""
        if token in self._names:
            return self._names[token]
        # Many decoders drop a space before the first token.
        whole = self._decode([*self._last, token])
        if whole.startswith(before):
            return whole[len(before) :]
        return self._decode([token])


class Form(NamedTuple):
    """How an endpoint writes replies."""

    prefix: str
    """Start of the ids of replies."""
    name: str
    """Name of a whole reply in `object`."""
    chunk_name: str
    whole: Callable[[Piece], dict[str, Any]]
    """Writes a whole text as an entry of `choices`, without log-probabilities."""
    part: Callable[[Piece], dict[str, Any]]
    """Writes news of a text as an entry of `choices`, without log-probabilities."""
    logprobs: Callable[[Sequence[Token]], dict[str, Any]]


class Reply:
    """Writes one reply, whole or chunk by chunk.

    Args:
        form: Form of the endpoint.
        model: Name of the model.
        has_logprobs: Whether choices have log-probabilities.
    """

    def __init__(self, form: Form, model: str, *, has_logprobs: bool):
        self._form, self._has_logprobs = form, has_logprobs
        self._start = {"id": f"{form.prefix}-{uuid.uuid4().hex}"}
        self._rest = {"created": int(time.time()), "model": model}

    def whole(self, pieces: Iterable[Piece], usage: dict[str, Any]) -> dict[str, Any]:
        """Writes the whole reply."""
        choices = [self._choice(self._form.whole, piece) for piece in pieces]
        return self._write(self._form.name, choices) | {"usage": usage}

    def chunk(self, piece: Piece) -> dict[str, Any]:
        """Writes news of one text."""
        choices = [self._choice(self._form.part, piece)]
        return self._write(self._form.chunk_name, choices)

    def last(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Writes the chunk behind all texts, with the numbers of tokens."""
        return self._write(self._form.chunk_name, []) | {"usage": usage}

    def first(self, index: int) -> dict[str, Any] | None:
        """Writes the chunk before the first news of a text; None if there is none."""
        if self._form is not CHAT:
            return None
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "finish_reason": None}
        return self._write(self._form.chunk_name, [choice | {"logprobs": None}])

    def _write(self, name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._start | {"object": name} | self._rest | {"choices": choices}

    def _choice(
        self, write: Callable[[Piece], dict[str, Any]], piece: Piece
    ) -> dict[str, Any]:
        """Writes news of a text with log-probabilities and the reason of the end."""
        logprobs = self._form.logprobs(piece.tokens) if self._has_logprobs else None
        end = {"logprobs": logprobs, "finish_reason": piece.finish_reason}
        return {"index": piece.choice} | write(piece) | end


def join(pieces: Sequence[Piece]) -> Piece:
    """Joins all news of one text."""
    text = "".join(piece.text for piece in pieces)
    tokens = [token for piece in pieces for token in piece.tokens]
    return Piece(pieces[-1].choice, text, tokens, pieces[-1].finish_reason)


def count_usage(num_read: int, num_written: int) -> dict[str, Any]:
    """Counts the tokens of a request."""
    return {
        "prompt_tokens": num_read,
        "completion_tokens": num_written,
        "total_tokens": num_read + num_written,
    }


def _completion_logprobs(tokens: Sequence[Token]) -> dict[str, Any]:
    """Writes log-probabilities as lists of all tokens."""
    return {
        "text_offset": [token.offset for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "tokens": [token.text for token in tokens],
        "top_logprobs": [_top(token) for token in tokens],
    }


def _top(token: Token) -> dict[str, float] | None:
    """Returns the most likely tokens and the token itself, the best first."""
    if token.logprob is None:
        return None
    top = dict[str, float]()
    for text, logprob in (*token.best, (token.text, token.logprob)):
        top.setdefault(text, logprob)  # parts of characters have one text
    return top


def _chat_logprobs(tokens: Sequence[Token]) -> dict[str, Any]:
    """Writes log-probabilities as an object for each token."""
    content = [
        _named(token.text, token.logprob)
        | {"top_logprobs": [_named(*each) for each in token.best]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def _named(text: str, logprob: float | None) -> dict[str, Any]:
    """Writes a token with bytes; None for a part of a character."""
    known = None if "\ufffd" in text else [*text.encode()]
    return {"token": text, "logprob": logprob, "bytes": known}


COMPLETION = Form(
    "cmpl",
    "text_completion",
    "text_completion",
    lambda piece: {"text": piece.text},
    lambda piece: {"text": piece.text},
    _completion_logprobs,
)
CHAT = Form(
    "chatcmpl",
    "chat.completion",
    "chat.completion.chunk",
    lambda piece: {"message": {"role": "assistant", "content": piece.text}},
    lambda piece: {"delta": {"content": piece.text} if piece.text else {}},
    _chat_logprobs,
)
