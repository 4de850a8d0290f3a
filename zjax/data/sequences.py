"""Encodes examples: prompt and completion of each sequence as ids with a loss."""

import abc
import collections
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from absl import logging

from zjax.data.chat import Chat
from zjax.data.conversations import Conversation
from zjax.data.examples import Example, Text
from zjax.data.tables import BrokenRecords
from zjax.data.tokenizer import Tokenizer

Sequences = list[tuple[np.ndarray, np.ndarray]]
"""Ids, int32[n], and flags of the tokens with a loss, uint8[n], of each sequence."""


class Mismatches:
    """Adds to each example of a split the prompt with another prompt's completion.

    Log-ratios of completions that fit a prompt by chance alone estimate the divergence
    from a reference (KTO, arXiv:2402.01306, section 4). The completion is that of the
    nearest example before; the examples of the first prompt wait for the second prompt.
    """

    def __init__(self) -> None:
        self._waiting: list[Example] = []
        self._last: Example | None = None
        # The newest example of another prompt than the last.
        self._other: Example | None = None

    def add(self, example: Example) -> list[Example]:
        """Takes the next example; returns examples with a mismatched completion."""
        if self._last is not None and self._last.prompt != example.prompt:
            self._other = self._last
        self._last = example
        if self._other is None:
            self._waiting.append(example)
            return []
        waiting, self._waiting = self._waiting, []
        return [
            *(_with_mismatched(each, example) for each in waiting),
            _with_mismatched(example, self._other),
        ]

    def finish(self, split: str) -> None:
        """Refuses a split of one prompt, whose examples wait in vain."""
        if self._waiting:
            problem = f"has the only prompt of the split {split}, and the divergence "
            problem += "needs completions of another one"
            remedy = "give records of more prompts, or another --validation_fraction"
            self._waiting[0].refuse(problem, remedy)


def _with_mismatched(example: Example, other: Example) -> Example:
    """Adds the prompt of an example with the completion of another example."""
    sequences = example.sequences[0], example.followed_by(other)
    return dataclasses.replace(example, sequences=sequences)


class Encoder(abc.ABC):
    """Turns examples into ids."""

    def encode(
        self, examples: Sequence[Example], broken: BrokenRecords
    ) -> Iterator[Sequences | None]:
        """Encodes the sequences of each example; None for an example left out."""
        flat = [each for example in examples for each in example.sequences]
        encoded = iter(self._encode_each(flat))
        for example in examples:
            drawn = list(itertools.islice(encoded, len(example.sequences)))
            yield broken.read(self._sequences, example, drawn)

    def warn_of_open_ends(self) -> tuple[int, ...]:
        """Warns of completions whose end is not trained; returns ids of ends."""
        return ()

    def _sequences(self, example: Example, drawn: list[Any]) -> Sequences:
        """Ids and flags of an example, each with a token that can be predicted."""
        sequences = [
            self._finish(sequence, given)
            for sequence, given in zip(example.sequences, drawn, strict=True)
        ]
        # The first token of a sequence is no target.
        if not all(answers[1:].any() for _, answers in sequences):
            example.refuse("has a completion of no token", "leave it out")
        return sequences

    @abc.abstractmethod
    def _encode_each(self, sequences: Sequence[Text | Conversation]) -> Iterator[Any]:
        """Encodes many sequences at once, in order."""

    @abc.abstractmethod
    def _finish(
        self, sequence: Text | Conversation, given: Any
    ) -> tuple[np.ndarray, np.ndarray]:
        """Makes ids and flags of what `_encode_each` gave for a sequence."""


class TextEncoder(Encoder):
    """Encodes plain texts: prompt and completion apart, as generation reads them."""

    def __init__(self, vocabulary: Tokenizer, special_tokens: bool):
        self._vocabulary, self._special_tokens = vocabulary, special_tokens
        _ = vocabulary.end_id  # refused once, not for each example

    def _encode_each(self, sequences: Sequence[Text | Conversation]) -> Iterator[Any]:
        texts = [text for sequence in sequences for text in _parts(sequence)]
        ids = self._vocabulary.encode_texts(texts, self._special_tokens)
        return zip(ids[0::2], ids[1::2], strict=True)

    def _finish(
        self, sequence: Text | Conversation, given: Any
    ) -> tuple[np.ndarray, np.ndarray]:
        prompt, completion = self._vocabulary.begin(given[0]), given[1]
        ids = self._vocabulary.end(np.concatenate([prompt, completion]))
        return ids, (np.arange(len(ids)) >= len(prompt)).astype(np.uint8)


class TalkEncoder(Encoder):
    """Encodes conversations by a chat template."""

    def __init__(self, chat: Chat):
        self._chat = chat
        self._ends = collections.Counter[int | None]()

    def warn_of_open_ends(self) -> tuple[int, ...]:
        """Warns of completions that end without a special token."""
        return end_ids(self._chat, self._ends)

    def _encode_each(self, sequences: Sequence[Text | Conversation]) -> Iterator[Any]:
        return self._chat.render_each(
            each for each in sequences if isinstance(each, Conversation)
        )

    def _finish(
        self, sequence: Text | Conversation, given: Any
    ) -> tuple[np.ndarray, np.ndarray]:
        assert isinstance(sequence, Conversation)
        samples, ends = self._chat.samples_of(sequence, given)
        if len(samples) > 1:
            problem = "has a completion of several answers, of which the template of "
            problem += f"{self._chat.folder} rewrites the first,"
            sequence.refuse(problem, "compare the last answers alone")
        self._ends.update(ends)
        return samples[0]


def end_ids(chat: Chat, ends: collections.Counter[int | None]) -> tuple[int, ...]:
    """Ids that end answers; a warning counts answers without a special token."""
    if num_open := ends.pop(None, 0):
        logging.warning(
            "the chat template of %s ends %s of %s answers without a special token: "
            "no end of these answers is trained, and a text generated after them may "
            "not end; write eos_token behind each answer in the template",
            chat.folder,
            f"{num_open:,}",
            f"{num_open + ends.total():,}",
        )
    return tuple(each for each in ends if each is not None)


def _parts(sequence: Text | Conversation) -> Text:
    assert isinstance(sequence, Text)
    return sequence
