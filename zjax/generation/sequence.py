"""One sample: tokens, pages and progress of a prompt and the continuation."""

import dataclasses
from collections import abc
from typing import Any

from zjax.generation.pool import page_keys


@dataclasses.dataclass(eq=False)
class Sequence:
    """One sample of a prompt, from arrival to end.

    A pass is planned before the results of earlier passes are on the host. Positions
    are known then, values are not: `num_planned` and `num_pending` are ahead of
    `tokens`. Only behind drafts, which may be wrong, are positions unknown, too.

    Args:
        prompt: Token ids, 1 or more.
        max_new_tokens: Most tokens to generate, 1 or more; 0 scores the prompt alone.
        end_ids: Ids that end the sequence; the id itself is a generated token.
        is_streamed: Whether somebody reads each token as it comes, so that passes
            yield one token at a time.
        salt: Everything besides the tokens that keys and values depend on: pages are
            shared by sequences of equal salt. A model whose positions depend on the
            length of the whole text needs one.
        prompt_logprobs: Most likely tokens to find at each place of the prompt, beside
            the log-probability of the token; None scores no token of the prompt.
        records: Whether the experts of the tokens are wanted.
        request: What the caller wants to find again; the scheduler does not read it.

    Attributes:
        tokens: Prompt and generated tokens that the host knows.
        num_planned: Tokens with keys in the cache, or on the way there by a planned
            pass.
        num_pending: Generated tokens that are still on the device; with drafts the most
            that there may be.
        num_to_read: Tokens that the host gives to the device: all that were known when
            the sequence got a slot. Later tokens are on the device.
        num_scored: First tokens of the prompt behind which the host has scores.
        num_published: First pages that have been offered to other sequences.
        arrival: Number of the sequence in order of arrival.
        slot: Index of the state on the device; None while the sequence waits.
        shard: Data shard of the slot.
        pages: Pages of the cache, in order of positions.
        num_behind: First pages, of which no token to come sees a key: the sequence does
            not hold them, and `pages` has the sink in their place.
        experts: Experts of the tokens that have been read, uint8 or int16 [tokens,
            layers with experts, experts of a token], with rows for tokens to come; None
            before a pass has returned some.
        finish_reason: `stop`, `length`, `abort` or a reason of the caller; None before
            the end.

    Example:
        >>> sequence = Sequence([5, 6, 7], max_new_tokens=4)
        >>> sequence.tokens += [8]
        >>> sequence.generated, sequence.num_left
        ([8], 3)
    """

    prompt: abc.Sequence[int]
    max_new_tokens: int
    end_ids: abc.Set[int] = frozenset()
    is_streamed: bool = False
    salt: bytes = b""
    prompt_logprobs: int | None = None
    records: bool = False
    request: Any = None
    tokens: list[int] = dataclasses.field(init=False)
    num_planned: int = dataclasses.field(default=0, init=False)
    num_pending: int = dataclasses.field(default=0, init=False)
    num_to_read: int = dataclasses.field(default=0, init=False)
    num_published: int = dataclasses.field(default=0, init=False)
    num_scored: int = dataclasses.field(default=0, init=False)
    arrival: int = dataclasses.field(default=-1, init=False)
    slot: int | None = dataclasses.field(default=None, init=False)
    shard: int = dataclasses.field(default=0, init=False)
    pages: list[int] = dataclasses.field(default_factory=list, init=False)
    num_behind: int = dataclasses.field(default=0, init=False)
    experts: Any = dataclasses.field(default=None, init=False)
    finish_reason: str | None = dataclasses.field(default=None, init=False)
    _keys: list[bytes] = dataclasses.field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.tokens = [int(token) for token in self.prompt]

    @property
    def generated(self) -> list[int]:
        """Generated tokens that the host knows."""
        return self.tokens[len(self.prompt) :]

    @property
    def num_left(self) -> int:
        """Number of tokens that are neither generated nor planned."""
        num_generated = len(self.tokens) - len(self.prompt) + self.num_pending
        return self.max_new_tokens - num_generated

    @property
    def is_reading(self) -> bool:
        """Whether some tokens of the host are not planned yet."""
        return self.num_planned < self.num_to_read

    @property
    def is_decoding(self) -> bool:
        """Whether the device has the next token to read, and another is wanted."""
        return self.slot is not None and not self.is_reading and self.num_left > 0

    @property
    def is_scored(self) -> bool:
        """Whether no score of the prompt is wanted that the host does not have."""
        return self.prompt_logprobs is None or self.num_scored == len(self.prompt)

    @property
    def num_reusable(self) -> int:
        """Number of first tokens that need not be read where the cache has keys."""
        # The last token yields the next one; a token to score yields the score.
        return len(self.tokens) - 1 if self.is_scored else self.num_scored

    def keys(self, page_size: int) -> list[bytes]:
        """Returns the keys of all full pages of known tokens."""
        if len(self.tokens) // page_size > len(self._keys):
            known = self._keys
            self._keys = page_keys(self.tokens, page_size, known, salt=self.salt)
        return self._keys

    def add_scores(self, positions: range) -> range:
        """Counts positions of the prompt as scored; returns the new positions.

        A sequence that was preempted may score positions twice.
        """
        new = range(max(positions.start, self.num_scored), positions.stop)
        self.num_scored += len(new)
        if self.max_new_tokens == 0 and self.is_scored:
            self.finish_reason = "length"
        return new

    def append(self, tokens: abc.Iterable[int]) -> list[int]:
        """Adds tokens up to the end of the sequence; returns the added tokens."""
        added = []
        for token in tokens:
            self.tokens.append(token)
            added.append(token)
            if token in self.end_ids:
                self.finish_reason = "stop"
                break
            if len(self.tokens) - len(self.prompt) == self.max_new_tokens:
                self.finish_reason = "length"
                break
        return added
