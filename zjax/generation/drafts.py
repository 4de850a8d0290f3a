"""Drafts: guesses of the next tokens of a text, copied from earlier tokens.

Texts often repeat. The tokens that followed the same words earlier are read as drafts
in one pass, which costs hardly more than a pass of one token. A wrong draft costs time
and nothing else.

Reference: Yang et al. (arXiv:2304.04487) copy drafts from a text.
"""

import collections
import itertools
import weakref
from collections.abc import Iterable, Iterator

from zjax.generation.sequence import Sequence

MIN_GAIN = 0.5
"""Tokens that drafts must be expected to add to each text of a pass.

A pass with drafts computes more tokens, and is planned when the results of the last are
on the host, where passes without drafts are planned ahead.
"""
_RATE = 1 / 16
"""Weight of the last token in the accuracy of a drafter."""
_NUM_PROMPTS = 64
"""Prompts whose texts are remembered for later texts."""
_MAX_NGRAMS = 1 << 16
"""N-grams of a prompt and its texts, beyond which they are forgotten."""


class Drafter:
    """Proposes what followed the latest earlier occurrence of a text's last tokens.

    The time of a token and of a proposal does not depend on the length of the text.

    Args:
        prompt: Token ids at the start of the text.
        max_ngram: Number of last tokens to look for first, 1 or more.
        min_ngram: Number of last tokens to look for last, 1 to `max_ngram`.
        other: Drafter of another text of the prompt, with equal numbers of tokens:
            both drafters then know the n-grams of both texts.

    Attributes:
        accuracy: Share of the tokens behind the prompt that were proposed, or would
            have been, 0 to 1. The last 16 tokens or so count most.

    Example:
        >>> drafter = Drafter([5, 6, 7, 8, 5, 6])
        >>> drafter.propose(3)
        [7, 8, 5]
        >>> drafter.extend([7, 9, 9])
        >>> drafter.propose(2), drafter.accuracy
        ([9, 9], 0.054931640625)
    """

    def __init__(
        self,
        prompt: Iterable[int],
        *,
        max_ngram: int = 3,
        min_ngram: int = 1,
        other: "Drafter | None" = None,
    ):
        self.accuracy = 0.0
        self._tokens = [int(token) for token in prompt]
        self._sizes = range(max_ngram, min_ngram - 1, -1)
        # Of each n-gram, the text and the place behind its latest occurrence.
        self._places: dict[tuple[int, ...], tuple[list[int], int]] = {}
        if other is not None:
            self._places = other._places
            return
        for size in self._sizes:
            columns = (self._tokens[first:] for first in range(size))
            places = zip(itertools.repeat(self._tokens), range(size, self.num_tokens))
            # The end of the text is no earlier occurrence of itself.
            self._places.update(zip(zip(*columns, strict=False), places, strict=False))

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the text so far."""
        return len(self._tokens)

    @property
    def num_ngrams(self) -> int:
        """Number of n-grams of the text, and of all texts that it shares them with."""
        return len(self._places)

    def extend(self, tokens: Iterable[int]) -> None:
        """Adds tokens to the text."""
        for token in tokens:
            ngrams = [*self._last_ngrams()]
            text, place = self._find(ngrams)
            is_right = place < len(text) and text[place] == token
            self.accuracy += _RATE * (is_right - self.accuracy)
            for ngram in ngrams:
                self._places[ngram] = self._tokens, len(self._tokens)
            self._tokens.append(int(token))

    def propose(self, num_drafts: int) -> list[int]:
        """Proposes the next tokens, `num_drafts` at most; often none."""
        text, place = self._find(self._last_ngrams())
        drafts = text[place : place + num_drafts]
        if text is self._tokens:  # goes on with the copies
            period = len(text) - place
            while len(drafts) < num_drafts:
                drafts.append(drafts[len(drafts) - period])
        return drafts

    def expect(self, num_drafts: int) -> float:
        """Returns the number of drafts that are expected to be right."""
        return sum((self.accuracy**x for x in range(1, num_drafts + 1)), 0.0)

    def _find(self, ngrams: Iterable[tuple[int, ...]]) -> tuple[list[int], int]:
        """Returns the text and the place behind the first n-gram that is known."""
        known = (self._places[x] for x in ngrams if x in self._places)
        return next(known, ([], 0))

    def _last_ngrams(self) -> Iterator[tuple[int, ...]]:
        """Yields the n-grams at the end of the text, the longest first."""
        for size in self._sizes:
            if size <= len(self._tokens):
                yield tuple(self._tokens[-size:])


class Speculator:
    """Proposes drafts for sequences, and tells when drafts pay.

    The drafter of each sequence is asked for every token that arrives, drafted or not,
    so that it costs no pass to find out that a text does not repeat, or that it does.
    Drafts of a text also come from other texts of an equal prompt: samples, and earlier
    requests.

    Args:
        num_drafts: Most drafts of a sequence in a pass, 0 or more.

    Example:
        >>> speculator, sequence = Speculator(3), Sequence([5, 6], max_new_tokens=40)
        >>> speculator.pays([sequence])
        False
        >>> sequence.tokens += [7, 5, 6, 7] * 3
        >>> speculator.pays([sequence]), speculator.propose(sequence)
        (True, [7, 5, 6])
    """

    def __init__(self, num_drafts: int):
        self.num_drafts = num_drafts
        self._drafters = weakref.WeakKeyDictionary[Sequence, Drafter]()
        # By the hash of the prompt: a wrong text would only propose wrong drafts.
        self._latest = collections.OrderedDict[int, Drafter]()

    def pays(self, sequences: Iterable[Sequence]) -> bool:
        """Whether drafts are expected to add `MIN_GAIN` tokens to each sequence."""
        gains = [self._follow(x).expect(self.num_drafts) for x in sequences]
        return sum(gains) >= MIN_GAIN * len(gains)

    def propose(self, sequence: Sequence) -> list[int]:
        """Proposes the next tokens; the last that is wanted needs no draft."""
        num_drafts = min(self.num_drafts, sequence.num_left - 1)
        return self._follow(sequence).propose(num_drafts)

    def _follow(self, sequence: Sequence) -> Drafter:
        """Returns the drafter of a sequence, with all tokens that the host knows."""
        drafter = self._drafters.get(sequence)
        if drafter is None:
            drafter = self._drafters[sequence] = self._start(sequence)
        drafter.extend(sequence.tokens[drafter.num_tokens :])
        return drafter

    def _start(self, sequence: Sequence) -> Drafter:
        """Makes the drafter of a sequence, beside the latest of the prompt."""
        prompt = hash(tuple(sequence.prompt))
        other = self._latest.pop(prompt, None)
        if other is not None and other.num_ngrams > _MAX_NGRAMS:
            other = None
        drafter = self._latest[prompt] = Drafter(sequence.prompt, other=other)
        if len(self._latest) > _NUM_PROMPTS:
            self._latest.popitem(last=False)
        return drafter
