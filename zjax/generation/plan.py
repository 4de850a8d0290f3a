"""A pass as arrays of few shapes: tokens to read, places of results."""

import dataclasses
from collections.abc import Sequence as List
from typing import NamedTuple

import numpy as np

from zjax.generation.sequence import Sequence

MAX_STEPS = 8
"""Most tokens that a lane reads one after another in a pass."""


class Size(NamedTuple):
    """Shape of a compiled pass."""

    lanes: int
    """Sequences that read tokens of the device, one after another."""
    chunks: int = 0
    """Chunks of prompts, each of one sequence."""
    width: int = 1
    """Tokens that a lane reads at once: the last token, and drafts of the next."""

    def num_tokens(self, chunk_size: int) -> int:
        """Counts the tokens that a pass of the size computes at once."""
        return self.lanes * self.width + self.chunks * chunk_size


class Lanes(NamedTuple):
    """Decode part of a pass: each lane continues one sequence.

    Step s of a lane reads the last token of the slot at position `starts + s`, if s is
    below `counts`, and yields the next token. A lane of width above 1 reads the last
    token and `counts - 1` drafts in one step. A lane without a sequence has the slot
    `max_rows` and count 0.
    """

    slots: np.ndarray
    """int32[lanes]."""
    starts: np.ndarray
    """int32[lanes], position of the first token read."""
    counts: np.ndarray
    """int32[lanes], tokens that the lane reads, up to `num_steps * width`."""


class Chunks(NamedTuple):
    """Prompt part of a pass: each chunk has consecutive tokens of one sequence.

    The device has the tokens of a slot since admission. A pass may have several chunks
    of one sequence: all write keys before any attends. An unused chunk has the slot
    `max_rows` and count 0.
    """

    slots: np.ndarray
    """int32[chunks]."""
    starts: np.ndarray
    """int32[chunks], position of the first token."""
    counts: np.ndarray
    """int32[chunks], tokens of the chunk, up to the chunk size."""
    ends: np.ndarray
    """bool[chunks], whether the last token yields the first new token of the slot."""


class Task(NamedTuple):
    """Tokens that a sequence reads in one lane or chunk."""

    sequence: Sequence
    slot: int
    start: int
    """Position of the first token read."""
    num_tokens: int
    num_new: int
    """New tokens; a chunk yields 1 at the end of the prompt, else 0."""


class Place(NamedTuple):
    """Place of the new tokens of a sequence among the results of a pass."""

    sequence: Sequence
    column: int
    """Lane, or number of lanes plus the chunk."""
    num_new: int
    """New tokens, from the first step on; with drafts the most that may come."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """One pass: tokens that the device reads, and places of the results.

    Args:
        number: Number of the pass, from 0 on; passes run in this order.
        size: Shape of the compiled pass.
        num_steps: Tokens that lanes read one after another; 1 in a pass with chunks or
            drafts.
        lanes: Decode part.
        chunks: Prompt part.
        table: int32[max_rows + 1, max_pages], pages of each slot; 0, the sink, behind
            the pages of a slot and in the last row. The array is not written again, and
            is the array of the previous plan if no page has changed.
        admitted: Slots with a new owner; the engine sets the slots before the pass,
            with all tokens that the sequence has.
        places: Places of new tokens in the results.
    """

    number: int
    size: Size
    num_steps: int
    lanes: Lanes
    chunks: Chunks
    table: np.ndarray
    admitted: tuple[tuple[int, Sequence], ...]
    places: tuple[Place, ...]


def lay_lanes(tasks: List[Task], num_lanes: int, no_slot: int) -> Lanes:
    """Lays tasks into the arrays of a pass, in order."""
    slots = np.full(num_lanes, no_slot, np.int32)
    starts, counts = np.zeros((2, num_lanes), np.int32)
    slots[: len(tasks)] = [task.slot for task in tasks]
    starts[: len(tasks)] = [task.start for task in tasks]
    counts[: len(tasks)] = [task.num_tokens for task in tasks]
    return Lanes(slots, starts, counts)


def lay_chunks(tasks: List[Task], num_chunks: int, no_slot: int) -> Chunks:
    """Lays tasks into the arrays of a pass, in order."""
    ends = np.zeros(num_chunks, bool)
    ends[: len(tasks)] = [task.num_new > 0 for task in tasks]
    return Chunks(*lay_lanes(tasks, num_chunks, no_slot), ends)


def find_places(
    lanes: List[Task], chunks: List[Task], num_lanes: int
) -> tuple[Place, ...]:
    """Returns the places of all new tokens."""
    columns = [*enumerate(lanes), *enumerate(chunks, start=num_lanes)]
    return tuple(
        Place(task.sequence, column, task.num_new)
        for column, task in columns
        if task.num_new
    )
