"""Text of a row while tokens come one by one, up to a string that ends it."""

from collections.abc import Sequence

from zjax.data.tokenizer import Tokenizer

_UNKNOWN = "\ufffd"
"""Character that a decoder writes for bytes that are no character, or not yet."""
_MAX_OPEN = 3
"""Largest number of `_UNKNOWN` at the end of a text that the next byte may replace."""
_WINDOW = 16
"""Number of tokens that decode alike without the tokens before, but for a space."""


class TextStream:
    """Turns tokens into text that later tokens cannot change.

    A token that ends inside a character waits for the character, and the end of a text
    waits as long as a stop string may begin there. The time of a token does not depend
    on the number of tokens before.

    A decoder may rewrite text that was told: `ByteFallback` does so to a character in
    bytes, if bytes follow that are no character.

    Args:
        tokenizer: Tokenizer that decodes.
        stop: Strings that end the text, each of one character or more.
        prompt: Ids before the first token, in whose light the first token decodes: a
            leading space may be written or not.

    Example:
        >>> from zjax.data.tokenizer import make_bytes
        >>> stream = TextStream(make_bytes(), stop=["!?"])
        >>> [stream.push(token) for token in "é!!?x".encode()][:4]
        [('', False), ('é', False), ('', False), ('!', False)]
        >>> stream.ended_by
        '!?'
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), prompt: Sequence[int] = ()
    ):
        self.ended_by: str | None = None
        """Stop string that ended the text."""
        self._decode, self._stop = tokenizer.decode, tuple(stop)
        special = {*tokenizer.special_tokens.values(), *tokenizer.end_ids}
        # Left out, as any number of tokens without a text may come.
        self._silent = {token for token in special if not tokenizer.decode([token])}
        self._tokens = [int(token) for token in prompt if token not in self._silent]
        text = self._decode(self._tokens)
        self._num_told, self._num_waiting, self._held = _num_final(text), 0, ""
        self._shorten(text)

    def push(self, token: int) -> tuple[str, bool]:
        """Adds a token; returns the new text, and whether a stop string has ended it.

        A token behind the end adds no text.
        """
        if token in self._silent or self.ended_by is not None:
            return "", self.ended_by is not None
        new = self._until_stop(self._held + self._add(int(token)))
        num_held = 0 if self.ended_by is not None else self._num_open(new)
        self._held = new[len(new) - num_held :]
        return new[: len(new) - num_held], self.ended_by is not None

    def flush(self) -> str:
        """Ends the text; returns what was held back."""
        if self.ended_by is not None:
            return ""
        text = self._decode(self._tokens)
        rest, self._held = self._held + text[self._num_told :], ""
        self._num_told = len(text)
        return self._until_stop(rest)

    def write(self, tokens: Sequence[int]) -> str:
        """Adds all tokens of a text, decoded at once, and ends the text.

        The text is the text of `push` and `flush`, without a look for stop strings, and
        takes a small part of the time.
        """
        self._tokens += [int(token) for token in tokens if token not in self._silent]
        return self.flush()

    def _add(self, token: int) -> str:
        """Adds a token; returns the text that has become final."""
        self._tokens.append(token)
        text = self._decode(self._tokens)
        is_open = text.endswith(_UNKNOWN)
        self._num_waiting = self._num_waiting + 1 if is_open else 0
        # Before a character is whole, `ByteFallback` shows no character in bytes.
        if 0 < self._num_waiting <= _MAX_OPEN:
            return ""
        end = max(self._num_told, _num_final(text))
        new, self._num_told = text[self._num_told : end], end
        self._shorten(text)
        return new

    def _shorten(self, text: str) -> None:
        """Drops tokens that the text of later tokens does not depend on."""
        if len(self._tokens) < 2 * _WINDOW:
            return
        num_untold = len(text) - self._num_told
        # One of the next starts is the start of a character.
        for size in range(_WINDOW, _WINDOW + 4):
            tail = self._decode(self._tokens[-size:])
            if text.endswith(tail) and len(tail) > num_untold:
                self._tokens = self._tokens[-size:]
                self._num_told = len(tail) - num_untold
                return

    def _until_stop(self, text: str) -> str:
        """Cuts a text before the stop string that is complete first, if there is one.

        Of two that end together the longer one counts.
        """
        starts = {stop: text.find(stop) for stop in self._stop}
        found = [stop for stop in self._stop if starts[stop] >= 0]
        if not found:
            return text
        first = min(found, key=lambda stop: (starts[stop] + len(stop), -len(stop)))
        self.ended_by = first
        return text[: starts[first]]

    def _num_open(self, text: str) -> int:
        """Counts the characters at the end of a text that may begin a stop string."""
        longest = max((len(stop) - 1 for stop in self._stop), default=0)
        for number in range(min(longest, len(text)), 0, -1):
            tail = text[len(text) - number :]
            if any(stop.startswith(tail) for stop in self._stop):
                return number
        return 0


def _num_final(text: str) -> int:
    """Counts the characters of a text that later bytes cannot replace."""
    tail = text[-_MAX_OPEN:]
    return len(text) - len(tail) + len(tail.rstrip(_UNKNOWN))
