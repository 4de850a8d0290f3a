"""Speculation by n-grams: drafts of the host, and their verification on the device.

A text often repeats what it has said. The tokens that followed the same words earlier
are read as drafts in one pass, which costs hardly more than a pass of one token.

Verification is exact without a rule of rejection. A draw depends on the logits, the
seed and the position alone, so that the token of each position is drawn as it would be
without drafts, and a draft is right if it is that token. Texts are the texts without
speculation, as far as the logits of a pass of several tokens are.

Reference: Leviathan et al. (arXiv:2211.17192) verify drafts of any model; Yang et al.
(arXiv:2304.04487) copy drafts from a text.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Int32

from zjax.generation.sampling import SamplingRows, choose_tokens


class Drafter:
    """Proposes what followed the latest earlier occurrence of a text's last tokens.

    The time of a token and of a proposal does not depend on the length of the text.

    Args:
        prompt: Token ids at the start of the text.
        max_ngram: Number of last tokens to look for first, 1 or more.
        min_ngram: Number of last tokens to look for last, 1 to `max_ngram`.
        other: Drafter of another sample of the prompt, with equal numbers of tokens:
            the two propose each other's tokens too.

    Example:
        >>> drafter = Drafter([5, 6, 7, 8, 5, 6])
        >>> drafter.propose(3)
        [7, 8, 5]
        >>> drafter.extend([7, 9, 9])
        >>> drafter.propose(2)
        [9, 9]
    """

    def __init__(
        self,
        prompt: Iterable[int],
        *,
        max_ngram: int = 3,
        min_ngram: int = 1,
        other: "Drafter | None" = None,
    ):
        self._tokens: list[int] = []
        self._sizes = range(max_ngram, min_ngram - 1, -1)
        # Of each n-gram, the text and the place behind its latest occurrence.
        self._places: dict[tuple[int, ...], tuple[list[int], int]] = (
            {} if other is None else other._places
        )
        self.extend(prompt)

    def extend(self, tokens: Iterable[int]) -> None:
        """Adds tokens to the text."""
        for token in tokens:
            # Only now, as the end of a text is no earlier occurrence of itself.
            for ngram in self._last_ngrams():
                self._places[ngram] = self._tokens, len(self._tokens)
            self._tokens.append(int(token))

    def propose(self, num_drafts: int) -> list[int]:
        """Proposes the next tokens, `num_drafts` at most; often none."""
        for ngram in self._last_ngrams():
            if ngram in self._places:
                return self._continue(*self._places[ngram], num_drafts)
        return []

    def _continue(self, text: list[int], place: int, num_drafts: int) -> list[int]:
        """Copies tokens of a text; the drafter's own text goes on with the copies."""
        drafts = text[place : place + num_drafts]
        if text is self._tokens:
            period = len(text) - place
            while len(drafts) < num_drafts:
                drafts.append(drafts[len(drafts) - period])
        return drafts

    def _last_ngrams(self) -> Iterator[tuple[int, ...]]:
        """Yields the n-grams at the end of the text, the longest first."""
        for size in self._sizes:
            if size <= len(self._tokens):
                yield tuple(self._tokens[-size:])


class Verified(NamedTuple):
    """Chosen tokens of several positions, with natural logarithms of probabilities."""

    tokens: Int32[Array, "R T"]
    logprobs: Float32[Array, "R T"]
    best_ids: Int32[Array, "R T N"]
    """Most likely tokens, the best first."""
    best_logprobs: Float32[Array, "R T N"]
    num_new: Int32[Array, " R"]
    """Number of new tokens of each row, 1 to T; later columns mean nothing."""


def verify(
    logits: Float[Array, "R T V"],
    drafts: Int[Array, "R D"],
    num_drafts: Int[Array, " R"],
    rows: SamplingRows,
    history: Int[Array, "R S"],
    prompt_lengths: Int[Array, " R"],
    lengths: Int[Array, " R"],
    *,
    num_best: int = 0,
) -> Verified:
    """Chooses tokens as far as drafts are right, and one more.

    Column t of `logits` follows the last known token and the first t of the D = T - 1
    drafts, of which a row has `num_drafts`, 0 to D. The other arguments are the
    arguments of `choose_tokens`; `history` need not have the drafts. A row may go on
    behind an end id: whoever appends the tokens stops there.
    """
    numbers = jnp.arange(logits.shape[1], dtype=jnp.int32)
    row_numbers = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    columns = lengths[:, None] + numbers[None, :-1]
    # Penalties of a position read the drafts before it, which are right if it counts.
    history = history.at[row_numbers, columns].set(drafts, mode="drop")

    def choose(logits, number):
        known = prompt_lengths, lengths + number
        return choose_tokens(logits, rows, history, *known, num_best=num_best)

    chosen = jax.vmap(choose, in_axes=(1, 0), out_axes=1)(logits, numbers)
    is_draft = numbers[None, :-1] < num_drafts[:, None]
    is_right = is_draft & (drafts == chosen.tokens[:, :-1])
    num_right = jnp.cumprod(is_right.astype(jnp.int32), axis=1).sum(axis=1)
    return Verified(*chosen, num_right + 1)
